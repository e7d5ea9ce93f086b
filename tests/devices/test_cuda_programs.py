"""What programs do around a step has the bits that it has without a scheduler: on every GPU, and a simulated one."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from support.visible import state_bits
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from superadam import OffloadScheduler, SpeculativeCPUAdamW
from superadam.devices import Device
from superadam.testing import SimulatedDevice

GPUS = [f"cuda:{index}" for index in range(torch.cuda.device_count())] if torch.cuda.is_available() else []
STEPS = 6
OVERFLOWING = 3
"""The step with an infinite loss, where that is skipped."""


@dataclass
class Loop:
    """A small model, its optimizer, and where it computes."""

    model: nn.Sequential
    optimizer: SpeculativeCPUAdamW
    where: torch.device

    def batch(self, seed: int) -> Tensor:
        values = torch.randn(16, 64, generator=torch.Generator().manual_seed(seed))
        return values.to(self.where, next(self.model.parameters()).dtype)

    def loss(self, seed: int) -> Tensor:
        return error_of(self.model(self.batch(seed)))

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


def error_of(output: Tensor) -> Tensor:
    return 30 * (output.float() - 1).square().mean()


Iteration = Callable[[int], None]


def clipped(loop: Loop) -> Iteration:
    def iterate(seed: int) -> None:
        loop.loss(seed).backward()
        nn.utils.clip_grad_norm_(loop.model.parameters(), 0.5 if seed % 2 else 1e4)
        loop.step()

    return iterate


def scaled(loop: Loop) -> Iteration:
    scaler = torch.amp.GradScaler(loop.where.type, init_scale=2.0**10, growth_interval=2)

    def iterate(seed: int) -> None:
        loss = loop.loss(seed) * (torch.inf if seed == OVERFLOWING else 1.0)
        scaler.scale(loss).backward()
        if seed % 2:
            scaler.unscale_(loop.optimizer)
            nn.utils.clip_grad_norm_(loop.model.parameters(), 0.5)
        scaler.step(loop.optimizer)
        scaler.update()
        loop.optimizer.zero_grad()

    return iterate


def in_micro_batches(loop: Loop) -> Iteration:
    def iterate(seed: int) -> None:
        for micro in range(3):
            (loop.loss(10 * seed + micro) / 3).backward()
        loop.step()

    return iterate


def computed_again(loop: Loop, *, use_reentrant: bool) -> Iteration:
    def iterate(seed: int) -> None:
        x = loop.batch(seed).requires_grad_()
        for layer in loop.model:
            x = checkpoint(layer, x, use_reentrant=use_reentrant)
        error_of(x).backward()
        loop.step()

    return iterate


def under_autocast(loop: Loop) -> Iteration:
    def iterate(seed: int) -> None:
        with torch.autocast(loop.where.type, torch.bfloat16):
            loss = loop.loss(seed)
        loss.backward()
        loop.step()

    return iterate


def on_streams(loop: Loop) -> Iteration:
    """Backward runs on one stream of a GPU, and the step on another."""
    if loop.where.type != "cuda":
        return in_micro_batches(loop)
    side, usual = torch.cuda.Stream(loop.where), torch.cuda.current_stream(loop.where)

    def iterate(seed: int) -> None:
        side.wait_stream(usual)
        with torch.cuda.stream(side):
            loop.loss(seed).backward()
        usual.wait_stream(side)
        loop.step()

    return iterate


PROGRAMS: dict[str, tuple[torch.dtype, Callable[[Loop], Iteration]]] = {
    "clipped": (torch.bfloat16, clipped),
    "clipped fp32": (torch.float32, clipped),
    "scaled": (torch.float32, scaled),
    "in micro-batches": (torch.bfloat16, in_micro_batches),
    "computed again": (torch.bfloat16, lambda loop: computed_again(loop, use_reentrant=False)),
    "computed again in a backward of its own": (torch.bfloat16, lambda loop: computed_again(loop, use_reentrant=True)),
    "under autocast": (torch.float32, under_autocast),
    "on streams": (torch.bfloat16, on_streams),
}


def scheduler_of(loop: Loop, resident: int) -> OffloadScheduler:
    device: Device | None = SimulatedDevice(0) if loop.where.type == "cpu" else None
    options: dict[str, Any] = {"bucket_numel": 4096, "gpu_buckets": resident, "num_threads": 1, "device": device}
    return OffloadScheduler(loop.optimizer, loop.model, **options)


def trained(where: str, name: str, resident: int | None) -> dict[str, Any]:
    """Return what a program leaves; without a scheduler where `resident` is None."""
    dtype, make = PROGRAMS[name]
    torch.manual_seed(0)
    layers = [layer for _ in range(3) for layer in (nn.Linear(64, 64), nn.Tanh())]
    model = nn.Sequential(*layers).to("cpu" if where == "simulated" else where, dtype)
    loop = Loop(model, SpeculativeCPUAdamW(model.parameters(), lr=1e-3), next(model.parameters()).device)
    with nullcontext() if resident is None else scheduler_of(loop, resident) as scheduler:
        iterate = make(loop)
        for seed in range(STEPS):
            iterate(seed)
        if scheduler is not None:
            assert scheduler.statistics.buckets > STEPS
            assert (scheduler.statistics.resident_buckets > 0) is (resident > 0)
    return {**state_bits(loop.optimizer), "steps": loop.optimizer.statistics.steps}


@pytest.mark.covering
@pytest.mark.parametrize("resident", [0, 2])
@pytest.mark.parametrize("where", ["simulated", *GPUS])
@pytest.mark.parametrize("name", PROGRAMS)
def test_overlap_changes_no_bit(name, where, resident):
    assert trained(where, name, resident) == trained(where, name, None)
