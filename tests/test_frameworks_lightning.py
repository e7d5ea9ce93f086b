"""Lightning's Trainer with its own loop: the bits with a scheduler are those without."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import lightning
import pytest
import torch
from frameworks import Predictor, Result, Run, Sentences, Training, adamw, alone, compare, dtypes, everything_in
from lightning.pytorch.utilities import grad_norm
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.data import DataLoader

pytestmark = [pytest.mark.timeout(60), pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")]


@pytest.fixture(autouse=True, scope="module")
def _alone() -> Iterator[None]:
    logger = logging.getLogger("lightning.pytorch")
    level = logger.level
    logger.setLevel(logging.ERROR)
    with alone():
        yield
    logger.setLevel(level)


class Module(lightning.LightningModule):
    """What Lightning trains; logs losses, and the norms that users ask for."""

    def __init__(self, dtype: torch.dtype, *, norms: bool = False) -> None:
        super().__init__()
        self.model = Predictor(dtype)
        self.optimizer = adamw(self.model)
        self.norms = norms
        self.logged: list[dict[str, Any]] = []

    def configure_optimizers(self) -> Optimizer:
        return self.optimizer

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        loss: Tensor = self.model(batch)
        self.logged.append({"loss": loss.detach()})
        return loss

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


def fitted(module: Module, run: Run, **options: Any) -> Result:
    """Train with a scheduler open around all that Lightning does, before training and after it."""
    run.open(module.optimizer, module)
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = lightning.Trainer(accelerator="cpu", max_epochs=2, enable_checkpointing=False, **quiet, **options)
    trainer.fit(module, DataLoader(Sentences(), batch_size=2))
    return Result(module.optimizer, module.logged)


def automatic(dtype: torch.dtype, *, norms: bool = False, **options: Any) -> Training:
    return lambda run: fitted(Module(dtype, norms=norms), run, **options)


@dtypes
@pytest.mark.parametrize("size", [1.2, 0.1])
def test_clipping_by_norm(dtype: torch.dtype, size: float) -> None:
    compare(automatic(dtype, gradient_clip_val=size), dtype, accepts=size > 0.1)


@dtypes
def test_clipping_by_value(dtype: torch.dtype) -> None:
    compare(automatic(dtype, gradient_clip_val=0.01, gradient_clip_algorithm="value"), dtype, accepts=None)


@dtypes
@pytest.mark.parametrize("steps", [1, 2, 3])
def test_accumulation(dtype: torch.dtype, steps: int) -> None:
    """The last step of an epoch has fewer micro-batches."""
    compare(automatic(dtype, accumulate_grad_batches=steps), dtype)


def test_accumulation_with_clipping() -> None:
    compare(automatic(torch.bfloat16, accumulate_grad_batches=3, gradient_clip_val=0.69))


def test_model_in_bf16_by_precision() -> None:
    compare(automatic(torch.bfloat16, precision="bf16-true", gradient_clip_val=1.2))


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


@dtypes
@pytest.mark.parametrize(("algorithm", "size"), [("norm", 1.2), ("value", 0.01)])
def test_manual_optimization(dtype: torch.dtype, algorithm: str, size: float) -> None:
    clip = {"gradient_clip_algorithm": algorithm, "gradient_clip_val": size}
    compare(lambda run: fitted(Manual(dtype, clip), run), dtype, accepts=True if algorithm == "norm" else None)


@dtypes
@pytest.mark.parametrize("way", ["attribute", "method"])
def test_our_own_limit_through_what_lightning_hands_out(dtype: torch.dtype, way: str) -> None:
    """`self.optimizers()` is an object of another class, which Lightning makes and keeps beside the optimizer."""
    seen = compare(lambda run: fitted(Limiting(dtype, way), run), dtype, accepts=False)
    assert {value for name, value in seen.items() if name.endswith("kind")} == {"<StepKind.CLIPPED: 'clipped'>"}


def test_both_ways_of_setting_our_limit_are_one() -> None:
    ways = [
        everything_in(lambda run, way=way: fitted(Limiting(torch.bfloat16, way), run), scheduled=True)
        for way in ("attribute", "method")
    ]
    assert ways[0].items() <= ways[1].items()
