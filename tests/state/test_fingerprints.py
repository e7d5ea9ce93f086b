"""Hints at writes from outside: none is missed, and our own writes are none."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from superadam.state.places import Fingerprints


def hints(fingerprints: Fingerprints) -> list[int]:
    fingerprints.look()
    return fingerprints.seen_hints(np.arange(len(fingerprints.layouts)))


def rows(*numbers: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.array(numbers, np.int64)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.autograd.graph.allow_mutation_on_saved_tensors])
@pytest.mark.parametrize("has_wholes", [False, True])
def test_our_own_write_is_no_hint_but_hides_none(has_wholes, mode):
    """It counts in a part and in its whole, of either of which autograd then refuses what it has saved.

    An ordinary parameter is both, and counts once.
    """
    parts = [torch.zeros(3) for _ in range(4)]
    wholes = [*(torch.zeros(3) for _ in range(3)), parts[3]] if has_wholes else []
    fingerprints = Fingerprints(parts, wholes or None)
    parts[2].add_(1)
    before = [tensor._version for tensor in (*parts, *wholes)]
    with mode():
        fingerprints.prepared_bump(rows(3, 0))()
    counted = [tensor._version - version for tensor, version in zip((*parts, *wholes), before, strict=True)]
    assert counted == [1, 0, 0, 1] * (1 + has_wholes)
    assert hints(fingerprints) == [2]
    with mode():
        fingerprints.prepared_bump(rows(1, 0, 3, 2))()
    assert hints(fingerprints) == [2]


REPETITIONS = 200


@pytest.mark.parametrize("is_new", [True, False])
def test_writes_to_a_part_and_to_its_whole_both_count(is_new: bool) -> None:
    parts, wholes = ([torch.zeros(3) for _ in range(2)] for _ in range(2))
    for tensor in () if is_new else (parts[0], wholes[1]):
        tensor.add_(1)
    fingerprints = Fingerprints(parts, wholes)
    assert hints(fingerprints) == []
    for written in ([wholes[0]], [parts[0]], [parts[0], wholes[0]]):
        for tensor in written:
            tensor.add_(1)
        assert hints(fingerprints) == [0]
        assert fingerprints.are_hinted([0]) == [True]
        assert fingerprints.are_hinted([]) == []
        assert hints(fingerprints) == [0]
        fingerprints.remember(0)
        assert hints(fingerprints) == hints(fingerprints) == []


def cloned(layer: nn.Linear) -> None:
    layer.weight.data = layer.weight.data.clone()


def replaced(layer: nn.Linear) -> None:
    """Free the old memory first, which the allocator then hands out again."""
    layer.weight.data = torch.empty(0)
    layer.weight.data = torch.empty(300, 100)


def converted(layer: nn.Linear) -> None:
    layer.to(torch.bfloat16)
    layer.to(torch.float32)


def swapped(layer: nn.Linear) -> None:
    torch.utils.swap_tensors(layer.weight, nn.Parameter(torch.empty(300, 100)))


@pytest.mark.parametrize("change", [cloned, replaced, converted, swapped])
def test_another_storage_is_always_noticed(change: Callable[[nn.Linear], None]) -> None:
    layer = nn.Linear(100, 300, bias=False)
    fingerprints = Fingerprints([torch.zeros(3), layer.weight])
    for repetition in range(REPETITIONS):
        change(layer)
        assert fingerprints.are_hinted([1]) == [True]
        if repetition % 2:
            assert fingerprints.look() == [1]
        fingerprints.remember(1)
        assert fingerprints.look() == []
        assert fingerprints.are_hinted([1]) == [False]


def test_memory_that_is_freed_and_given_back_is_noticed_by_a_look_in_between() -> None:
    """Whether it is noted while there is none or not; mostly the very same address comes back."""
    parameter = nn.Parameter(torch.zeros(30_000))
    fingerprints = Fingerprints([parameter])
    storage, size = parameter.untyped_storage(), parameter.untyped_storage().nbytes()
    for repetition in range(REPETITIONS):
        storage.resize_(0)
        assert fingerprints.are_hinted([0]) == [True]
        assert fingerprints.look() == [0]
        if repetition % 2:
            fingerprints.remember(0)
        storage.resize_(size)
        assert fingerprints.are_hinted([0]) == [True]
        assert fingerprints.look() == [0]
        fingerprints.remember(0)
        assert fingerprints.look() == []


def test_storages_that_are_replaced_are_freed_at_once() -> None:
    memory = (ctypes.c_char * 4000)()
    is_alive = weakref.ref(memory)
    parameter = nn.Parameter(torch.frombuffer(memory, dtype=torch.float32, count=1000))
    del memory
    fingerprints = Fingerprints([parameter])
    fingerprints.look()
    fingerprints.remember(0)
    assert is_alive() is not None
    parameter.data = torch.zeros(1000)
    assert is_alive() is None
    assert fingerprints.look() == [0]


def test_a_storage_is_referred_to_no_longer_than_its_parameter_is_listed() -> None:
    parameter = nn.Parameter(torch.zeros(3))
    storage = parameter.untyped_storage()
    uses = torch._C._storage_Use_Count(storage._cdata)
    fingerprints = Fingerprints([parameter])
    assert torch._C._storage_Use_Count(storage._cdata) == uses
    del fingerprints, parameter
    assert torch._C._storage_Use_Count(storage._cdata) < uses


class Wrapped(torch.Tensor):
    """A tensor without memory of its own, as a DTensor is one."""

    @staticmethod
    def __new__(cls: type[Wrapped], inner: Tensor) -> Wrapped:
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    @classmethod
    def __torch_dispatch__(cls, function: object, types: object, args: object = (), kwargs: object = None) -> object:
        raise NotImplementedError(f"nothing is computed here, and least of all {function}")


class Closed(torch.Tensor):
    """A tensor that does not show its storage."""

    @classmethod
    def __torch_function__(cls, function: Any, types: object, args: object = (), kwargs: object = None) -> object:
        if function is torch.Tensor.untyped_storage:
            raise NotImplementedError("there is none")
        return super().__torch_function__(function, types, args, kwargs)


def test_tensors_without_memory_or_storage_are_looked_at_all_the_same() -> None:
    closed = torch.zeros(1000).as_subclass(Closed)
    tensors = [torch.empty(3, device="meta"), Wrapped(torch.zeros(3)), closed, nn.Parameter(torch.zeros(0))]
    fingerprints = Fingerprints(tensors)
    assert fingerprints.look() == []
    for row in range(len(tensors)):
        assert fingerprints.are_hinted([row]) == [False]
        fingerprints.remember(row)
    assert fingerprints.look() == []
    closed.add_(1)
    assert fingerprints.look() == []
    assert fingerprints.seen_hints(rows(0, 1, 2, 3)) == [2]
    kept, closed.data = closed.data, torch.zeros(1000)  # by its address
    tensors[3].data = torch.zeros(0)  # which has none
    assert fingerprints.look() == [2, 3]
    assert len(kept) == 1000
