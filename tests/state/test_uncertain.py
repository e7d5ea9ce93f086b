"""Lists of uncertain elements in one piece of memory."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from superadam.state.uncertain import LISTED_SHARE, UncertainLists, list_bytes

NAMES = ("index", "master", "exp_avg", "exp_avg_sq", "gradient", "max_exp_avg_sq")


@pytest.mark.parametrize("with_max", [*itertools.product([False, True], repeat=4)], ids=str)
def test_arrays_of_all_lists_are_apart_and_within_the_memory(with_max: tuple[bool, ...]) -> None:
    """Those of a parameter without `max_exp_avg_sq` have none: kernels would read what is not there."""
    numels = [1, 0, 5000, 513]
    lists = UncertainLists(numels, with_max)
    begin = lists._memory.data_ptr()
    assert lists._memory.nbytes == sum(
        list_bytes(numel, with_max=one) for numel, one in zip(numels, with_max, strict=True)
    )
    taken = np.zeros(lists._memory.nbytes, int)
    for numel, has_max, record in zip(numels, with_max, lists.records, strict=True):
        assert record["capacity"] * LISTED_SHARE >= numel
        assert (record["max_exp_avg_sq"] != 0) == has_max
        for name in NAMES[: 5 + has_max]:
            first = int(record[name]) - begin
            assert first % 64 == 0
            taken[first : first + 4 * int(record["capacity"])] += 1
    assert (taken == 1).all()
