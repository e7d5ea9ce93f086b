"""Placement: where each bucket's step is made, how large buckets are, how gradients travel, and on how many cores.

No choice changes a bit of the result, so placements may be tried and changed in the middle of training.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from superadam.offload.buckets import DEFAULT_NUMEL
from superadam.state.parameter import Piece

LEAST_BUCKETS = 8  # if the model is large enough: the work that remains after backward is about one bucket
LEAST_NUMEL = 1024 * 1024


@dataclass(frozen=True, slots=True)
class Placement:
    """Where and how steps are made.

    Attributes:
        gpu_buckets: number of last-ready buckets whose state stays on the device, where their steps are made.
        bucket_numel: elements that travel and are speculated on together.
        transfer_dtype: dtype in which gradients travel to the host; None for their own.
        num_threads: CPU threads that speculate while the model computes; 0 leaves all work to `step()`.
    """

    gpu_buckets: int
    bucket_numel: int
    transfer_dtype: torch.dtype | None
    num_threads: int


def numel_of_buckets(total: int) -> int:
    """Return the elements of a bucket, an eighth of the `total` of a step, within bounds."""
    return max(LEAST_NUMEL, min(DEFAULT_NUMEL, total // LEAST_BUCKETS))


def last_pieces(order: Sequence[Piece], placement: Placement) -> list[Piece]:
    """Return the pieces of the last `gpu_buckets` buckets, from all of them in the order of readiness."""
    chosen: list[Piece] = []
    elements = 0
    for piece in reversed(order):
        if elements >= placement.gpu_buckets * placement.bucket_numel:
            break
        chosen.append(piece)
        elements += piece.shape.numel()
    return chosen
