"""The way of one gradient is short: calls of the package's Python functions in backward and `step()`."""

from __future__ import annotations

import collections
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from support.overlap import DeferredDevice, ThreadDevice, adam
from torch import nn

import superadam
from superadam import OffloadScheduler, StepKind
from superadam.devices import Device

PACKAGE = str(Path(superadam.__file__).parent)


MOST: dict[str, tuple[Callable[[], Device], int, int]] = {
    "step": (DeferredDevice, 120, 20),
    "worker": (ThreadDevice, 255, 30),
}
"""Device, and the most calls and files in the thread that trains; the worker's calls run in parallel."""


def calls_of_a_step(
    dtype: torch.dtype, max_grad_norm: float | None, device: Device
) -> tuple[collections.Counter[str], StepKind]:
    """Return how often functions of each file were called, for one parameter, and how the step ended."""
    weight = nn.Parameter(torch.full((64, 64), 0.1, dtype=dtype))
    model = nn.ParameterList([weight])
    optimizer = adam(model, max_grad_norm=max_grad_norm)
    calls: collections.Counter[str] = collections.Counter()

    def count(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            calls[frame.f_code.co_filename] += 1

    with OffloadScheduler(optimizer, model, device=device) as scheduler:
        for step in range(7):
            optimizer.zero_grad()
            loss = weight.float().square().mean()
            sys.setprofile(count if step == 6 else None)
            try:
                loss.backward()
                optimizer.step()
            finally:
                sys.setprofile(None)
        assert scheduler.statistics.buckets == (7 if device.idle_cores() else 0)
    assert optimizer.last_outcome is not None
    return calls, optimizer.last_outcome.kind


@pytest.mark.parametrize("where", MOST)
@pytest.mark.parametrize("max_grad_norm", [None, 1e-6])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_gradient_takes_few_calls(dtype: torch.dtype, max_grad_norm: float | None, where: str) -> None:
    device, most_calls, most_files = MOST[where]
    calls, kind = calls_of_a_step(dtype, max_grad_norm, device())
    assert kind is (StepKind.COMMITTED if max_grad_norm is None else StepKind.CLIPPED)
    words = f"{calls.total()} calls in {len(calls)} files: {calls}"
    assert most_calls / 2 < calls.total() <= most_calls, words
    assert len(calls) <= most_files, words
    sys.stdout.write(words)  # pytest -s shows it
