"""Which gradients are left in `.grad`, and what replaces them."""

from __future__ import annotations

import io

import torch

from superadam.handles.gradient_handle import take_gradient, taken_of
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
