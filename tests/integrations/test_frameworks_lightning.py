"""Lightning's Trainer with its own loop: the bits with a scheduler are those without."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from lightning.pytorch.callbacks import BaseFinetuning, EMAWeightAveraging, ModelCheckpoint
from lightning.pytorch.utilities import grad_norm
from support.frameworks import Predictor, Run, Sentences, Training, adamw, assert_same, compare, dtypes, everything_in
from support.visible import bits, state_bits
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from superadam import SpeculativeCPUAdamW
from superadam.integrations.lightning import Offload

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(240),
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning"),
    pytest.mark.usefixtures("one_torch_thread", "no_network"),
]


@pytest.fixture(autouse=True, scope="module")
def _quiet() -> Iterator[None]:
    logger = logging.getLogger("lightning.pytorch")
    level = logger.level
    logger.setLevel(logging.ERROR)
    yield
    logger.setLevel(level)


class Module(lightning.LightningModule):
    """What Lightning trains; logs losses, and the norms that users ask for."""

    def __init__(self, dtype: torch.dtype, *, norms: bool = False, moments: str = "fp32") -> None:
        super().__init__()
        self.model = Predictor(dtype)
        self.optimizer: SpeculativeCPUAdamW | None = adamw(self.model, moments=moments)
        self.norms = norms
        self.logged: list[dict[str, Any]] = []

    def configure_optimizers(self) -> Optimizer:
        assert self.optimizer is not None
        return self.optimizer

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        loss: Tensor = self.model(batch)
        self.logged.append({"loss": loss.detach()})
        return loss

    def validation_step(self, batch: Tensor, index: int) -> None:
        self.logged.append({"validation": self.model(batch)})

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        if self.norms:
            for norm_type in (1, 2, "inf"):
                self.logged[-1].update({str((norm_type, k)): v for k, v in grad_norm(self, norm_type).items()})


class Manual(Module):
    """The same, with a loop of its own inside a training step."""

    def __init__(self, dtype: torch.dtype, clip: dict[str, Any]) -> None:
        super().__init__(dtype)
        self.automatic_optimization = False
        self.clip = clip

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        loss = super().training_step(batch, index)
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        self.clip_gradients(optimizer, **self.clip)
        optimizer.step()
        return loss


class Limiting(Manual):
    """A loop that leaves clipping to our optimizer, through what Lightning hands out in its place."""

    def __init__(self, dtype: torch.dtype, way: str) -> None:
        super().__init__(dtype, {})
        self.way = way

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        loss = Module.training_step(self, batch, index)
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        if self.way == "attribute":
            optimizer.max_grad_norm = 0.1
            assert optimizer.max_grad_norm == self.optimizer.max_grad_norm == 0.1
        else:
            self.logged[-1]["norm"] = optimizer.clip_grad_norm_(0.1)
        optimizer.step()
        outcome = self.optimizer.last_outcome
        assert outcome is not None
        assert optimizer.last_outcome is outcome
        self.logged[-1].update(kind=outcome.kind, outcome=outcome.grad_norm)
        return loss


def fitted(module: Module, run: Run, *, resume: str | None = None, **options: Any) -> None:
    """Train with a scheduler open around all that Lightning does, before training and after it."""
    if module.optimizer is not None:
        run.open(module.optimizer, module)
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    chosen = {"max_epochs": 2, "enable_checkpointing": False, "num_sanity_val_steps": 0, **quiet, **options}
    batches = DataLoader(Sentences(), batch_size=2)
    lightning.Trainer(accelerator="cpu", **chosen).fit(module, batches, batches, ckpt_path=resume)
    run.logged += module.logged


def automatic(
    dtype: torch.dtype, *, norms: bool = False, callback: Callable[[], lightning.Callback] | None = None, **options: Any
) -> Training:
    def train(run: Run) -> None:
        callbacks = [callback()] if callback else []
        fitted(Module(dtype, norms=norms), run, callbacks=callbacks, **options)

    return train


@pytest.mark.covering(1)
@dtypes
@pytest.mark.parametrize("size", [1.2, 0.1])
def test_clipping_by_norm(dtype: torch.dtype, size: float) -> None:
    compare(automatic(dtype, gradient_clip_val=size), dtype, accepts=size > 0.1)


@dtypes
def test_clipping_by_value(dtype: torch.dtype) -> None:
    compare(automatic(dtype, gradient_clip_val=0.01, gradient_clip_algorithm="value"), dtype, accepts=None)


@pytest.mark.covering(1)
@dtypes
@pytest.mark.parametrize("steps", [1, 2, 3])
def test_accumulation(dtype: torch.dtype, steps: int) -> None:
    """The last step of an epoch has fewer micro-batches."""
    compare(automatic(dtype, accumulate_grad_batches=steps), dtype)


def test_accumulation_with_clipping() -> None:
    compare(automatic(torch.bfloat16, accumulate_grad_batches=3, gradient_clip_val=0.69))


def test_model_in_bf16_by_precision() -> None:
    compare(automatic(torch.bfloat16, precision="bf16-true", gradient_clip_val=1.2))


@pytest.mark.covering(1)
@pytest.mark.parametrize("size", [None, 0.5])
@pytest.mark.parametrize("precision", ["bf16-mixed", "32-true"])
def test_precision(precision: str, size: float | None) -> None:
    compare(automatic(torch.float32, precision=precision, gradient_clip_val=size), torch.float32)


def test_detection_of_anomalies() -> None:
    compare(automatic(torch.bfloat16, detect_anomaly=True, gradient_clip_val=1.2))


@dtypes
def test_norms_of_all_parameters(dtype: torch.dtype) -> None:
    seen = compare(automatic(dtype, norms=True), dtype)
    assert sum("grad_" in name for name in seen) == 14 * 3 * 16  # one of each parameter, and one of all


@pytest.mark.covering(1)
@dtypes
@pytest.mark.parametrize(("algorithm", "size"), [("norm", 1.2), ("value", 0.01)])
def test_manual_optimization(dtype: torch.dtype, algorithm: str, size: float) -> None:
    clip = {"gradient_clip_algorithm": algorithm, "gradient_clip_val": size}
    compare(lambda run: fitted(Manual(dtype, clip), run), dtype, accepts=True if algorithm == "norm" else None)


@pytest.mark.covering(1)
@dtypes
@pytest.mark.parametrize("way", ["attribute", "method"])
def test_our_own_limit_through_what_lightning_hands_out(dtype: torch.dtype, way: str) -> None:
    """`self.optimizers()` is an object of another class, which Lightning makes and keeps with the optimizer."""
    seen = compare(lambda run: fitted(Limiting(dtype, way), run), dtype, accepts=False)
    assert {value for name, value in seen.items() if name.endswith("kind")} == {"<StepKind.CLIPPED: 'clipped'>"}


def test_both_ways_of_setting_our_limit_are_one() -> None:
    ways: list[dict[str, Any]] = [
        everything_in(lambda run, way=way: fitted(Limiting(torch.bfloat16, way), run), scheduled=True)
        for way in ("attribute", "method")
    ]
    assert ways[0].items() <= ways[1].items()


def test_weights_that_are_averaged() -> None:
    """They take the place of those that are trained while these are validated, and at the end."""
    compare(automatic(torch.bfloat16, callback=lambda: EMAWeightAveraging(decay=0.5)))


class Unfreezing(BaseFinetuning):
    """Trains the first layers from the second epoch on."""

    def freeze_before_training(self, module: Any) -> None:
        self.freeze([module.model.embedding, module.model.blocks[0]])

    def finetune_function(self, module: Any, epoch: int, optimizer: Optimizer) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group([module.model.embedding, module.model.blocks[0]], optimizer)


class Late(Module):
    """Makes its optimizer when Lightning asks for one, and opens the scheduler when training begins."""

    def __init__(self, dtype: torch.dtype, run: Run) -> None:
        super().__init__(dtype)
        self.optimizer = None
        self.run = run

    def configure_optimizers(self) -> Optimizer:
        self.optimizer = adamw(self.model)
        return self.optimizer

    def on_train_start(self) -> None:
        assert self.optimizer is not None
        self.run.open(self.optimizer, self)


@dtypes
def test_layers_that_are_trained_later(dtype: torch.dtype) -> None:
    seen = compare(lambda run: fitted(Late(dtype, run), run, callbacks=[Unfreezing()]), dtype)
    assert sum(name.startswith("parameter") for name in seen) == 15


@pytest.mark.parametrize("moments", ["fp32", "bf16"])
def test_resumption(moments: str, tmp_path: Path) -> None:
    """A checkpoint is continued alike, whether or not a scheduler was at work before or is now."""
    wholes = []
    for saved in (False, True):
        folder = tmp_path / str(saved)

        def whole(run: Run, folder: Path = folder) -> None:
            saving = ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1)
            fitted(Module(torch.bfloat16, moments=moments), run, callbacks=[saving], enable_checkpointing=True)
            del run.logged[:14]

        wholes.append(everything_in(whole, scheduled=saved, accepts=True))
        for scheduled in (False, True):
            resumed = everything_in(
                lambda run, folder=folder: fitted(
                    Module(torch.bfloat16, moments=moments), run, resume=str(folder / "epoch=0.ckpt")
                ),
                scheduled=scheduled,
                accepts=True,
            )
            assert_same(wholes[0], resumed)
    assert_same(*wholes)


class Rivals(lightning.LightningModule):
    """Two models with an optimizer each; the second is trained on what the first one makes of a batch."""

    optimizer = None  # there are two, which are made late

    def __init__(self, dtype: torch.dtype, run: Run) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.run = run
        self.models = torch.nn.ModuleList([Predictor(dtype), Predictor(dtype)])
        self.logged: list[dict[str, Any]] = []

    def configure_optimizers(self) -> tuple[Optimizer, Optimizer]:
        first, second = map(adamw, self.models)
        return first, second

    def on_train_start(self) -> None:
        for optimizer, model in zip(self.optimizers(use_pl_optimizer=False), self.models, strict=True):
            self.run.open(optimizer, model)

    def training_step(self, batch: Tensor, index: int) -> None:
        first, second = self.optimizers()
        for optimizer, sign in ((first, 1.0), (second, -1.0)):
            with optimizer.toggle_model():
                losses = [model(batch) for model in self.models]
                loss = losses[0] * sign + losses[1]
                optimizer.zero_grad()
                self.manual_backward(loss)
                self.clip_gradients(optimizer, gradient_clip_val=1.2)
                optimizer.step()
                self.logged.append({"loss": loss.detach()})

    def validation_step(self, batch: Tensor, index: int) -> None: ...


@dtypes
def test_two_optimizers(dtype: torch.dtype) -> None:
    """Each has a scheduler, and freezes the other's parameters while it is at work."""
    seen = compare(lambda run: fitted(Rivals(dtype, run), run), dtype)
    assert sum(name.startswith("parameter 1") for name in seen) == 15


# ---- superadam.integrations.lightning.Offload ---------------------------------------------------------------------


def fit(module: Module, folder: Path, callbacks: list[Any], **options: Any) -> None:
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "accelerator": "cpu"}
    trainer = lightning.Trainer(
        default_root_dir=folder, max_epochs=2, callbacks=callbacks, enable_model_summary=False, **{**quiet, **options}
    )
    trainer.fit(module, DataLoader(Sentences(), batch_size=2))


WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "clipped": {"gradient_clip_val": 1.0},
    "micro-batches": {"accumulate_grad_batches": 2},
}


@dtypes
@pytest.mark.covering(1)
@pytest.mark.parametrize("way", WAYS)
def test_training_has_the_bits_of_training_without_the_callback(tmp_path: Path, way: str, dtype: torch.dtype) -> None:
    seen = []
    for callbacks in ([], [Offload(num_threads=1, bucket_numel=500)]):
        module = Module(dtype)
        fit(module, tmp_path, callbacks, **WAYS[way])
        assert module.optimizer is not None
        logged = [bits(value) for one in module.logged for value in one.values()]
        seen.append((state_bits(module.optimizer), logged))
    assert seen[0] == seen[1]
    assert callbacks[0].schedulers == []
    assert (module.optimizer.statistics.accepted > 0) is (dtype == torch.bfloat16)


def test_a_loop_of_its_own(tmp_path: Path) -> None:
    seen = []
    for callbacks in ([], [Offload(num_threads=1, bucket_numel=500)]):
        module = Manual(torch.bfloat16, {"gradient_clip_val": 1.0, "gradient_clip_algorithm": "norm"})
        fit(module, tmp_path, callbacks)
        assert module.optimizer is not None
        seen.append(state_bits(module.optimizer))
    assert seen[0] == seen[1]
    assert module.optimizer.statistics.accepted > 0


def test_an_error_closes_the_scheduler(tmp_path: Path) -> None:
    class Failing(Module):
        def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
            if index == 3:
                assert offload.schedulers
                raise KeyError("planted")
            return super().training_step(batch, index)

    module, offload = Failing(torch.bfloat16), Offload(num_threads=1)
    with pytest.raises(KeyError, match="planted"):
        fit(module, tmp_path, [offload])
    assert offload.schedulers == []
    assert not any(one._post_accumulate_grad_hooks for one in module.parameters())


def test_what_cannot_be_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="bucket_size"):
        Offload(bucket_size=3)
    module = Module(torch.bfloat16)
    module.optimizer = torch.optim.AdamW(module.parameters())  # type: ignore[assignment]
    with pytest.raises(TypeError, match="expected a SpeculativeCPUAdam"):
        fit(module, tmp_path, [Offload()])
