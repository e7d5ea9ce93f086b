"""Rows of parameters: the coefficients of each row's own step, versions, and memory that rows point to."""

from __future__ import annotations

import pytest
import torch
from support.visible import parameter, train

from superadam import SpeculativeCPUAdam
from superadam.state.new_values import NewValues
from superadam.state.parameter import ParameterState
from superadam.state.table import ParameterTable


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
