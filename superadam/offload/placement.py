"""Where each bucket's step is made, how large buckets are, how gradients travel, and on how many cores.

Owns the rules of the choice, over measured times; `Autotuner` measures and applies them. No choice changes a bit of
what is computed, so that all may be tried, and changed in the middle of training.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from superadam.offload.buckets import DEFAULT_NUMEL

LEAST_BUCKETS = 8
"""So many buckets at least, where the model is large enough: what comes after backward is about one of them."""

LEAST_NUMEL = 1024 * 1024
"""Elements of a bucket at the least."""

SLACK_SHARE = 0.02
"""Of backward's time, what the last bucket may end after it."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Where and how steps are made.

    Attributes:
        gpu_buckets: the last so many buckets to become ready keep their state on the device, and are stepped there.
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
    """One bucket of a measured step.

    Attributes:
        elements: of its gradients.
        ready: seconds of `time.perf_counter()` when it had arrived on the host.
        worker_seconds: that it took there.
        is_hidden: whether the model computed meanwhile, so that the worker had the cores of the placement.
    """

    elements: int
    ready: float
    worker_seconds: float
    is_hidden: bool


def rate(times: Sequence[BucketTimes]) -> float:
    """Return the median seconds per element of the worker over some buckets."""
    return statistics.median(one.worker_seconds / max(1, one.elements) for one in times)


def numel_of_buckets(total: int, least: int = LEAST_NUMEL) -> int:
    """Return the elements of a bucket: an eighth of a step, within bounds.

    Args:
        total: elements of a whole step.
        least: lower bound.
    """
    return max(least, min(DEFAULT_NUMEL, total // LEAST_BUCKETS))


def elements_to_keep(step: Sequence[BucketTimes], seconds_per_element: float, affordable: int) -> int:
    """Return how many of the last elements of a step had better stay on the device.

    The fewest buckets after which the worker is done with the others about when backward ends; as many as fit if that
    is not to be had.

    Args:
        step: the buckets of one step in which none stayed, in the order in which they became ready.
        seconds_per_element: of the worker.
        affordable: elements whose state the device can hold.
    """
    begin, end = step[0].ready, step[-1].ready
    allowed = end + SLACK_SHARE * (end - begin)
    done, travelling = begin, 0
    for one in step:
        done = max(done, one.ready) + one.elements * seconds_per_element
        if done > allowed:
            break
        travelling += one.elements
    total = sum(one.elements for one in step)
    fitting = max(
        kept for kept in itertools.accumulate((one.elements for one in reversed(step)), initial=0) if kept <= affordable
    )
    return min(total - travelling, fitting)


def last_parameters(order: Sequence[Tensor], placement: Placement) -> list[Tensor]:
    """Return the parameters of the last `gpu_buckets` buckets.

    Args:
        order: all parameters, in the order in which their gradients become ready.
        placement: how many buckets, and how large they are.
    """
    chosen: list[Tensor] = []
    elements = 0
    for parameter in reversed(order):
        if elements >= placement.gpu_buckets * placement.bucket_numel:
            break
        chosen.append(parameter)
        elements += parameter.numel()
    return chosen
