"""The buckets of a model, cut as a scheduler cuts them, and the ways to make a step with them.

These are: with the buckets on the device that a scheduler would choose, and without overlap.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from superadam.offload.placement import FREE_SHARE, LEAST_DELAY, Placement, last_pieces
from superadam.plan.events import Bucket, Rates, Step, Work, simulate
from superadam.state.parameter import piece_length

ROUNDS = 40  # of changes of the placement


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
        numel, each = parameter.numel(), piece_length(parameter, bucket_numel)
        for begin in range(0, numel, max(1, each)):
            parts.append(Part(torch.Size([min(each, numel - begin)]), at, each < numel <= begin + each))
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


def placed(
    rates: Rates, work: Work, parts: Sequence[Part], placement: Placement, free: float, bytes_of_state: float
) -> tuple[int, Work, Step]:
    """Return the number of resident buckets that a scheduler would come to, and its steps.

    Args:
        free: bytes of the device that its peak leaves.
        bytes_of_state: of an element that stays.
    """
    most = max(0, int(FREE_SHARE * free / (bytes_of_state + work.size) // placement.bucket_numel))
    most = min(most, -(-work.numel // placement.bucket_numel))
    step = simulate(rates, work)
    for _ in range(ROUNDS):
        late = step.waited
        if late <= LEAST_DELAY * (work.backward + late):
            break
        more = math.ceil(late / (rates.passes.fused * placement.bucket_numel))
        wanted = min(placement.gpu_buckets + more, most)
        if wanted <= placement.gpu_buckets:
            break
        placement = replace(placement, gpu_buckets=wanted)
        work = replace(work, buckets=buckets_of(parts, placement))
        step = simulate(rates, work)
    return placement.gpu_buckets, work, step


def synchronous(rates: Rates, work: Work) -> float:
    """Return the seconds of an iteration whose optimizer begins after backward: download, update, upload.

    Weights that flow are on the host already, as are their gradients; then the model waits for copies as it does here.
    """
    passes, moved = rates.passes, work.size * work.numel
    clock = work.micro_batches * (work.forward + work.backward)
    adam = (passes.update + (passes.norm if work.clipping.share else 0.0)) * work.numel
    if work.flows:
        return clock + simulate(rates, work).stalled + adam
    return clock + moved / rates.download + adam + moved / rates.upload
