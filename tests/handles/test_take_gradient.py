"""Which gradients are left in `.grad`, and what replaces them."""

from __future__ import annotations

import copy
import io
import math

import torch
from torch import Tensor

from superadam.handles.gradient_handle import take_gradient, take_reduced, taken_of
from superadam.handles.taken_gradient import Factor, FactorKind, GradientHolder, TakenGradient
from superadam.state.parameter import ParameterState


def test_a_lazily_negated_gradient_is_left_alone() -> None:
    """Not even where nothing else references its memory, as after loading."""
    parameter, file = torch.nn.Parameter(torch.zeros(1)), io.BytesIO()
    torch.save(torch.tensor([1j]).conj().imag, file)
    file.seek(0)
    parameter.grad = torch.load(file)
    assert parameter.grad.is_neg()
    assert take_gradient(parameter) is None
    assert parameter.grad.is_neg()
    parameter.grad = parameter.grad.resolve_neg()
    assert take_gradient(parameter) is not None


def test_a_sum_that_is_being_read_is_not_taken_again() -> None:
    parameter = torch.nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))
    parameter.grad = torch.ones(3, dtype=torch.bfloat16)
    taken = take_gradient(parameter)
    assert taken is not None
    assert take_gradient(parameter) is None
    taken.pending, taken.is_unrounded = taken.pending.float(), True
    assert take_gradient(parameter) is taken
    taken.in_use = True
    assert take_gradient(parameter) is None
    assert taken_of(parameter.grad) is taken


def test_the_version_goes_on_where_memory_is_replaced() -> None:
    versions = []
    for is_taken in (False, True):
        parameter = torch.nn.Parameter(torch.zeros(3))
        parameter.grad = torch.ones(3).mul_(2).mul_(2)
        state = ParameterState(parameter, 0, "weight")
        assert not is_taken or take_gradient(parameter, state) is not None
        parameter.grad.data = torch.ones(3)
        versions.append(parameter.grad._version)
        assert type(parameter.grad) is torch.Tensor
    assert versions == [2, 2]


def _taken() -> tuple[torch.nn.Parameter, TakenGradient, ParameterState]:
    parameter = torch.nn.Parameter(torch.zeros(3))
    parameter.grad = torch.ones(3)
    state = ParameterState(parameter, 0, "weight")
    taken = take_gradient(parameter, state)
    assert taken is not None
    return parameter, taken, state


def test_a_deep_copy_has_memory_of_its_own() -> None:
    parameter, taken, _state = _taken()
    copied = copy.deepcopy(parameter.grad)
    assert copied is not None
    copied.add_(1)
    assert taken.value().tolist() == [1.0] * 3


def test_an_operation_whose_schema_may_hide_writes_gives_back() -> None:
    library = torch.library.Library("superadam_hides", "DEF")
    library.define("write(Tensor x) -> Tensor")
    library.impl("write", lambda x: x.add_(1).sum(), "CPU")
    parameter, taken, _state = _taken()
    assert torch.ops.superadam_hides.write(parameter.grad) == 6.0
    assert taken.is_given
    assert isinstance(parameter.grad, Tensor)
    assert parameter.grad.tolist() == [2.0] * 3


def test_a_reduced_gradient_stays_unrounded_when_speculation_is_dropped() -> None:
    parameter = torch.nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))
    parameter.grad = torch.full((3,), 0.1, dtype=torch.bfloat16)
    holder = GradientHolder()
    take_reduced(parameter, torch.full((3,), 0.1), ParameterState(parameter, 0, "weight"), holder)
    taken = taken_of(parameter.grad)
    assert taken is not None
    taken.leave_speculation()
    assert taken_of(parameter.grad) is taken
    assert taken.exact().dtype is torch.float32


def test_zeros_have_no_factors() -> None:
    _parameter, taken, _state = _taken()
    taken.record(Factor(FactorKind.MULTIPLY, math.inf))
    taken.zero()
    assert taken.value().tolist() == [0.0] * 3
