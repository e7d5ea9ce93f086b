"""Lightning's Trainer with its own loop and `Offload`: the bits with a scheduler are those without."""

import logging
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import lightning
import pytest
import torch
from lightning.pytorch.callbacks import BaseFinetuning, EMAWeightAveraging, ModelCheckpoint
from lightning.pytorch.utilities import grad_norm
from support import frameworks
from support.frameworks import Predictor, Run, Sentences, Training, adamw, assert_same, compare, dtypes, everything_in
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from superadam.integrations.lightning import Offload

pytestmark = [pytest.mark.slow, *frameworks.MARKS]


@pytest.fixture(autouse=True, scope="module")
def _quiet():
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
        self.moments, self.norms = moments, norms
        self.logged: list[dict[str, Any]] = []

    def configure_optimizers(self) -> Optimizer:
        return adamw(self.model, moments=self.moments)

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
    """The same, with a loop of its own inside a training step, which limits gradients in a way of its own."""

    def __init__(self, dtype: torch.dtype, limit: Callable[[Any, Any], None]) -> None:
        super().__init__(dtype)
        self.automatic_optimization = False
        self.limit = limit

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        loss = super().training_step(batch, index)
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        self.limit(self, optimizer)
        optimizer.step()
        outcome = optimizer.optimizer.last_outcome
        assert optimizer.last_outcome is outcome is not None
        if self.limit in (limit_by_attribute, limit_by_method):  # else who clips is no matter of the step
            self.logged[-1].update(kind=outcome.kind, outcome=outcome.grad_norm)
        return loss


def limit_by_attribute(module: Any, optimizer: Any) -> None:
    optimizer.max_grad_norm = 0.1
    assert optimizer.max_grad_norm == optimizer.optimizer.max_grad_norm == 0.1


def limit_by_method(module: Any, optimizer: Any) -> None:
    module.logged[-1]["norm"] = optimizer.clip_grad_norm_(0.1)


class Watched(Offload):
    """Shows a run the schedulers, which are closed when training ends."""

    def __init__(self, run: Run) -> None:
        super().__init__(num_threads=1, bucket_numel=500)
        self.run = run

    def on_train_start(self, *arguments: Any) -> None:
        super().on_train_start(*arguments)
        self.run.schedulers += self.schedulers


def fitted(module: Any, run: Run, *, resume: str | None = None, callbacks: Any = (), **options: Any) -> None:
    """Train, with `Offload` if there are to be schedulers."""
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    chosen = {"max_epochs": 2, "enable_checkpointing": False, "num_sanity_val_steps": 0, **quiet, **options}
    batches = DataLoader(Sentences(), batch_size=2)
    own = [Watched(run)] if run.scheduled else []
    trainer = lightning.Trainer(accelerator="cpu", callbacks=[*own, *callbacks], **chosen)
    trainer.fit(module, batches, batches, ckpt_path=resume)
    assert all(callback.schedulers == [] for callback in own)
    assert "load_optimizer_state_dict" not in vars(trainer.strategy)  # which is as it was
    run.optimizers += trainer.optimizers
    run.logged += module.logged


def automatic(dtype: torch.dtype, *, norms: bool = False, moments: str = "fp32", **options: Any) -> Training:
    return lambda run: fitted(Module(dtype, norms=norms, moments=moments), run, **options)


CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "no limit": {},
    "a limit that clips some steps": {"gradient_clip_val": 1.2},
    "a limit that clips every step": {"gradient_clip_val": 0.1},
    "clipped values": {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
    "two micro-batches, of which the last step of an epoch has fewer": {"accumulate_grad_batches": 2},
    "three micro-batches, clipped": {"accumulate_grad_batches": 3, "gradient_clip_val": 0.69},
    "detection of anomalies": {"gradient_clip_val": 1.2, "detect_anomaly": True},
}


@dtypes
@pytest.mark.covering(1)
@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_training(dtype, name):
    accepts = {"a limit that clips every step": False, "clipped values": None}.get(name, True)
    compare(automatic(dtype, **CONFIGURATIONS[name]), dtype, accepts=accepts)


@dtypes
def test_precision(dtype):
    precision = "bf16-true" if dtype == torch.bfloat16 else "bf16-mixed"
    compare(automatic(dtype, gradient_clip_val=1.2, precision=precision), dtype)


def test_weights_that_are_averaged():
    """They take the place of trained ones through `.data`, which masters show after the next step at the latest."""
    seen = []
    for scheduled in (False, True):
        averaging = [EMAWeightAveraging(decay=0.5)]
        found = everything_in(automatic(torch.bfloat16, callbacks=averaging), scheduled=scheduled, accepts=True)
        seen.append({name: value for name, value in found.items() if not name.endswith("master")})
    assert_same(*seen)


@dtypes
def test_norms_of_all_parameters(dtype):
    seen = compare(automatic(dtype, norms=True), dtype)
    assert sum("grad_" in name for name in seen) == 14 * 3 * 16  # one of each parameter, and one of all


@pytest.mark.covering(1)
@dtypes
@pytest.mark.parametrize(("algorithm", "size"), [("norm", 1.2), ("value", 0.01)])
def test_manual_optimization(dtype, algorithm, size):
    def clip(module, optimizer):
        module.clip_gradients(optimizer, gradient_clip_algorithm=algorithm, gradient_clip_val=size)

    compare(lambda run: fitted(Manual(dtype, clip), run), dtype, accepts=True if algorithm == "norm" else None)


@dtypes
def test_our_own_limit_through_what_lightning_hands_out(dtype):
    """`self.optimizers()` is an object of another class, which Lightning makes and keeps with the optimizer."""
    ways = [
        compare(lambda run, limit=limit: fitted(Manual(dtype, limit), run), dtype, accepts=False)
        for limit in (limit_by_attribute, limit_by_method)
    ]
    assert {value for name, value in ways[0].items() if name.endswith("kind")} == {"<StepKind.CLIPPED: 'clipped'>"}
    assert ways[0].items() <= ways[1].items()  # which has norms, too


class Unfreezing(BaseFinetuning):
    """Trains the first layers from the second epoch on."""

    def freeze_before_training(self, module: Any) -> None:
        self.freeze([module.model.embedding, module.model.blocks[0]])

    def finetune_function(self, module: Any, epoch: int, optimizer: Optimizer) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group([module.model.embedding, module.model.blocks[0]], optimizer)


@dtypes
def test_layers_that_are_trained_later(dtype):
    seen = compare(automatic(dtype, callbacks=[Unfreezing()]), dtype)
    assert sum(name.startswith("parameter") for name in seen) == 15


def test_state_is_loaded_where_it_stays(tmp_path, monkeypatch):
    """Lightning would move it to the device of the model."""
    run = Run(scheduled=True)
    saving = {"callbacks": [ModelCheckpoint(tmp_path, filename="last")], "enable_checkpointing": True}
    automatic(torch.bfloat16, max_epochs=1, **saving)(run)
    monkeypatch.setattr("lightning.pytorch.strategies.strategy._optimizer_to_device", Mock(side_effect=AssertionError))
    automatic(torch.bfloat16, resume=str(tmp_path / "last.ckpt"))(run)


@pytest.mark.parametrize("moments", ["fp32", "bf16"])
def test_resumption(moments, tmp_path):
    """A checkpoint is continued alike, whether or not a scheduler was at work before or is now."""
    seen = []
    for saved in (False, True):
        folder = tmp_path / str(saved)

        def whole(run, folder=folder):
            saving = ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1)
            automatic(torch.bfloat16, moments=moments, callbacks=[saving], enable_checkpointing=True)(run)
            del run.logged[:14]

        resumed = automatic(torch.bfloat16, moments=moments, resume=str(folder / "epoch=0.ckpt"))
        seen.append(everything_in(whole, scheduled=saved, accepts=True))
        seen += [everything_in(resumed, scheduled=scheduled, accepts=True) for scheduled in (False, True)]
    for one in seen[1:]:
        assert_same(seen[0], one)


class Rivals(lightning.LightningModule):
    """Two models with an optimizer each; the second is trained on what the first one makes of a batch."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.models = torch.nn.ModuleList([Predictor(dtype), Predictor(dtype)])
        self.logged: list[dict[str, Any]] = []

    def configure_optimizers(self) -> tuple[Optimizer, Optimizer]:
        return tuple(map(adamw, self.models))

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
def test_two_optimizers(dtype):
    """Each has a scheduler, and freezes the other's parameters while it is at work."""
    seen = compare(lambda run: fitted(Rivals(dtype), run), dtype)
    assert sum(name.startswith("parameter 1") for name in seen) == 15


def test_an_error_closes_the_scheduler():
    class Failing(Module):
        def training_step(self, batch, index):
            if index == 3:
                assert run.schedulers[0].statistics.buckets > 0
                raise KeyError("planted")
            return super().training_step(batch, index)

    module, run = Failing(torch.bfloat16), Run(scheduled=True)
    with pytest.raises(KeyError, match="planted"):
        fitted(module, run)
    assert not any(one._post_accumulate_grad_hooks for one in module.parameters())


def test_what_cannot_be_is_refused():
    with pytest.raises(TypeError, match="bucket_size"):
        Offload(bucket_size=3)
    module = Module(torch.bfloat16)
    module.configure_optimizers = lambda: torch.optim.AdamW(module.parameters())
    with pytest.raises(TypeError, match="expected a SpeculativeCPUAdam"):
        fitted(module, Run(scheduled=True))
