"""Lists of uncertain elements."""

import itertools

import pytest

from superadam.kernels import native
from superadam.state.uncertain import LISTED_SHARE, empty_lists

ARRAYS = (native.UNCERTAIN.names or ())[2:]


@pytest.mark.parametrize("with_max", [[False], [True, False, True]])
def test_a_list_is_complete_up_to_its_last_entry_and_takes_no_memory_beyond_it(with_max: list[bool]) -> None:
    lists = empty_lists([LISTED_SHARE * 16] * len(with_max), with_max)
    for count, is_complete in ((0, True), (15, True), (16, True), (17, False), (400, False)):
        lists[0].records["count"] = count
        assert (lists[0].count, lists[0].is_complete) == (count, is_complete)
    begins = [int(listed.records[name][0]) for listed in lists for name in ARRAYS]
    begins = sorted({*begins, begins[0] + lists[0].memory.nbytes} - {0})
    assert {end - begin for begin, end in itertools.pairwise(begins)} == {4 * 16}
    assert len(begins) - 1 == sum(len(ARRAYS) - (not has_max) for has_max in with_max)
