"""Copies many tensors into as many others in one launch: new values from flat buffers into parameters.

It converts nothing and should be bound by memory; it has not been measured.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from superadam.kernels.dtypes import DTYPES

from .casts import VECTOR_BYTES, pointer
from .choice import Backend, backend
from .language import jit, on, tl
from .tables import Table, entry, find_tensor
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


def scatter_values(sources: Sequence[Tensor], tensors: Sequence[Tensor]) -> None:
    """Copy each source into the tensor of the same position, past version counters.

    Enqueued to the current stream, one launch for each dtype; sources from outside torch's allocator must be kept until
    that has run.

    Args:
        sources: dense, each with the dtype and the number of elements of its tensor, on the device of the tensors or in
            pinned host memory, which the kernel then reads directly.
        tensors: dense, of float32, bfloat16, float16 or float64, on one device. They do not overlap. Elements of both
            count in the order of memory.

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
    device = tensors[0].device
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
    lengths = lengths_of(tensors)
    origins = checked_addresses(sources, lengths, "source")
    targets = checked_addresses(tensors, lengths, "tensor")
    if backend(device).backend is Backend.TORCH:
        torch._foreach_copy_([*map(in_memory_order, tensors)], [*map(in_memory_order, sources)], non_blocking=True)
        return

    dtypes = np.array([DTYPES[tensor.dtype] for tensor in tensors], np.int64)
    with on(device):
        for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
            chosen = dtypes == DTYPES[dtype]
            table = Table.of(lengths[chosen], [targets[chosen], origins[chosen]], BLOCK, device)
            if table.blocks == 0:
                continue
            scatter_kernel[(table.blocks,)](
                table.entries,
                table.tensors,
                table.steps,
                DTYPE=int(DTYPES[dtype]),
                BYTES=dtype.itemsize,
                IS_ALIGNED=not np.any((targets[chosen] | origins[chosen]) % VECTOR_BYTES),
                BLOCK=BLOCK,
                **OPTIONS,
            )
