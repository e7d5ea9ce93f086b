"""Gradients that are on their way when hooks see them: nothing reads them before they are there."""

import functools
import random
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch
from offload.test_late_models import Model
from support.late_gradients import LateGradients, beside
from support.overlap import ImmediateDevice, ThreadDevice, adam
from support.visible import state_bits
from torch import nn

from superadam import OffloadScheduler
from superadam.devices import Device
from superadam.handles.taken_gradient import TakenGradient
from superadam.testing import SimulatedDevice

pytestmark = pytest.mark.filterwarnings("ignore:grad and param do not obey the gradient layout contract")


def read(model: Model) -> None:
    assert all(bool(parameter.grad.isfinite().all()) for parameter in model.parameters() if parameter.grad is not None)


BODIES: dict[str, Callable[[Model], Any]] = {
    "plain": lambda model: None,
    "edited": lambda model: [one.grad.clamp_(-0.1, 0.1) for one in (model.turned, model.layers[0].bias)],
    "clipped": lambda model: nn.utils.clip_grad_norm_(model.parameters(), 0.2),
    "read": read,
}
MICRO_BATCHES = {"one": (1, None), "two": (2, None), "two, summed on the host": (2, torch.float32)}
NUMELS = [1, 100, 5000, 10**6]
WHERE = ["device", "kept", "host", "both", "plain", "plain, at once"]
BECOME_SUM = TakenGradient.become_sum


def train(
    where: str, body: str, micro_batches: str, dtype: torch.dtype, seed: int, link: Any = "auto"
) -> dict[str, Any]:
    """Return all values after some steps, whose gradients are late unless they are made "in time"."""
    choices, streams = random.Random(seed), SimulatedDevice(seed, 0.1)
    model = Model(dtype)
    is_host = where in ("host", "plain", "plain, at once")
    of_row = {one: is_host or (where == "both" and row % 2 > 0) for row, one in enumerate(model.parameters())}
    device: Device = ThreadDevice()
    if where != "in time":
        arrivals = LateGradients(streams, of_row, lambda _: choices.randrange(4), of_row.__getitem__)
        device = streams
        if where in ("plain", "plain, at once"):
            device = beside(ThreadDevice() if where == "plain" else ImmediateDevice(), streams)
    optimizer = adam(model, max_grad_norm=None)
    count, sums = MICRO_BATCHES[micro_batches]
    options = {"gpu_buckets": 2 if where == "kept" else 0, "transfer_dtype": link, "num_threads": 1}
    moved = patch.object(
        TakenGradient,
        "become_sum",
        lambda taken, total: BECOME_SUM(taken, streams.accelerator.allocate(total, is_on_host=True)),
    )
    overlap = OffloadScheduler(optimizer, model, device=device, bucket_numel=NUMELS[seed], **options)
    with moved if device is streams else nullcontext(), overlap as scheduler:
        for step in range(4):
            for micro in range(count):
                is_last = micro == count - 1
                tokens = torch.randint(11, (2, 3), generator=torch.Generator().manual_seed(10 * step + micro))
                with nullcontext() if is_last or sums is None else scheduler.accumulate(sums):
                    (0.3 * (model(tokens) - 1).float().square().mean()).backward()
                    if where != "in time" and (not is_last or (body != "plain" and not is_host)):
                        arrivals.settle()
            BODIES[body](model)
            optimizer.step()
            optimizer.zero_grad()
            if where != "in time":
                arrivals.settle()
        assert scheduler.statistics.buckets > 0
        return state_bits(optimizer, without=["master"] * (dtype == torch.float32))  # the simulated device's alone


@functools.cache
def in_time(*how: Any) -> dict[str, Any]:
    return train("in time", *how)


@pytest.mark.slow
@pytest.mark.covering(1)
@pytest.mark.parametrize("micro_batches", MICRO_BATCHES)
@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("where", WHERE)
def test_training_has_the_bits_of_gradients_that_are_there(where: str, body: str, micro_batches: str) -> None:
    for seed in range(len(NUMELS)):
        how = body, micro_batches, (torch.bfloat16, torch.float32)[seed % 2], seed
        assert train(where, *how) == in_time(*how)


@pytest.mark.parametrize("where", WHERE)
def test_narrowed_gradients_are_read_once_they_are_there(where: str) -> None:
    for seed in range(3):
        how = "plain", "one", torch.float32, seed, torch.bfloat16
        assert train(where, *how) == in_time(*how)
