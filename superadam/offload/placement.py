"""Placement: where each bucket's step is made, how large buckets are, how gradients travel, and on how many cores.

No choice changes a bit of the result, so placements may be tried and changed in the middle of training.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch

from superadam.offload.buckets import DEFAULT_NUMEL

LEAST_BUCKETS = 8  # if the model is large enough: the work that remains after backward is about one bucket
LEAST_NUMEL = 1024 * 1024
USED_SHARE = 0.9  # of the room on a device that is short of memory
PACKED_UNDER_WAY = 2  # packed buckets that may wait for the link where the device is short of memory


class HasShape(Protocol):
    """A piece, or what stands for one in a plan."""

    @property
    def shape(self) -> torch.Size:
        """Its elements are those of a piece."""


_Piece = TypeVar("_Piece", bound=HasShape)


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


def last_pieces(order: Sequence[_Piece], placement: Placement) -> list[_Piece]:
    """Return the pieces of the last `gpu_buckets` buckets, from all of them in the order of readiness."""
    chosen: list[_Piece] = []
    elements = 0
    for piece in reversed(order):
        if elements >= placement.gpu_buckets * placement.bucket_numel:
            break
        chosen.append(piece)
        elements += piece.shape.numel()
    return chosen


def room_for_new_values(travelled: int, packed: int, largest: int, free: int | None) -> int | None:
    """Return the bytes of a step's new values that a device has room for; None where that is all of them.

    Args:
        travelled: bytes of all new values.
        packed: of these, what was on the device at once before, so that it is a part of the device's peak.
        largest: bytes of a bucket.
        free: what the peak has left; None where that is unknown.
    """
    if free is None or free >= travelled - packed:
        return None
    under_way = (PACKED_UNDER_WAY + 2) * largest  # with one that is packed, and one that is being freed
    return max(0, int(USED_SHARE * (free + packed - under_way)))
