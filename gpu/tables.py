"""Tables of tensors for kernels that walk over many of them in one launch.

A table is a matrix of int64 on the device, one column for each tensor: the number of its first block, its length, and
further rows of the kernel, such as addresses. Blocks are numbered over all tensors, and a program finds the tensor of
its block by bisection.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from .language import jit, tl

Integers = npt.NDArray[np.int64]
"""One entry for each tensor."""


class Table:
    """The table of tensors of these lengths, without those that have no elements.

    Args:
        lengths: elements of each tensor.
        block: elements of a block; the last of a tensor may have fewer.
        device: that the table is for.

    Attributes:
        tensors, blocks: number of tensors, and of the blocks of all of them.
        steps: of the bisection.
    """

    def __init__(self, lengths: Integers, block: int, device: torch.device) -> None:
        self._has_elements = lengths > 0
        lengths = lengths[self._has_elements]
        counts = -(-lengths // block)
        self._fixed = np.stack([np.cumsum(counts) - counts, lengths])
        self.tensors, self.blocks = len(lengths), int(counts.sum())
        self.steps = max(len(lengths) - 1, 0).bit_length()
        self._device = device
        self._last: tuple[int, Integers, Tensor] | None = None  # stream, rows and entries of the last call

    def entries(self, rows: Integers) -> Tensor:
        """Return the table on the device, with these further rows, for launches on the current stream.

        It is that of the last call where nothing has changed, else a copy is enqueued to the current stream: another
        stream would have to wait for that, and to be waited for before the memory is used for something else.
        """
        stream = torch.cuda.current_stream(self._device).cuda_stream if self._device.type == "cuda" else 0
        last = self._last
        if last is not None and last[0] == stream and np.array_equal(last[1], rows):
            return last[2]
        entries = upload(np.concatenate([self._fixed, rows[:, self._has_elements]]), self._device)
        self._last = stream, rows, entries
        return entries


_Checked = TypeVar("_Checked")
KEPT = 4
"""Launches that are remembered: what has arrived and what is late, in one step and the next."""


class LaunchCache(Generic[_Checked]):
    """What was found out about the tensors of launches, for launches over tensors like them.

    It holds none of those tensors. What checks and tables depend on are *facts*; they are compared at every launch.
    """

    def __init__(self) -> None:
        self._known: collections.deque[tuple[object, _Checked]] = collections.deque(maxlen=KEPT)

    def checked(self, facts: object, check: Callable[[], _Checked]) -> _Checked:
        """Return what `check` has returned for these facts, now or before."""
        for known, found in tuple(self._known):  # backwards may run in several threads
            if known == facts:
                return found
        found = check()
        self._known.appendleft((facts, found))
        return found


def facts_of(tensors: Sequence[Tensor | None]) -> list[object]:
    """Return what tensors are, but for their addresses and whether host memory is pinned."""
    return [one if one is None else (one.dtype, one.layout, one.device, one.shape, _strides_of(one)) for one in tensors]


def _strides_of(tensor: Tensor) -> tuple[int, ...] | None:
    return tensor.stride() if tensor.layout is torch.strided else None


def upload(array: npt.NDArray[np.generic], device: torch.device) -> Tensor:
    """Return a copy of an array on the device, enqueued to the current stream."""
    host = torch.from_numpy(array)
    # From pageable memory the copy would wait for the stream, and the calling thread with it.
    return host if device.type == "cpu" else host.pin_memory().to(device, non_blocking=True)


@jit()
def find_tensor(table, tensors, steps, block):
    """Return the column of the tensor that each of `block`, one number or many, belongs to."""
    low = block * 0
    high = low + tensors
    for _ in range(steps):
        middle = (low + high) // 2
        begins_before = tl.load(table + middle) <= block
        low = tl.where(begins_before, middle, low)
        high = tl.where(begins_before, high, middle)
    return low


@jit()
def entry(table, tensors, ROW: tl.constexpr, column):
    """Return the entry of a row for each of `column`, one number or many."""
    return tl.load(table + ROW * tensors + column)
