"""What pack and scatter do without Triton: the same bits from plain torch operations, on any device.

Many launches and temporaries instead of one launch: for machines that lack Triton, not for speed. There is no such
form of the update: exact fmas from torch operations would take several times the bucket's memory in temporaries.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from superadam import native
from superadam.native import CHUNK, Dtype, Pass

from .tensors import in_memory_order

LANES = 16


def pack_gradients(
    gradients: Sequence[Tensor],
    offsets: Sequence[int],
    destination: Tensor,
    sums: Tensor | None,
    nonfinite: Tensor | None,
) -> None:
    """Do what `pack.pack_gradients` does, after its checks.

    The sums of float64 gradients on a GPU block the calling thread: they are taken on the host.
    """
    lengths = [gradient.numel() for gradient in gradients]
    counts = [-(-length // CHUNK) for length in lengths]
    padded = None
    if sums is not None:
        padded = torch.zeros(sum(counts) * CHUNK, dtype=destination.dtype, device=gradients[0].device)
    first = 0
    for gradient, offset, length, count in zip(gradients, offsets, lengths, counts, strict=True):
        converted = in_memory_order(gradient).to(destination.dtype)
        destination[offset : offset + length].copy_(converted, non_blocking=True)
        if padded is not None:
            padded[first * CHUNK : first * CHUNK + length] = converted
        first += count
    if padded is None or sums is None or nonfinite is None:
        return
    totals = chunk_sums_on_host(padded) if padded.dtype == torch.float64 else chunk_sums(padded)
    sums[:first].copy_(totals, non_blocking=True)
    found = ~torch.isfinite(padded.view(-1, CHUNK))
    nonfinite[:first].copy_(found.sum(dim=1), non_blocking=True)


def chunk_sums(padded: Tensor) -> Tensor:
    """Return the fp64 sum of squares of each chunk of a 1-D tensor of float32, bfloat16 or float16, zeros at the end.

    Squares of float32 are exact in double, so that adding them is what fma does.
    """
    rows = padded.view(-1, CHUNK // LANES, LANES)
    lanes = torch.zeros(rows.shape[0], LANES, dtype=torch.float64, device=padded.device)
    for row in rows.unbind(dim=1):
        wide = row.to(torch.float64)
        lanes += wide * wide
    for width in (8, 4, 2, 1):
        lanes = lanes[:, :width] + lanes[:, width : 2 * width]
    return lanes[:, 0]


def chunk_sums_on_host(padded: Tensor) -> Tensor:
    """Return the sum of squares of each chunk of a 1-D tensor of float64, by the CPU kernel: torch has no exact fma."""
    values = padded.cpu().numpy()
    sums, nonfinite = np.zeros(len(values) // CHUNK), np.zeros(len(values) // CHUNK, np.int64)
    job = np.zeros(1, native.SEGMENT)
    job["gradient"], job["gradient_dtype"], job["length"] = values.ctypes.data, Dtype.FLOAT64, len(values)
    job["sums"], job["nonfinite"] = sums.ctypes.data, nonfinite.ctypes.data
    native.run(Pass.NORM, job)
    return torch.from_numpy(sums)


def scatter_values(sources: Sequence[Tensor], tensors: Sequence[Tensor]) -> None:
    """Do what `scatter.scatter_values` does, after its checks."""
    targets = [in_memory_order(tensor) for tensor in tensors]
    torch._foreach_copy_(targets, [in_memory_order(source) for source in sources], non_blocking=True)
