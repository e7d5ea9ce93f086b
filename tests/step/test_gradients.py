"""Gradients are gathered with the parameters and hyper-parameters that they belong to."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from superadam.handles.gradient_handle import take_gradient
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


@pytest.mark.parametrize(
    "odd",
    [
        pytest.param(lambda: torch.arange(12.0).view(4, 3).t(), id="transposed"),
        pytest.param(lambda: torch.ones(3, 4, dtype=torch.bfloat16), id="another dtype"),
        pytest.param(lambda: torch.conj(torch.ones(3, 4, dtype=torch.complex64)).imag, id="negated"),
    ],
)
@pytest.mark.parametrize("count", [1, 3])
def test_a_gradient_in_another_form_among_plain_ones(odd: Callable[[], Tensor], count: int) -> None:
    """Each is as `host_gradient` makes it, and the job tells its own dtype."""
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
