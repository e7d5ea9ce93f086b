"""Copies many tensors into as many others in one launch: new values from flat buffers into parameters.

It converts nothing and should be bound by memory; it has not been measured.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from superadam.kernels.copies import copy_each
from superadam.kernels.dtypes import DTYPES
from superadam.kernels.torch_private import is_short_of_memory

from .casts import VECTOR_BYTES, pointer
from .language import AS_WRITTEN, jit, obstacle, on, tl
from .tables import addresses_of, entry, find_tensor, in_memory_order, make_table

BLOCK = 4096
"""Elements of one tensor that a program copies."""


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
    that has run. Where memory for the table of a launch is missing, they are copied one after another.

    Args:
        sources: dense, each with the dtype and the number of elements of its tensor, on the device of the tensors.
        tensors: dense, of float32, bfloat16, float16 or float64, on one device. They do not overlap. Elements of both
            count in the order of memory.
    """
    if not tensors:
        return
    try:
        _scatter(sources, tensors)
    except Exception as error:
        if not is_short_of_memory(error):
            raise
        _copy(sources, tensors)


def _copy(sources: Sequence[Tensor], tensors: Sequence[Tensor]) -> None:
    copy_each([*map(in_memory_order, tensors)], [*map(in_memory_order, sources)], non_blocking=True)


def _scatter(sources: Sequence[Tensor], tensors: Sequence[Tensor]) -> None:
    device = tensors[0].device
    if obstacle(device) is not None:
        _copy(sources, tensors)
        return
    with on(device):
        for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
            pairs = [pair for pair in zip(tensors, sources, strict=True) if pair[0].dtype == dtype]
            targets, origins = zip(*pairs, strict=True)
            rows = np.stack([addresses_of(targets), addresses_of(origins)])
            blocks, table = make_table(targets, BLOCK, rows, device)
            if blocks == 0:
                continue
            scatter_kernel[(blocks,)](
                *table,
                DTYPE=int(DTYPES[dtype]),
                BYTES=dtype.itemsize,
                IS_ALIGNED=not np.any(rows % VECTOR_BYTES),
                BLOCK=BLOCK,
                num_warps=4,
                **AS_WRITTEN,
            )
