"""The buckets of a model, cut as a scheduler cuts them, and how many of them stay on the device."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from superadam.offload.placement import Placement, last_pieces
from superadam.plan.events import Bucket
from superadam.state.parameter import piece_length


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """A piece of a parameter: its elements, the share of backward after which it is there, and if it ends a cut."""

    shape: torch.Size
    at: float
    ends_cut: bool = False


def parts_of(parameters: Iterable[tuple[Tensor, float]], bucket_numel: int) -> list[Part]:
    """Return the pieces of parameters, which may be meta, in the order in which their gradients are computed.

    Each comes with its share of backward's time.
    """
    parts, at = [], 0.0
    for parameter, share in parameters:
        at = min(1.0, at + share)
        left, each = parameter.numel(), piece_length(parameter, bucket_numel)
        is_cut = left > each
        while left > 0:
            numel = min(each, left)
            left -= numel
            parts.append(Part(torch.Size([numel]), at, is_cut and left == 0))
    return parts


def buckets_of(parts: Sequence[Part], placement: Placement) -> list[Bucket]:
    """Return the buckets, in the order in which they are sent."""
    resident = {id(part) for part in last_pieces(parts, placement)}
    last = next((part for part in reversed(parts) if id(part) not in resident), None)
    buckets, filling = [], {False: 0, True: 0}

    def send(is_resident: bool, at: float) -> None:
        if numel := filling[is_resident]:
            buckets.append(Bucket(numel, at, is_resident))
            filling[is_resident] = 0

    for part in parts:
        is_resident = id(part) in resident
        filling[is_resident] += part.shape.numel()
        if filling[is_resident] >= placement.bucket_numel or (part is last and resident):
            send(is_resident, part.at)
        if part.ends_cut:  # whose gradient keeps its memory until all of it is sent
            send(False, part.at)
            send(True, part.at)
    send(False, 1.0)
    send(True, 1.0)
    return buckets
