"""The way of one gradient is short: calls of the package's Python functions in backward and `step()`."""

from __future__ import annotations

import collections
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from overlap import ThreadDevice, adam
from torch import nn

import superadam
from superadam import OffloadScheduler, StepKind

PACKAGE = str(Path(superadam.__file__).parent)

MOST_CALLS = 200
"""In the thread that trains; the worker's run in parallel."""

MOST_FILES = 25
"""As many as there are now."""


def calls_of_a_step(dtype: torch.dtype, max_grad_norm: float | None) -> tuple[collections.Counter[str], StepKind]:
    """Return how often functions of each file were called, for one parameter, and how the step ended."""
    weight = nn.Parameter(torch.full((64, 64), 0.1, dtype=dtype))
    model = nn.ParameterList([weight])
    optimizer = adam(model, max_grad_norm=max_grad_norm)
    calls: collections.Counter[str] = collections.Counter()

    def count(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            calls[frame.f_code.co_filename] += 1

    with OffloadScheduler(optimizer, model, device=ThreadDevice(), num_threads=1) as scheduler:
        for step in range(7):
            optimizer.zero_grad()
            loss = weight.float().square().mean()
            sys.setprofile(count if step == 6 else None)
            try:
                loss.backward()
                optimizer.step()
            finally:
                sys.setprofile(None)
        assert scheduler.statistics.buckets == 7
    assert optimizer.last_outcome is not None
    return calls, optimizer.last_outcome.kind


@pytest.mark.parametrize("max_grad_norm", [None, 1e-6])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_gradient_takes_few_calls(dtype: torch.dtype, max_grad_norm: float | None) -> None:
    calls, kind = calls_of_a_step(dtype, max_grad_norm)
    assert kind is (StepKind.COMMITTED if max_grad_norm is None else StepKind.CLIPPED)
    words = f"{calls.total()} calls in {len(calls)} files: {calls}"
    assert 100 < calls.total() <= MOST_CALLS, words
    assert len(calls) <= MOST_FILES, words
    sys.stdout.write(words)  # pytest -s shows it
