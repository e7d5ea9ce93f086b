"""Rows of parameters: the coefficients of each row's own step, versions, and memory that rows point to."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.visible import parameter, train

from superadam import SpeculativeCPUAdam
from superadam.kernels.hyperparameters import Coefficients, Hyperparameters, Scale
from superadam.kernels.places import gradients_of
from superadam.state.new_values import NewValues
from superadam.state.parameter import ParameterState
from superadam.state.table import CoefficientTable, ParameterTable

HYPERS = [Hyperparameters(lr, 0.9, 0.99, 1e-8, 0.0, False, False, False) for lr in (0.1, 0.2)]
ROWS = st.lists(st.tuples(st.integers(0, 2), st.sampled_from([torch.float32, torch.float64])), max_size=5)


@given(groups=st.tuples(ROWS, ROWS))
def test_each_row_has_the_coefficients_of_its_own_step(groups: tuple[list[tuple[int, torch.dtype]], ...]) -> None:
    kinds = [kind for group in groups for kind in group]
    states = [ParameterState(torch.zeros(2, dtype=dtype), row, f"p{row}") for row, (_, dtype) in enumerate(kinds)]
    table, coefficients = ParameterTable(states, NewValues()), CoefficientTable()
    table.steps[:] = [step for step, _ in kinds]
    runs = [(hyper, len(group)) for hyper, group in zip(HYPERS, groups, strict=True)]
    indices = table.indices_of_next_step(table.all_rows, runs, Scale(0.5, rounds=True), coefficients)
    assert [coefficients.sets[index] for index in indices] == [
        Coefficients.at_step(hyper, step + 1, 0.5, rounds=True, double=dtype == torch.float64)
        for hyper, group in zip(HYPERS, groups, strict=True)
        for step, dtype in group
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_each_step_is_a_new_version_of_its_parameter(dtype: torch.dtype) -> None:
    one = parameter(70, dtype=dtype)
    optimizer, versions = SpeculativeCPUAdam([one]), [one._version]
    for seed, is_speculative in enumerate((False, True, False, True)):
        train(optimizer, seed, speculative=is_speculative)
        versions.append(one._version)
    assert versions == [versions[0] + count for count in range(5)]


@pytest.mark.parametrize("name", ["master", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"])
def test_memory_that_has_moved_is_used_no_longer(name: str) -> None:
    """Which users may replace by `.data`; whatever still reads it is an error, until the row is bound again."""
    state = ParameterState(torch.zeros(2, dtype=torch.bfloat16), 0, "weight")
    state.create_state(with_max=True)
    table = ParameterTable([state], NewValues())
    assert table.moved_arrays(table.all_rows) == {}
    before = getattr(state, name).data
    getattr(state, name).data = torch.ones(2)
    for _ in range(2):  # and where the same memory comes back
        assert table.moved_arrays(table.all_rows) == {0: [name]}
        assert table.job(table.all_rows, [torch.zeros(2, dtype=torch.bfloat16)])[name] == [0]
        getattr(state, name).data = before
    state.put({name: getattr(state, name)})
    assert table.moved_arrays(table.all_rows) == {}
    assert table.job(table.all_rows, [torch.zeros(2, dtype=torch.bfloat16)])[name] == [before.data_ptr()]


def test_gradients_of_consecutive_parameters_are_read_where_they_lie() -> None:
    parameters = [torch.zeros(4, 2), torch.zeros(4, 2, dtype=torch.bfloat16), torch.zeros(4, 2).t()]
    table = ParameterTable([ParameterState(one, row, f"p{row}") for row, one in enumerate(parameters)], NewValues())
    for one in parameters:
        one.grad = torch.zeros_like(one)
    addresses = gradients_of(table.parameters, table.plain_layouts)[1].tolist()
    assert addresses == [*(one.grad.data_ptr() for one in parameters[:2]), 0]
