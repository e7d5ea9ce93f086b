"""Lists of uncertain elements: their memory, and what tells that one is complete."""

from __future__ import annotations

import ctypes
import itertools

import numpy as np
import pytest

from superadam.kernels import native
from superadam.state.uncertain import LISTED_SHARE, Listed, UncertainLists, list_bytes

ARRAYS = ("index", "gradient", "master", "exp_avg", "exp_avg_sq", "max_exp_avg_sq")
NUMELS = [0, 1, LISTED_SHARE * 16, LISTED_SHARE * 16 + 1, 100_000]


@pytest.mark.parametrize("amsgrad", [False, True], ids=["", "amsgrad"])
def test_arrays_have_room_and_do_not_overlap(amsgrad: bool) -> None:
    lists = UncertainLists(NUMELS, amsgrad=amsgrad)
    begin, size = lists._memory.data_ptr(), lists._memory.numel()
    ranges = []
    for record, numel in zip(lists.records, NUMELS, strict=True):
        assert numel <= record["capacity"] * LISTED_SHARE < numel + LISTED_SHARE * 16
        assert record["count"] == 0
        assert bool(record["max_exp_avg_sq"]) is amsgrad
        used = ARRAYS if amsgrad else ARRAYS[:-1]
        ranges += [(int(record[name]), int(record[name]) + 4 * int(record["capacity"])) for name in used]
        assert list_bytes(numel, amsgrad=amsgrad) == sum(to - at for at, to in ranges[-len(used) :])
    ranges = sorted(one for one in ranges if one[0] < one[1])
    assert all(one[1] <= other[0] for one, other in itertools.pairwise(ranges))
    assert begin <= ranges[0][0]
    assert ranges[-1][1] <= begin + size


def test_each_list_is_found_at_its_address() -> None:
    lists = UncertainLists(NUMELS, amsgrad=False)
    for position, numel in enumerate(NUMELS):
        record = np.ctypeslib.as_array(
            (ctypes.c_uint8 * native.UNCERTAIN.itemsize).from_address(lists.address(position))
        )
        record.view(native.UNCERTAIN)["count"] = position
        capacity = int(lists.records["capacity"][position])
        assert lists.records["count"][position] == position
        values = (ctypes.c_uint32 * capacity).from_address(int(lists.records["index"][position]))
        values[:] = [numel + one for one in range(capacity)]
    for position, numel in enumerate(NUMELS[1:], 1):
        listed = Listed(lists, position)
        assert listed.count == position
        assert listed.index.tolist() == [numel + one for one in range(position)]


def test_a_list_is_complete_up_to_its_last_entry() -> None:
    lists = UncertainLists([LISTED_SHARE * 16], amsgrad=False)
    listed = Listed(lists, 0)
    for count, is_complete in ((0, True), (15, True), (16, True), (17, False), (400, False)):
        lists.records["count"] = count
        assert (listed.count, listed.is_complete) == (count, is_complete)
