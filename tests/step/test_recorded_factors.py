"""Factors that were recorded on gradients, judged and applied as torch applies them."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from visible import give_gradients, parameter, parameters_of, train, visible

from superadam import SpeculativeCPUAdam, StepKind

TINY = 2.0**-149


def _working_copy(values: Tensor) -> torch.nn.Parameter:
    """Return a parameter whose gradient is fp32 and whose master is another tensor."""
    return torch.nn.Parameter(torch.stack([values.detach()] * 2, dim=-1)[..., 0])


def _shown(fill: Callable[[Tensor], None], factor: float, limit: float, *, is_speculative: bool) -> object:
    optimizer = SpeculativeCPUAdam([_working_copy(parameter(300))], betas=(0.0, 0.99))
    train(optimizer, 1)
    give_gradients(optimizer, 2)
    (one,) = parameters_of(optimizer)
    assert one.grad is not None
    fill(one.grad)
    if is_speculative:
        optimizer.speculate()
    one.grad.mul_(factor)
    norm = float(optimizer.clip_grad_norm_(limit))
    optimizer.step()
    return visible(optimizer), norm


def _denormal(gradient: Tensor) -> None:
    gradient.copy_(TINY * (2 * torch.arange(300, dtype=torch.float64) + 1))
    gradient[0] = 2.0


@pytest.mark.parametrize("factor", [0.5, 0.3], ids=str)
@pytest.mark.parametrize("limit", [math.inf, 1e9, 0.9 * 0.5 * 2.0], ids=["no limit", "within", "clipped"])
@pytest.mark.parametrize("fill", [lambda gradient: None, _denormal], ids=["usual", "denormal"])
def test_bits_and_norm_are_those_of_the_product(fill: Callable[[Tensor], None], limit: float, factor: float) -> None:
    expected, found = (_shown(fill, factor, limit, is_speculative=speculative) for speculative in (False, True))
    assert found == expected


def test_factors_of_some_gradients_are_not_told_as_those_of_all() -> None:
    optimizer = SpeculativeCPUAdam([parameter(70, dtype=torch.bfloat16), parameter(4, 5, dtype=torch.bfloat16)])
    train(optimizer, 1)
    give_gradients(optimizer, 2)
    first, _ = parameters_of(optimizer)
    optimizer.speculate([first])
    assert first.grad is not None
    first.grad.mul_(0.5)
    optimizer.step()
    assert optimizer.last_outcome is not None
    assert (optimizer.last_outcome.kind, optimizer.last_outcome.clip_coefficient) == (StepKind.COMMITTED, 1.0)


@pytest.mark.parametrize("change", [lambda g: g.mul_(0.25), lambda g: g.div_(4.0)], ids=["multiplied", "divided"])
def test_factors_of_all_gradients_are_told(change: Callable[[Tensor], Tensor]) -> None:
    optimizer = SpeculativeCPUAdam([parameter(70, dtype=torch.bfloat16), parameter(4, 5, dtype=torch.bfloat16)])
    give_gradients(optimizer, 1)
    optimizer.speculate()
    for one in parameters_of(optimizer):
        assert one.grad is not None
        change(one.grad)
    optimizer.step()
    assert optimizer.last_outcome is not None
    assert (optimizer.last_outcome.kind, optimizer.last_outcome.clip_coefficient) == (StepKind.CLIPPED, 0.25)


def test_the_norm_so_far_is_of_gradients_as_they_arrived() -> None:
    optimizer = SpeculativeCPUAdam([parameter(70, dtype=torch.bfloat16)])
    give_gradients(optimizer, 1)
    optimizer.speculate()
    transaction = optimizer._published._transaction
    assert transaction is not None
    norm = transaction.norm_so_far()
    assert norm > 0.0
    transaction.expected_scale = 0.5
    assert transaction.norm_so_far() == norm


def test_memory_of_new_values_is_released_once_they_are_published() -> None:
    optimizer = SpeculativeCPUAdam([parameter(70, dtype=torch.bfloat16)])
    train(optimizer, 1)
    give_gradients(optimizer, 2)
    optimizer.speculate()
    transaction = optimizer._published._transaction
    assert transaction is not None
    pending = transaction.table.states[0].pending
    assert pending is not None
    assert pending.place is not None
    optimizer.step()
    assert optimizer.statistics.accepted == 1
    assert pending.place is None
