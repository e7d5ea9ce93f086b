"""Rows of parameters: the coefficients of each row's own step."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from superadam.kernels.hyperparameters import Coefficients, Hyperparameters
from superadam.state.delivery import SynchronousDelivery
from superadam.state.parameter import ParameterState
from superadam.state.table import CoefficientTable, ParameterTable

HYPERS = [Hyperparameters(lr, 0.9, 0.99, 1e-8, 0.0, False, False, False) for lr in (0.1, 0.2)]
ROWS = st.lists(st.tuples(st.integers(0, 2), st.sampled_from([torch.float32, torch.float64])), max_size=5)


@given(groups=st.tuples(ROWS, ROWS))
def test_each_row_has_the_coefficients_of_its_own_step(groups: tuple[list[tuple[int, torch.dtype]], ...]) -> None:
    kinds = [kind for group in groups for kind in group]
    states = [ParameterState(torch.zeros(2, dtype=dtype), row, f"p{row}") for row, (_, dtype) in enumerate(kinds)]
    table, coefficients = ParameterTable(states, SynchronousDelivery()), CoefficientTable()
    table.steps[:] = [step for step, _ in kinds]
    runs = [(hyper, len(group)) for hyper, group in zip(HYPERS, groups, strict=True)]
    indices = table.indices_of_next_step(table.all_rows, runs, 0.5, coefficients)
    assert [coefficients.sets[index] for index in indices] == [
        Coefficients.at_step(hyper, step + 1, 0.5, double=dtype == torch.float64)
        for hyper, group in zip(HYPERS, groups, strict=True)
        for step, dtype in group
    ]
