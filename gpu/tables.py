"""Tables of tensors for kernels that walk over many of them in one launch.

A table is a matrix of int64 on the device, one column for each tensor: the number of its first block, its length, and
further rows of the kernel, such as addresses. Blocks are numbered over all tensors, and a program finds the tensor of
its block by bisection.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from .language import jit, tl

Integers = npt.NDArray[np.int64]
"""One entry for each tensor."""


@dataclass(frozen=True, slots=True)
class Table:
    """A table on its device, and the sizes that a launch over it needs."""

    entries: Tensor  # int64 of shape (rows, tensors), contiguous; rows 0 and 1 are first blocks and lengths
    tensors: int
    steps: int  # of the bisection
    blocks: int  # of all tensors together

    @staticmethod
    def of(lengths: Integers, rows: Sequence[Integers], block: int, device: torch.device) -> Table:
        """Return the table of the tensors that have elements; its copy to the device is enqueued to the current stream.

        `rows` are the further rows; `block` is the number of elements of a block. The last of a tensor may have fewer.
        """
        kept = lengths > 0
        lengths = lengths[kept]
        counts = -(-lengths // block)
        matrix = np.stack([np.cumsum(counts) - counts, lengths, *(row[kept] for row in rows)])
        return Table(upload(matrix, device), len(lengths), max(len(lengths) - 1, 0).bit_length(), int(counts.sum()))


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
