"""Packs the gradients of a bucket into one flat buffer, and computes their norm on the way, in one launch.

Gathers, widens (or, for a narrower transfer dtype, rounds), sums squares and counts Inf and NaN; it never scales. The
sums have the bits of the CPU's NORM pass: chunks of 4096 consecutive elements of one tensor, 16 lanes each, every lane
summed one element after another in fp64 by fma, then the lanes pairwise; see `lanes_total` in `cpu/adam_loop.h`.

A program takes eight chunks at once, as a tile of 8 x 16 elements that walks down the 256 rows of the chunks: a thread
holds four neighbouring lanes in registers, and loads sixteen rows ahead of the first store, because the compiler cannot
know that the buffer is not a gradient. Where addresses are aligned a thread loads 16 bytes at once, and the tile's part
of a chunk is 64 bytes of fp32: whole sectors. The kernel moves every element once and should be bound by memory, but
perhaps for sums on a GPU of little fp64; it has not been measured.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from superadam.kernels.dtypes import DTYPES
from superadam.kernels.native import CHUNK

from .casts import FLOAT64, VECTOR_BYTES, narrow, pointer, widen
from .language import AS_WRITTEN, constant, jit, obstacle, on, tl
from .tables import addresses_of, entry, find_tensor, in_memory_order, make_table

LENGTH = constant(CHUNK)
LANES = constant(16)
ROWS_AHEAD = constant(16)
"""Half as many where gradients are converted, with sums: registers would not hold more."""

CHUNKS_PER_PROGRAM = 8
"""So that each of 32 threads holds four lanes; of 64 threads, on AMD's GPUs, each holds two, and loads half as much."""


@jit()
def fold(lanes, CHUNKS: tl.constexpr, WIDTH: tl.constexpr):
    """Return lane i plus lane i + WIDTH, for the 2 * WIDTH lanes of each chunk."""
    low, high = lanes.reshape(CHUNKS, 2, WIDTH).permute(0, 2, 1).split()
    return low + high


@jit()
def lanes_total(lanes, CHUNKS: tl.constexpr):
    """Return the sum of each chunk's lanes, added pairwise: lane i and i + 8, then i and i + 4, ..."""
    eight = fold(lanes, CHUNKS, 8)
    return fold(fold(fold(eight, CHUNKS, 4), CHUNKS, 2), CHUNKS, 1).reshape(CHUNKS)


@jit()
def pack_chunks(
    source,
    target,
    rest,
    IS_PARTIAL: tl.constexpr,
    SOURCE: tl.constexpr,
    LINK: tl.constexpr,
    HAS_SUMS: tl.constexpr,
    IS_ALIGNED: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    """Copy the first `rest` elements of some chunks; return their lanes, and counts of Inf and NaN per lane."""
    lane = tl.arange(0, LANES)[None, :]
    lanes = tl.zeros([CHUNKS, LANES], tl.float64)
    nonfinite = tl.zeros([CHUNKS, LANES], tl.int32)
    rows = (tl.max(rest) + LANES - 1) // LANES if IS_PARTIAL else LENGTH // LANES
    is_large: tl.constexpr = HAS_SUMS and SOURCE != LINK
    ahead: tl.constexpr = ROWS_AHEAD // 2 if is_large else ROWS_AHEAD
    for first in range(0, rows, ahead):
        block = ()
        for row in tl.static_range(ahead):
            index = (first + row) * LANES + lane
            stored = tl.load(source + index, index < rest, other=0) if IS_PARTIAL else tl.load(source + index)
            block += (stored,)  # type: ignore[assignment]
        for row in tl.static_range(ahead):
            index = (first + row) * LANES + lane
            stored = block[row]
            value = widen(stored, SOURCE)
            if SOURCE != LINK:
                stored = narrow(value, LINK)
                value = widen(stored, LINK)
            tl.store(target + index, stored, index < rest if IS_PARTIAL else None)
            if HAS_SUMS:
                if LINK == FLOAT64:
                    exponent = value.to(tl.int64, bitcast=True) >> 52 & 0x7FF
                    nonfinite += (exponent == 0x7FF).to(tl.int32)
                else:
                    exponent = value.to(tl.int32, bitcast=True) >> 23 & 0xFF
                    nonfinite += (exponent == 0xFF).to(tl.int32)
                value = value.to(tl.float64)
                lanes = tl.fma(value, value, lanes)
    return lanes, nonfinite


@jit(fixed=("tensors", "steps", "chunks", "destination", "sums", "counts"))
def pack_kernel(
    table,
    tensors,
    steps,
    chunks,
    destination,
    sums,
    counts,
    SOURCE: tl.constexpr,
    LINK: tl.constexpr,
    LINK_BYTES: tl.constexpr,
    HAS_SUMS: tl.constexpr,
    IS_ALIGNED: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    """Pack CHUNKS of all `chunks`.

    Further rows of the table: address, offset in `destination`. `destination`, `sums` (float64) and `counts`
    (int64), the latter two with an entry for each chunk, are addresses.
    """
    number = tl.program_id(0) * CHUNKS + tl.arange(0, CHUNKS)
    exists = number < chunks
    number = tl.minimum(number, chunks - 1).to(tl.int64)
    tensor = find_tensor(table, tensors, steps, number)
    begin = (number - entry(table, tensors, 0, tensor)) * LENGTH
    rest = tl.where(exists, tl.minimum(entry(table, tensors, 1, tensor) - begin, LENGTH), 0)
    source = (pointer(entry(table, tensors, 2, tensor), SOURCE, IS_ALIGNED) + begin)[:, None]
    target = destination + (entry(table, tensors, 3, tensor) + begin) * LINK_BYTES
    target, rest = pointer(target, LINK, IS_ALIGNED)[:, None], rest[:, None]
    # Without masks loads can be as wide as the addresses allow. The branches differ in nothing else.
    if tl.min(rest) == LENGTH:
        lanes, nonfinite = pack_chunks(source, target, rest, False, SOURCE, LINK, HAS_SUMS, IS_ALIGNED, CHUNKS)
    else:
        lanes, nonfinite = pack_chunks(source, target, rest, True, SOURCE, LINK, HAS_SUMS, IS_ALIGNED, CHUNKS)
    if HAS_SUMS:
        tl.store(sums.to(tl.pointer_type(tl.float64)) + number, lanes_total(lanes, CHUNKS), exists)
        tl.store(counts.to(tl.pointer_type(tl.int64)) + number, tl.sum(nonfinite, axis=1).to(tl.int64), exists)


def pack_gradients(
    gradients: Sequence[Tensor],
    offsets: Sequence[int],
    destination: Tensor,
    sums: Tensor | None = None,
    nonfinite: Tensor | None = None,
) -> None:
    """Copy gradients into one flat buffer, converted to its dtype, and compute their norm as they arrive there.

    Enqueued to the current stream; memory from outside torch's allocator must be kept until that has run. One launch
    for any number of gradients, or without Triton, which norms need, one for each, with the same bits. Gaps in the
    buffer keep their bits.

    Args:
        gradients: dense, on one device, of one dtype; they count as their elements in the order of memory.
        offsets: first element of each in `destination`.
        destination: 1-D, contiguous, on the device. float32 widens exactly; bfloat16 and float16 round other dtypes to
            nearest even; float64 gradients, and only they, take a float64 buffer.
        sums: float64, 1-D, on the device: receives the sum of squares of the converted elements of each chunk of 4096
            elements of a gradient, in the order of `gradients`. None for no norm.
        nonfinite: int64, like `sums`: receives the count of Inf and NaN in each chunk. None exactly when `sums` is.

    Raises:
        ValueError: several dtypes; nothing was enqueued.
    """
    if not gradients:
        return
    device = gradients[0].device
    if sums is None and obstacle(device) is not None:
        for gradient, place in zip(gradients, offsets, strict=True):
            destination[place : place + gradient.numel()].copy_(in_memory_order(gradient), non_blocking=True)
        return

    source, *others = {gradient.dtype for gradient in gradients}
    if others:  # which would be read past their ends
        raise ValueError(
            f"superadam.gpu.pack_gradients got gradients of {len(others) + 1} dtypes, expected one; pack those of each "
            "by themselves"
        )
    base, size = destination.data_ptr(), destination.element_size()
    begins, places = addresses_of(gradients), np.array(offsets, np.int64)
    with on(device):
        chunks, table = make_table(gradients, CHUNK, np.stack([begins, places]), device)
        if chunks == 0:
            return
        pack_kernel[(-(-chunks // CHUNKS_PER_PROGRAM),)](
            *table,
            chunks,
            base,
            0 if sums is None else sums.data_ptr(),
            0 if nonfinite is None else nonfinite.data_ptr(),
            SOURCE=int(DTYPES[source]),
            LINK=int(DTYPES[destination.dtype]),
            LINK_BYTES=size,
            HAS_SUMS=sums is not None,
            IS_ALIGNED=not np.any((begins | (places * size + base)) % VECTOR_BYTES),
            CHUNKS=CHUNKS_PER_PROGRAM,
            num_warps=1,
            **AS_WRITTEN,
        )
