"""The way of one gradient is short: calls of the package's Python functions in backward and `step()`."""

import collections
import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from support.overlap import DeferredDevice, ThreadDevice, adam
from torch import nn

import superadam
from superadam import OffloadScheduler, SpeculativeCPUAdam, StepKind
from superadam.devices import Device

PACKAGE = str(Path(superadam.__file__).parent)

MOST = {"alone": (None, 68, 10), "step": (DeferredDevice, 78, 13), "worker": (ThreadDevice, 206, 22)}
"""Device (None: no scheduler), and the most calls and files in the thread that trains; the worker's calls run in
parallel. Each costs all who train small tensors."""
STEPS = 40


@contextlib.contextmanager
def counted() -> Iterator[collections.Counter[str]]:
    """Count the calls of functions of each file of the package, inside and in this thread."""
    calls: collections.Counter[str] = collections.Counter()

    def count(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            calls[frame.f_code.co_filename] += 1

    sys.setprofile(count)
    try:
        yield calls
    finally:
        sys.setprofile(None)


def calls_of_steps(
    dtype: torch.dtype, max_grad_norm: float | None, device: Device | None
) -> tuple[collections.Counter[str], StepKind]:
    """Return how often functions of each file were called in the step with the fewest calls, for one parameter, and
    the end of the last step.

    A worker that is late costs the others some more.
    """
    weight = nn.Parameter(torch.full((64, 64), 0.1, dtype=dtype))
    model = nn.ParameterList([weight])
    optimizer = adam(model, max_grad_norm=max_grad_norm)
    steps: list[collections.Counter[str]] = []
    with contextlib.nullcontext() if device is None else OffloadScheduler(optimizer, model, device=device) as scheduler:
        for _ in range(STEPS):
            optimizer.zero_grad()
            loss = weight.float().square().mean()
            with counted() as calls:
                loss.backward()
                optimizer.step()
            steps.append(calls)
        if scheduler is not None:
            assert scheduler.statistics.buckets == (STEPS if device.idle_cores() else 0)
    return min(steps[STEPS // 2 :], key=collections.Counter.total), optimizer.last_outcome.kind


@pytest.mark.parametrize("where", MOST)
@pytest.mark.parametrize("max_grad_norm", [None, 1e-6])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_gradient_takes_few_calls(dtype: torch.dtype, max_grad_norm: float | None, where: str) -> None:
    device, most_calls, most_files = MOST[where]
    calls, kind = calls_of_steps(dtype, max_grad_norm, device and device())
    assert kind is (StepKind.COMMITTED if max_grad_norm is None else StepKind.CLIPPED)
    words = f"{calls.total()} calls in {len(calls)} files: {calls}"
    assert calls.total() <= most_calls, words
    assert len(calls) <= most_files, words
    sys.stdout.write(words)  # pytest -s shows it


def test_a_step_without_a_scheduler_calls_nothing_for_each_parameter() -> None:
    """Also where some groups alone have state for amsgrad."""
    totals = set()
    for length in (10, 110):
        weights = nn.ParameterList(torch.ones(64) for _ in range(length))
        optimizer = SpeculativeCPUAdam([{"params": weights[:4], "amsgrad": True}, {"params": weights[4:]}])
        for weight in weights:
            weight.grad = torch.ones_like(weight)
        optimizer.step()
        with counted() as calls:
            optimizer.step()
        totals.add(calls.total())
    assert len(totals) == 1


MOST_OF_A_READ = {"fp32": 0, "8bit": 8}
"""Calls for each tensor that nobody edited, as programs read one state after another; decoded ones are let go of."""


@pytest.mark.parametrize("moments", MOST_OF_A_READ)
def test_state_that_nobody_edited_is_not_read_again(moments: str) -> None:
    counts = []
    for length in (10, 110):
        weights = nn.ParameterList(torch.ones(2, 256, dtype=torch.bfloat16) for _ in range(length))
        optimizer = adam(weights, moments=moments)
        for weight in weights:
            weight.grad = torch.ones_like(weight)
        optimizer.step()
        assert optimizer.state
        with counted() as calls:
            assert optimizer.state[weights[0]]["step"] == 1
        counts.append(calls.total())
    assert counts[1] - counts[0] <= 100 * MOST_OF_A_READ[moments]
