"""Copies and pickles of the optimizer go on like the original, and share nothing with it."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler
from visible import bits, give_gradients, parameter, parameters_of, refused, train, visible

from superadam import SpeculativeCPUAdamW

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
EACH_DTYPE = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))


def make(cls: type = SpeculativeCPUAdamW, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    return cls([parameter(70, dtype=dtype), parameter(4, 5, dtype=dtype, seed=1)], **options)


def _pickled(optimizer: Any) -> Any:
    return pickle.loads(pickle.dumps(optimizer))


def _saved(optimizer: Any) -> Any:
    file = io.BytesIO()
    torch.save(optimizer, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES = {"deepcopy": copy.deepcopy, "pickle": _pickled, "torch.save": _saved}


@EACH_DTYPE
@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("history", ["new", "stepped", "accepted", "exposed", "scheduled"])
def test_copies_continue_alike(dtype: torch.dtype, how: str, history: str) -> None:
    optimizer = make(dtype=dtype, max_grad_norm=2.0, on_nonfinite="raise")
    optimizer.register_step_pre_hook(lambda *ignored: None)  # hooks stay behind, as in torch
    if history == "scheduled":
        lr_scheduler.StepLR(optimizer, 1)
    if history != "new":
        train(optimizer, 1, speculative=history == "accepted")
    if history == "exposed":
        assert optimizer.state
    other = COPIES[how](optimizer)
    assert type(other) is type(optimizer)
    assert (other.max_grad_norm, other.on_nonfinite) == (2.0, "raise")
    assert (other.statistics, other.last_outcome) == (optimizer.statistics, optimizer.last_outcome)
    assert visible(other) == visible(optimizer)
    train(other, 2)
    if history != "new":
        assert visible(other) != visible(optimizer)  # they share nothing
    train(optimizer, 2)
    assert visible(other) == visible(optimizer)


def test_deepcopy_of_model_and_optimizer_together() -> None:
    model = torch.nn.Linear(5, 5, dtype=torch.bfloat16)
    optimizer = SpeculativeCPUAdamW(model.parameters())
    train(optimizer, 1)
    other_model, other = copy.deepcopy((model, optimizer))
    assert all(p is q for p, q in zip(other_model.parameters(), parameters_of(other), strict=True))
    for one in (optimizer, other):
        train(one, 2)
    assert visible(other) == visible(optimizer)
    assert bits(other_model.weight) == bits(model.weight)


@pytest.mark.parametrize("how", COPIES)
def test_copies_of_open_speculation_are_refused(how: str) -> None:
    optimizer = make()
    give_gradients(optimizer, 1)
    optimizer.speculate()
    with refused(optimizer, RuntimeError, "cannot be copied or pickled while speculation is open; call resolve"):
        COPIES[how](optimizer)


def test_setstate_of_an_older_pickle() -> None:
    optimizer = make()
    train(optimizer, 1)
    values = copy.deepcopy(optimizer).__getstate__()
    del values["param_groups"][0]["decoupled_weight_decay"]
    other = SpeculativeCPUAdamW.__new__(SpeculativeCPUAdamW)
    other.__setstate__(values)
    for one in (optimizer, other):
        train(one, 2)
    assert visible(other) == visible(optimizer)
