"""Copies and pickles of the optimizer go on like the original, and share nothing with it."""

import copy
import pickle

import pytest
import torch
from support.optimizers import EACH_DTYPE, make, through_disk, train_alike
from support.visible import bits, parameter, parameters_of, train, visible
from torch.optim import lr_scheduler

from superadam import SpeculativeCPUAdamW

COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda optimizer: pickle.loads(pickle.dumps(optimizer)),
    "torch.save": lambda optimizer: through_disk(optimizer, weights_only=False),
}


STORAGES = {
    "fp32": {"amsgrad": True},
    "bf16": {"moments": "bf16", "master": "24bit", "amsgrad": True},
    "8 bits": {"moments": "8bit", "master": "24bit"},
}


@EACH_DTYPE
@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("history", ["new", "stepped", "accepted", "exposed", "scheduled"])
@pytest.mark.parametrize("storage", STORAGES)
def test_copies_continue_alike(dtype: torch.dtype, how: str, history: str, storage: str) -> None:
    made = [parameter(70, dtype=dtype), parameter(2, 64, dtype=dtype, seed=1)]
    optimizer = SpeculativeCPUAdamW(made, max_grad_norm=2.0, on_nonfinite="raise", **STORAGES[storage])
    optimizer.register_step_pre_hook(lambda *ignored: None)  # hooks stay behind, as in torch
    if history == "scheduled":
        lr_scheduler.StepLR(optimizer, 1)
    if history != "new":
        train(optimizer, 1, speculative=history == "accepted")
    if history == "exposed":
        assert optimizer.state
    other = COPIES[how](optimizer)
    assert type(other) is type(optimizer)
    assert [key for key in dir(other) if key[0] != "_"] == [key for key in dir(optimizer) if key[0] != "_"]
    assert repr(other) == repr(optimizer)
    assert other.defaults == optimizer.defaults
    assert (other.max_grad_norm, other.on_nonfinite) == (2.0, "raise")
    assert (other.moments, other.master) == (optimizer.moments, optimizer.master)
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
    train_alike(optimizer, other, 2, speculative=False)
    assert bits(other_model.weight) == bits(model.weight)


def test_limits_and_outcomes_are_shared_by_copies_of_the_attributes_alone() -> None:
    """As Lightning makes them: an object of a subclass, with the optimizer's `__dict__`."""
    optimizer = make(max_grad_norm=1e9)
    wrapped = copy.copy(optimizer.__dict__)
    other = SpeculativeCPUAdamW.__new__(SpeculativeCPUAdamW)
    other.__dict__ = wrapped
    other.max_grad_norm = 0.5
    other.clip_grad_norm_(0.25)
    train(other, 1)
    assert optimizer.max_grad_norm == 0.5
    assert optimizer.last_outcome is other.last_outcome
    assert optimizer.last_outcome.clip_coefficient < 1.0
    assert visible(optimizer) == visible(other)
    deep = copy.deepcopy(optimizer)
    deep.max_grad_norm = 2.0
    assert optimizer.max_grad_norm == 0.5
