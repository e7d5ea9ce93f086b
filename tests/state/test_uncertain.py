"""Lists of uncertain elements in one piece of memory."""

import ctypes
import itertools

import numpy as np
import pytest

from superadam.kernels import native
from superadam.state.uncertain import LISTED_SHARE, empty_lists, list_bytes

NAMES = ("index", "master", "exp_avg", "exp_avg_sq", "gradient", "max_exp_avg_sq")


@pytest.mark.parametrize("with_max", [*itertools.product([False, True], repeat=4)], ids=str)
def test_arrays_of_all_lists_are_apart_and_within_the_memory(with_max: tuple[bool, ...]) -> None:
    """Those of a parameter without `max_exp_avg_sq` have none: kernels would read what is not there."""
    numels = [1, 0, 5000, 513]
    lists = empty_lists(numels, with_max)
    (memory,) = {listed.memory for listed in lists}
    begin = memory.data_ptr()
    assert memory.nbytes == sum(list_bytes(numel, with_max=one) for numel, one in zip(numels, with_max, strict=True))
    taken = np.zeros(memory.nbytes, int)
    for numel, has_max, listed in zip(numels, with_max, lists, strict=True):
        record = listed.record
        assert record["capacity"] * LISTED_SHARE >= numel
        assert (record["max_exp_avg_sq"] != 0) == has_max
        for name in NAMES[: 5 + has_max]:
            first = int(record[name]) - begin
            assert first % 64 == 0
            taken[first : first + 4 * int(record["capacity"])] += 1
    assert (taken == 1).all()


def test_each_list_is_found_at_its_address() -> None:
    numels = [0, 1, LISTED_SHARE * 16, LISTED_SHARE * 16 + 1, 100_000]
    lists = empty_lists(numels, [False] * len(numels))
    for position, (numel, listed) in enumerate(zip(numels, lists, strict=True)):
        memory = (ctypes.c_uint8 * native.UNCERTAIN.itemsize).from_address(listed.address)
        np.ctypeslib.as_array(memory).view(native.UNCERTAIN)["count"] = position
        capacity = int(listed.record["capacity"])
        assert listed.record["count"] == position
        values = (ctypes.c_uint32 * capacity).from_address(int(listed.record["index"]))
        values[:] = [numel + one for one in range(capacity)]
    for position, (numel, listed) in enumerate(zip(numels[1:], lists[1:], strict=True), 1):
        assert listed.count == position
        values = (ctypes.c_uint32 * position).from_address(int(listed.record["index"]))
        assert [*values] == [numel + one for one in range(position)]


def test_a_list_is_complete_up_to_its_last_entry() -> None:
    (listed,) = empty_lists([LISTED_SHARE * 16], [False])
    for count, is_complete in ((0, True), (15, True), (16, True), (17, False), (400, False)):
        listed.records["count"] = count
        assert (listed.count, listed.is_complete) == (count, is_complete)
