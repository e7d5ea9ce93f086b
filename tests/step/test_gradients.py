"""Gradients are gathered with the parameters and hyper-parameters that they belong to."""

from __future__ import annotations

import operator
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from superadam.handles.gradient_handle import GradientHandle, take_gradient
from superadam.kernels.hyperparameters import Hyperparameters
from superadam.state.new_values import NewValues
from superadam.state.parameter import ParameterState
from superadam.state.table import ParameterTable
from superadam.step.gradients import gather


class Received(NewValues):
    """Lets something count of a gradient that was not taken."""

    def __init__(self, received: Callable[[Tensor], Tensor] | None) -> None:
        self.received = received


def make(lengths: list[int], new_values: NewValues | None = None) -> ParameterTable:
    states = [ParameterState(torch.nn.Parameter(torch.zeros(n)), row, f"p{row}") for row, n in enumerate(lengths)]
    return ParameterTable(states, new_values or NewValues())


def hyper(lr: float) -> Hyperparameters:
    group = {"lr": lr, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.0, "amsgrad": False, "maximize": False}
    return Hyperparameters.of_group({**group, "decoupled_weight_decay": False})


ABSENT, PLAIN, TAKEN, GIVEN_BACK = range(4)
"""What a parameter has in `.grad`."""


def fill(parameter: Tensor, state: ParameterState, kind: int) -> None:
    parameter.grad = None if kind == ABSENT else torch.ones_like(parameter)
    if kind in (TAKEN, GIVEN_BACK):
        taken = take_gradient(parameter, state)
        handle = parameter.grad
        if kind == GIVEN_BACK:  # and the handle is put there again
            taken.give_back()
            parameter.grad = handle


@given(groups=st.lists(st.lists(st.integers(ABSENT, GIVEN_BACK), max_size=4), min_size=1, max_size=4))
def test_every_gradient_comes_with_its_parameter_and_group(groups: list[list[int]]) -> None:
    flat = [kind for group in groups for kind in group]
    table = make([row % 3 for row in range(len(flat))])
    for parameter, state, kind in zip(table.parameters, table.states, flat, strict=True):
        fill(parameter, state, kind)
    runs = [(hyper(0.1 + index), len(group)) for index, group in enumerate(groups)]
    lr_of = [hyper_of.lr for hyper_of, count in runs for _ in range(count)]
    in_grad = [parameter.grad for parameter in table.parameters]

    got = gather(table, runs)

    assert all(map(operator.is_, in_grad, [parameter.grad for parameter in table.parameters]))  # nothing was changed
    expected = [row for row, kind in enumerate(flat) if kind != ABSENT]
    assert [state.row for state in got.states] == expected
    assert [one.lr for one in got.hyper] == [lr_of[row] for row in expected]
    for row, gradient in zip(expected, got.gradients, strict=True):
        there = in_grad[row]
        if flat[row] == PLAIN:
            assert gradient is there
        else:
            assert type(there) is GradientHandle
            assert gradient is (there.taken if flat[row] == TAKEN else there.taken.given)
    assert got.are_whole == (TAKEN not in flat)
    if not got.are_whole:
        return
    job = got.job(table)
    assert job["gradient"].tolist() == [gradient.data_ptr() for gradient in got.gradients]
    assert job["length"].tolist() == [row % 3 for row in expected]


@pytest.mark.parametrize(
    "odd",
    [
        pytest.param(lambda: torch.arange(12.0).view(4, 3).t(), id="transposed"),
        pytest.param(lambda: torch.ones(3, 4, dtype=torch.bfloat16), id="another dtype"),
        pytest.param(lambda: torch.conj(torch.ones(3, 4, dtype=torch.complex64)).imag, id="negated"),
    ],
)
@pytest.mark.parametrize("count", [1, 3])
def test_a_gradient_in_another_form_among_plain_ones(odd: object, count: int) -> None:
    """Each is as `host_gradient` makes it, and the job tells its own dtype."""
    assert callable(odd)
    states = [ParameterState(torch.nn.Parameter(torch.zeros(3, 4)), row, f"p{row}") for row in range(count)]
    table = ParameterTable(states, NewValues())
    for parameter in table.parameters:
        parameter.grad = torch.ones_like(parameter)
    gradient = odd()
    table.parameters[-1].grad_dtype = None
    table.parameters[-1].grad = gradient

    got = gather(table, [(hyper(0.1), count)])

    assert got.are_whole
    assert torch.equal(got.gradients[-1], torch.resolve_neg(gradient))
    assert got.gradients[-1].is_contiguous()
    assert not got.gradients[-1].is_neg()
    assert all(one is p.grad for one, p in zip(got.gradients[:-1], table.parameters, strict=False))
    assert got.job(table).tobytes() == table.job(table.all_rows, got.gradients).tobytes()


@pytest.mark.parametrize("kinds", [(PLAIN, PLAIN), (PLAIN, TAKEN), (GIVEN_BACK, TAKEN)])
def test_what_waits_for_no_verdict_counts_as_it_would_be_received(kinds: tuple[int, int]) -> None:
    """A gradient that was taken may have been left to the step."""
    table = make([3, 3], Received(lambda gradient: gradient * 2))
    for parameter, state, kind in zip(table.parameters, table.states, kinds, strict=True):
        fill(parameter, state, kind)
    got = gather(table, [(hyper(0.1), 2)])
    for gradient in got.gradients:
        value = gradient if isinstance(gradient, Tensor) else gradient.value()
        assert torch.equal(value, torch.full((3,), 2.0))


@pytest.mark.parametrize("received", [None, lambda gradient: gradient], ids=["at once", "after a copy"])
def test_a_taken_gradient_that_does_not_fit_is_refused(received: Callable[[Tensor], Tensor] | None) -> None:
    table = make([3])
    (parameter,) = table.parameters
    fill(parameter, table.states[0], TAKEN)
    parameter.data = torch.zeros(4)
    table = ParameterTable([ParameterState(parameter, 0, "p")], Received(received))
    with pytest.raises(ValueError, match=r"the gradient of p has shape \(3,\), expected .*\(4,\)"):
        gather(table, [(hyper(0.1), 1)])
