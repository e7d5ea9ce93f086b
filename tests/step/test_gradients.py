"""Gradients that were taken and left to the step count as they would be received, where they fit their parameter."""

from collections.abc import Callable

import pytest
import torch
from support.strategies import USUAL
from torch import Tensor, nn

from superadam.handles.gradient_handle import take_gradient
from superadam.state.new_values import NewValues
from superadam.state.parameter import ParameterState
from superadam.state.table import ParameterTable
from superadam.step.gradients import gather


class Received(NewValues):
    """Lets something count of a gradient that was not taken."""

    def __init__(self, received: Callable[[Tensor], Tensor] | None) -> None:
        self.received = received


PLAIN, TAKEN, GIVEN_BACK = range(3)
"""What a parameter has in `.grad`."""


def state_with(kind: int, row: int = 0) -> ParameterState:
    parameter = nn.Parameter(torch.zeros(3))
    parameter.grad = torch.ones(3)
    state = ParameterState(parameter, row, "p")
    if kind != PLAIN:
        taken = take_gradient(parameter, state)
        handle = parameter.grad
        if kind == GIVEN_BACK:  # and the handle is put there again
            taken.give_back()
            parameter.grad = handle
    return state


@pytest.mark.parametrize("kinds", [(PLAIN, PLAIN), (PLAIN, TAKEN), (GIVEN_BACK, TAKEN)])
def test_what_waits_for_no_verdict_counts_as_it_would_be_received(kinds: tuple[int, int]) -> None:
    states = [state_with(kind, row) for row, kind in enumerate(kinds)]
    got = gather(ParameterTable(states, Received(lambda gradient: gradient * 2)), [(USUAL, 2)])
    values = [one if isinstance(one, Tensor) else one.value() for one in got.gradients]
    assert [one.tolist() for one in values] == [[2.0] * 3] * 2


@pytest.mark.parametrize("received", [None, lambda gradient: gradient], ids=["at once", "after a copy"])
def test_a_taken_gradient_that_does_not_fit_is_refused(received: Callable[[Tensor], Tensor] | None) -> None:
    state = state_with(TAKEN)
    state.parameter.data = torch.zeros(4)
    table = ParameterTable([ParameterState(state.parameter, 0, "p")], Received(received))
    with pytest.raises(ValueError, match=r"the gradient of p has shape \(3,\), expected .*\(4,\)"):
        gather(table, [(USUAL, 1)])


@pytest.mark.parametrize("is_on_host", [True, False])
def test_kernels_read_gradients_of_the_host_alone_where_they_lie(is_on_host: bool) -> None:
    parameter = nn.Parameter(torch.zeros(3))
    parameter.grad = torch.ones(3)
    table = ParameterTable([ParameterState(parameter, 0, "p", is_on_host=is_on_host)], NewValues())
    addresses = gather(table, [(USUAL, 1)]).addresses
    assert (None if addresses is None else [*addresses]) == ([parameter.grad.data_ptr()] if is_on_host else None)
