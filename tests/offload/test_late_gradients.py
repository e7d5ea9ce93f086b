"""Gradients that are on their way when hooks see them: nothing reads them before they are there."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from support.late_gradients import LateGradients, beside
from support.overlap import ImmediateDevice, ThreadDevice, adam, everything
from torch import Tensor, nn

from superadam import OffloadScheduler
from superadam.devices import Device
from superadam.testing import SimulatedDevice

pytestmark = pytest.mark.filterwarnings("ignore:grad and param do not obey the gradient layout contract")

STEPS = 4


class Model(nn.Module):
    """Layers that buckets hold together, one that is cut, and one whose gradient lies in another order than it."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.default_generator.manual_seed(5)
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 600))
        self.turned = nn.Parameter(torch.randn(8, 4).t())
        self.to(dtype)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = inputs + inputs @ self.turned.t() @ self.turned
        return self.layers(hidden)


def loss_of(model: Model, seed: int) -> Tensor:
    inputs = torch.randn(4, 8, generator=torch.Generator().manual_seed(seed)).to(model.turned.dtype)
    return 0.3 * (model(inputs) - 1).float().square().mean()


Body = Callable[[Model], Any]


def edited(model: Model) -> None:
    for parameter in (model.turned, model.layers[0].bias):
        parameter.grad.clamp_(-0.1, 0.1)


def clipped(model: Model) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 0.2)


def read(model: Model) -> None:
    assert all(bool(parameter.grad.isfinite().all()) for parameter in model.parameters() if parameter.grad is not None)


BODIES: dict[str, Body | None] = {"plain": None, "edited": edited, "clipped": clipped, "read": read}
MICRO_BATCHES = {"one": (1, None), "two": (2, None), "two, summed on the host": (2, torch.float32)}
NUMELS = [1, 100, 5000, 10**6]
WHERE = ["device", "kept", "host", "both", "plain", "plain, at once"]


def devices_of(where: str, seed: int) -> tuple[Device, SimulatedDevice]:
    """Return a device, and the one whose streams make gradients."""
    streams = SimulatedDevice(seed, 0.1)
    if where in ("plain", "plain, at once"):
        return beside(ThreadDevice() if where == "plain" else ImmediateDevice(), streams), streams
    return streams, streams


def train(
    where: str, body: str, micro_batches: str, dtype: torch.dtype, seed: int, *, late: bool, link: Any = "auto"
) -> dict[str, Any]:
    """Return all values after some steps."""
    choices = random.Random(seed)
    model = Model(dtype)
    device, streams = devices_of(where, seed)
    on_host = [where not in ("device", "kept", "both") or (where == "both" and row % 2 > 0) for row in range(7)]
    of_row = dict(zip(model.parameters(), on_host, strict=True))
    arrivals = LateGradients(streams, of_row if late else (), lambda _: choices.randrange(4), of_row.__getitem__)
    optimizer = adam(model, max_grad_norm=None)
    count, sums = MICRO_BATCHES[micro_batches]
    with OffloadScheduler(
        optimizer,
        model,
        device=device,
        bucket_numel=NUMELS[seed],
        num_threads=1,
        gpu_buckets=2 if where == "kept" else 0,
        transfer_dtype=link,
    ) as scheduler:
        for step in range(STEPS):
            for micro in range(count):
                is_last = micro == count - 1
                with nullcontext() if is_last or sums is None else scheduler.accumulate(sums):
                    loss_of(model, 10 * step + micro).backward()
                    if not is_last or (body != "plain" and not all(on_host)):
                        arrivals.settle()
            change = BODIES[body]
            if change is not None:
                change(model)
            optimizer.step()
            optimizer.zero_grad()
            arrivals.settle()
        assert scheduler.statistics.buckets > 0
        return everything(model, optimizer)


@pytest.mark.slow
@pytest.mark.covering(1)
@pytest.mark.parametrize("micro_batches", MICRO_BATCHES)
@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("where", WHERE)
def test_training_has_the_bits_of_gradients_that_are_there(where: str, body: str, micro_batches: str) -> None:
    for seed in range(len(NUMELS)):
        dtype = (torch.bfloat16, torch.float32)[seed % 2]
        found, expected = (train(where, body, micro_batches, dtype, seed, late=late) for late in (True, False))
        assert found == expected


@pytest.mark.parametrize("where", WHERE)
def test_narrowed_gradients_are_read_once_they_are_there(where: str) -> None:
    for seed in range(3):
        found, expected = (
            train(where, "plain", "one", torch.float32, seed, late=late, link=torch.bfloat16) for late in (True, False)
        )
        assert found == expected
