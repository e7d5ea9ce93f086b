"""Tables of tensors, with which one launch of a kernel walks over many of them.

A table is a matrix of int64 on the device, with one column for each tensor: the number of its first block, its length,
and further rows of the kernel, such as addresses. Blocks are numbered over all tensors, and a program finds the tensor
of its block by bisection. A tensor counts as its elements in the order of memory.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from contextlib import suppress

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from .language import jit, tl

Integers = npt.NDArray[np.int64]
"""One entry for each tensor."""

UPLOADS_KEPT = 4096
"""Tables that stay on the device: one for each bucket of a step."""


def make_table(
    tensors: Sequence[Tensor], block: int, rows: Integers, device: torch.device
) -> tuple[int, tuple[Tensor, int, int]]:
    """Return how many blocks tensors have, and the first arguments of a launch on the current stream over them.

    Those are the table of the tensors that have elements, how many these are, and the steps of the bisection.

    Args:
        tensors: of which the lengths count.
        block: elements of a block; the last of a tensor may have fewer.
        rows: further rows of the table, with a column for each tensor.
        device: that the table is for.
    """
    lengths = np.array([tensor.numel() for tensor in tensors], np.int64)
    has_elements = lengths > 0
    lengths = lengths[has_elements]
    counts = -(-lengths // block)
    entries = np.concatenate([[np.cumsum(counts) - counts, lengths], rows[:, has_elements]])
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    steps = max(len(lengths) - 1, 0).bit_length()
    return int(counts.sum()), (_kept_upload(entries.tobytes(), device, stream), len(lengths), steps)


@functools.lru_cache(UPLOADS_KEPT)
def _kept_upload(entries: bytes, device: torch.device, stream: int) -> Tensor:
    """Return entries on the device; those that were uploaded lately, as the same buckets' in the last step, are kept.

    An upload on the model's stream may wait behind large copies. `stream` is the current one: another would have to
    wait for the upload, and the upload's memory for that.
    """
    return upload(np.frombuffer(entries, np.int64).copy(), device)


def upload(array: npt.NDArray[np.generic], device: torch.device) -> Tensor:
    """Return a copy of an array on the device, enqueued to the current stream."""
    host = torch.from_numpy(array)
    if device.type == "cpu":
        return host
    with suppress(RuntimeError):  # where the driver refuses, the calling thread waits for the stream: no step may fail
        host = host.pin_memory()
    return host.to(device, non_blocking=True)


def addresses_of(tensors: Sequence[Tensor | None]) -> Integers:
    """Return the address of each tensor; 0 for None."""
    return np.array([0 if tensor is None else tensor.data_ptr() for tensor in tensors], np.int64)


def in_memory_order(tensor: Tensor) -> Tensor:
    """Return a dense tensor's elements in one dimension; the view's version counter is its own."""
    return tensor.data.as_strided((tensor.numel(),), (1,))


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
