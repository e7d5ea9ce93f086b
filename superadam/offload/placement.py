"""Placement: where each bucket's step is made, how large buckets are, how gradients travel, and on how many cores.

No choice changes a bit of the result, so placements may be tried and changed in the middle of training.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from superadam.offload.buckets import DEFAULT_NUMEL

LEAST_BUCKETS = 8  # if the model is large enough: the work that remains after backward is about one bucket
LEAST_NUMEL = 1024 * 1024
SLACK_SHARE = 0.02  # of backward's time, by which the last bucket may end after it


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


@dataclass(frozen=True, slots=True)
class BucketTimes:
    """Times of one bucket of a step.

    Attributes:
        bytes: moved by the pass that speculated on it, which may have committed the step before as well; of a resident
            bucket, what that pass would move.
        ready: seconds of `time.perf_counter()` when its gradients, or their norm, had arrived on the host.
        worker_seconds: time that it took there.
        is_hidden: whether the model computed meanwhile, so that the worker used the placement's number of threads.
        is_resident: whether its step is made on the device.
        waits: whether it was not speculated on, so that all but its norm is work after backward.
    """

    elements: int
    bytes: int
    ready: float
    worker_seconds: float = 0.0
    is_hidden: bool = True
    is_resident: bool = False
    waits: bool = False


def rate(times: Sequence[BucketTimes]) -> float:
    """Return the worker's median seconds per byte over some buckets: passes differ in bytes, not in speed."""
    return statistics.median(one.worker_seconds / max(1, one.bytes) for one in times)


def numel_of_buckets(total: int, least: int = LEAST_NUMEL) -> int:
    """Return the elements of a bucket, an eighth of the `total` of a step, within bounds."""
    return max(least, min(DEFAULT_NUMEL, total // LEAST_BUCKETS))


def worker_ends(step: Sequence[BucketTimes], seconds_per_byte: float) -> list[float]:
    """Return when all work would be done if only the first 0, 1, 2, ... buckets of a step travelled."""
    ends = [step[0].ready]
    hidden, after = step[0].ready, 0.0
    for one in step:
        seconds = one.bytes * seconds_per_byte
        if one.waits:
            after += seconds
        else:
            hidden = max(hidden, one.ready) + seconds
        ends.append(max(hidden, step[-1].ready) + after if after else hidden)
    return ends


def elements_to_keep(step: Sequence[BucketTimes], seconds_per_byte: float, affordable: float) -> int:
    """Return how many trailing elements of a step to keep on the device.

    These are the fewest buckets with which the worker finishes the others about when backward ends, or as many as fit
    if that is impossible. `step` holds the buckets in the order in which they became ready, `affordable` is the number
    of elements whose state the device can hold.
    """
    begin, end = step[0].ready, step[-1].ready
    allowed = end + SLACK_SHARE * (end - begin)
    in_time = sum(done <= allowed for done in worker_ends(step, seconds_per_byte)[1:])
    resident = list(itertools.accumulate((one.elements for one in reversed(step)), initial=0))
    return min(resident[len(step) - in_time], max(elements for elements in resident if elements <= affordable))


def saved_share(step: Sequence[BucketTimes], seconds_per_byte: float, resident: int) -> float:
    """Return by what share the time until the worker is done shrinks if so many trailing elements are resident."""
    ends, end = worker_ends(step, seconds_per_byte), step[-1].ready
    now = max(end, ends[sum(not one.is_resident for one in step)])
    elements, travelling = 0, len(step)
    while travelling and elements < resident:
        travelling -= 1
        elements += step[travelling].elements
    return (now - max(end, ends[travelling])) / max(now - step[0].ready, 1e-9)


def last_parameters(order: Sequence[Tensor], placement: Placement) -> list[Tensor]:
    """Return the parameters of the last `gpu_buckets` buckets, from all parameters in the order of readiness."""
    chosen: list[Tensor] = []
    elements = 0
    for parameter in reversed(order):
        if elements >= placement.gpu_buckets * placement.bucket_numel:
            break
        chosen.append(parameter)
        elements += parameter.numel()
    return chosen
