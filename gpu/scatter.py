"""Copies many tensors into as many others in one launch: new values from flat buffers into parameters.

It converts nothing and should be bound by memory; it has not been measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from superadam.kernels.copies import copy_each
from superadam.kernels.dtypes import DTYPES
from superadam.kernels.torch_private import is_short_of_memory

from .casts import VECTOR_BYTES, pointer
from .choice import Backend, backend
from .language import jit, on, tl
from .tables import Integers, LaunchCache, Table, entry, facts_of, find_tensor
from .tensors import check_tensor, checked_addresses, in_memory_order, lengths_of, words

BLOCK = 4096
"""Elements of one tensor that a program copies."""

OPTIONS = {"num_warps": 4, "enable_fp_fusion": False}


@jit(fixed=("tensors", "steps"))
def scatter_kernel(
    table, tensors, steps, DTYPE: tl.constexpr, BYTES: tl.constexpr, IS_ALIGNED: tl.constexpr, BLOCK: tl.constexpr
):
    """Copy one block. Further rows of the table: addresses of the targets, addresses of the sources."""
    number = tl.program_id(0).to(tl.int64)
    tensor = find_tensor(table, tensors, steps, number)
    begin = (number - entry(table, tensors, 0, tensor)) * BLOCK
    rest = entry(table, tensors, 1, tensor) - begin
    target = pointer(entry(table, tensors, 2, tensor) + begin * BYTES, DTYPE, IS_ALIGNED)
    source = pointer(entry(table, tensors, 3, tensor) + begin * BYTES, DTYPE, IS_ALIGNED)
    index = tl.arange(0, BLOCK)
    if rest >= BLOCK:  # without masks loads can be as wide as the addresses allow
        tl.store(target + index, tl.load(source + index))
    else:
        tl.store(target + index, tl.load(source + index, index < rest), index < rest)


@dataclass(frozen=True, slots=True)
class Part:
    """The pairs of one dtype: their positions among all, and their table."""

    dtype: torch.dtype
    positions: Integers
    table: Table


def scatter_values(
    sources: Sequence[Tensor], tensors: Sequence[Tensor], cache: LaunchCache[list[Part]] | None = None
) -> None:
    """Copy each source into the tensor of the same position, past version counters.

    Enqueued to the current stream, one launch for each dtype; sources from outside torch's allocator must be kept until
    that has run. Where memory for the table of a launch is missing, they are copied one after another.

    Args:
        sources: dense, each with the dtype and the number of elements of its tensor, on the device of the tensors or in
            pinned host memory, which the kernel then reads directly.
        tensors: dense, of float32, bfloat16, float16 or float64, on one device. They do not overlap. Elements of both
            count in the order of memory.
        cache: of earlier calls with tensors like these, which then are not checked again, but for their memory.

    Raises:
        TypeError: a source has another dtype than its tensor, or a dtype is not supported.
        ValueError: there is not one source for each tensor, one has another number of elements, or a tensor or source
            is not dense, out of reach or without memory.
        RuntimeError: Triton was requested and cannot be used.
    """
    if len(sources) != len(tensors):
        raise ValueError(f"there are {len(sources)} sources for {len(tensors)} tensors; give one for each tensor")
    if not tensors:
        return
    try:
        _scatter(sources, tensors, cache)
    except Exception as error:
        if not is_short_of_memory(error):
            raise
        _copy(sources, tensors)


def _copy(sources: Sequence[Tensor], tensors: Sequence[Tensor]) -> None:
    copy_each([*map(in_memory_order, tensors)], [*map(in_memory_order, sources)], non_blocking=True)


def _scatter(sources: Sequence[Tensor], tensors: Sequence[Tensor], cache: LaunchCache[list[Part]] | None) -> None:
    device = tensors[0].device
    if cache is None or any(source.device != device for source in sources):  # pinned memory is looked at
        cache = LaunchCache()
    facts = facts_of([*sources, *tensors])
    parts = cache.checked(facts, lambda: _checked(sources, tensors, device))
    addresses = np.stack([checked_addresses(tensors, "tensor"), checked_addresses(sources, "source")])
    if backend(device).backend is Backend.TORCH:
        _copy(sources, tensors)
        return
    with on(device):
        for part in parts:
            if part.table.blocks == 0:
                continue
            rows = addresses[:, part.positions]
            scatter_kernel[(part.table.blocks,)](
                part.table.entries(rows),
                part.table.tensors,
                part.table.steps,
                DTYPE=int(DTYPES[part.dtype]),
                BYTES=part.dtype.itemsize,
                IS_ALIGNED=not np.any(rows % VECTOR_BYTES),
                BLOCK=BLOCK,
                **OPTIONS,
            )


def _checked(sources: Sequence[Tensor], tensors: Sequence[Tensor], device: torch.device) -> list[Part]:
    """Raise as `scatter_values` unless sources fit their tensors, whatever their memory."""
    for position, (source, tensor) in enumerate(zip(sources, tensors, strict=True)):
        check_tensor(tensor, f"tensor {position}", device)
        check_tensor(source, f"source {position}", device, may_be_pinned=True)
        if source.dtype != tensor.dtype:
            raise TypeError(
                f"source {position} is {words(source.dtype)}, expected {words(tensor.dtype)} as its tensor; "
                "convert it first"
            )
        if source.numel() != tensor.numel():
            raise ValueError(
                f"source {position} has {source.numel()} elements, expected {tensor.numel()} as its tensor; give each "
                "tensor a source of its length"
            )
    lengths, dtypes = lengths_of(tensors), np.array([DTYPES[tensor.dtype] for tensor in tensors])
    parts = []
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        positions = np.flatnonzero(dtypes == DTYPES[dtype])
        parts.append(Part(dtype, positions, Table(lengths[positions], BLOCK, device)))
    return parts
