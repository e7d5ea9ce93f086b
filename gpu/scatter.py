"""Copies a flat buffer into many tensors in one launch: the way of new working copies into their parameters.

A plain copy: it converts nothing and should be bound by memory; it has not been measured.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from . import fallback
from .casts import VECTOR_BYTES, pointer
from .choice import Backend, backend
from .language import jit, on, tl
from .tables import Table, entry, find_tensor
from .tensors import DTYPES, addresses_of, check_flat, check_tensor, checked_offsets, lengths_of, words

BLOCK = 4096
"""Elements that one program copies, of one tensor."""

OPTIONS = {"num_warps": 4}
"""How the kernel is compiled."""


@jit(fixed=("tensors", "steps", "source"))
def scatter_kernel(
    table,
    tensors,
    steps,
    source,
    DTYPE: tl.constexpr,
    BYTES: tl.constexpr,
    IS_ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Copy one block. Rows of the table beside first block and length: address, offset in the buffer at `source`."""
    number = tl.program_id(0).to(tl.int64)
    tensor = find_tensor(table, tensors, steps, number)
    begin = (number - entry(table, tensors, 0, tensor)) * BLOCK
    rest = entry(table, tensors, 1, tensor) - begin
    target = pointer(entry(table, tensors, 2, tensor) + begin * BYTES, DTYPE, IS_ALIGNED)
    values = pointer(source + (entry(table, tensors, 3, tensor) + begin) * BYTES, DTYPE, IS_ALIGNED)
    index = tl.arange(0, BLOCK)
    if rest >= BLOCK:  # without masks loads can be as wide as the addresses allow
        tl.store(target + index, tl.load(values + index))
    else:
        tl.store(target + index, tl.load(values + index, index < rest), index < rest)


def scatter_values(buffer: Tensor, offsets: Sequence[int], tensors: Sequence[Tensor]) -> None:
    """Copy consecutive elements of a flat buffer into each of many tensors, past their version counters.

    Enqueued to the current stream; one launch, whatever the number of tensors.

    Args:
        buffer: 1-D, contiguous, of float32, bfloat16, float16 or float64, on the device of the tensors, or pinned
            memory of the host, which the kernel then reads directly.
        offsets: where in the buffer the elements of each tensor begin.
        tensors: dense, of any shape and of the buffer's dtype, on one device; their elements count in the order of
            memory.

    Raises:
        TypeError: a tensor has another dtype than the buffer, or one that is not taken.
        ValueError: a tensor is not dense or out of reach, or its elements do not lie within the buffer.
        RuntimeError: Triton was asked for and cannot be used.
    """
    if not tensors:
        return
    device = tensors[0].device
    check_flat(buffer, "buffer", None, 0, device)
    for position, tensor in enumerate(tensors):
        check_tensor(tensor, f"tensor {position}", device)
        if tensor.dtype != buffer.dtype:
            raise TypeError(
                f"tensor {position} is {words(tensor.dtype)}, expected {words(buffer.dtype)} as the buffer; make a "
                "buffer for each dtype"
            )
    lengths = lengths_of(tensors)
    places = checked_offsets(offsets, lengths, buffer.numel(), "buffer")
    if backend(device).backend is Backend.TORCH:
        fallback.scatter_values(buffer, places.tolist(), tensors)
        return

    size = buffer.element_size()
    begins = addresses_of(tensors)
    with on(device):
        table = Table.of(lengths, [begins, places], BLOCK, device)
        if table.blocks == 0:
            return
        scatter_kernel[(table.blocks,)](
            table.entries,
            table.tensors,
            table.steps,
            buffer.data_ptr(),
            DTYPE=int(DTYPES[buffer.dtype]),
            BYTES=size,
            IS_ALIGNED=not np.any((begins | (places * size + buffer.data_ptr())) % VECTOR_BYTES),
            BLOCK=BLOCK,
            **OPTIONS,
        )
