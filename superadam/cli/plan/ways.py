"""Ways to make a step: with the buckets on the device that a scheduler would choose, and without overlap."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from superadam.cli.plan.schedule import Part, buckets_of
from superadam.offload.placement import FREE_SHARE, LEAST_GAIN, Placement
from superadam.plan.events import Rates, Step, Work, simulate

ROUNDS = 40  # of changes of the placement


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
        if late <= LEAST_GAIN * (work.backward + late):
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
    step, passes, moved = simulate(rates, work), rates.passes, work.size * work.numel
    clock = work.micro_batches * (work.forward + work.backward)
    adam = (passes.update + (passes.norm if work.clipping.share else 0.0)) * work.numel
    if work.flows:
        return clock + step.stalled + adam
    return clock + moved / rates.download + adam + moved / rates.upload
