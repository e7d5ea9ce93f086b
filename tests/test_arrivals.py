"""Gradients are gathered with the parameters and hyper-parameters that they belong to."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from superadam.arrivals import gather
from superadam.hyperparameters import Hyperparameters
from superadam.parameter import ParameterState
from superadam.table import ParameterTable, SynchronousDelivery


def make(lengths: list[int]) -> ParameterTable:
    states = [ParameterState(torch.nn.Parameter(torch.zeros(n)), row, f"p{row}") for row, n in enumerate(lengths)]
    return ParameterTable(states, SynchronousDelivery())


def hyper(lr: float) -> Hyperparameters:
    group = {"lr": lr, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.0, "amsgrad": False, "maximize": False}
    return Hyperparameters.of_group({**group, "decoupled_weight_decay": False})


@given(
    groups=st.lists(st.lists(st.tuples(st.booleans(), st.booleans()), max_size=4), min_size=1, max_size=4),
    chooses=st.booleans(),
)
def test_every_gradient_comes_with_its_parameter_and_group(
    groups: list[list[tuple[bool, bool]]], chooses: bool
) -> None:
    flat = [flags for group in groups for flags in group]
    table = make([row % 3 for row in range(len(flat))])
    for parameter, (has_gradient, _) in zip(table.parameters, flat, strict=True):
        parameter.grad = torch.ones_like(parameter) if has_gradient else None
    chosen = {id(p) for p, (_, is_chosen) in zip(table.parameters, flat, strict=True) if is_chosen}
    runs = [(hyper(0.1 + index), len(group)) for index, group in enumerate(groups)]
    lr_of = [hyper_of.lr for hyper_of, count in runs for _ in range(count)]

    arrivals = gather(table, runs, chosen if chooses else None)

    expected = [row for row, (has, is_chosen) in enumerate(flat) if has and (is_chosen or not chooses)]
    assert [state.row for state in arrivals.states] == expected
    assert [id(gradient) for gradient in arrivals.gradients] == [id(table.parameters[row].grad) for row in expected]
    assert [one.lr for one in arrivals.hyper] == [lr_of[row] for row in expected]
    assert arrivals.segments is not None
    assert arrivals.segments["gradient"].tolist() == [gradient.data_ptr() for gradient in arrivals.gradients]
    assert arrivals.segments["length"].tolist() == [row % 3 for row in expected]


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
    table = ParameterTable(states, SynchronousDelivery())
    for parameter in table.parameters:
        parameter.grad = torch.ones_like(parameter)
    gradient = odd()
    table.parameters[-1].grad_dtype = None
    table.parameters[-1].grad = gradient

    arrivals = gather(table, [(hyper(0.1), count)])

    assert arrivals.segments is not None
    assert torch.equal(arrivals.gradients[-1], torch.resolve_neg(gradient))
    assert arrivals.gradients[-1].is_contiguous()
    assert not arrivals.gradients[-1].is_neg()
    assert all(got is p.grad for got, p in zip(arrivals.gradients[:-1], table.parameters, strict=False))
    expected = table.segments(table.all_rows, arrivals.gradients)
    assert arrivals.segments.tobytes() == expected.tobytes()
