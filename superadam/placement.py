"""Where each bucket's step is made, how large buckets are, how gradients travel, and on how many cores.

Owns the rules of the choice, over measured times; `Placer` measures and applies them. No choice changes a bit of what
is computed, so that all may be tried, and changed in the middle of training.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from superadam.buckets import DEFAULT_NUMEL

LEAST_BUCKETS = 8
"""So many buckets at least, where the model is large enough: what comes after backward is about one of them."""

LEAST_NUMEL = 1024 * 1024
"""Elements of a bucket at the least."""

OVERHEAD_SHARE = 0.02
"""Of a bucket's time with the worker, what handing it over may cost the training thread."""

SLACK_SHARE = 0.02
"""Of backward's time, what the last bucket may end after it."""

ENOUGH_SPEED = 0.97
"""Fewer cores are enough if they are so fast, compared with all."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Where and how steps are made.

    Attributes:
        gpu_buckets: the last so many buckets to become ready keep their state on the device, and are stepped there.
        bucket_numel: elements that travel and are speculated on together.
        link_dtype: dtype in which gradients travel to the host; None for their own.
        cores: CPU threads that speculate while the model computes; 0 leaves all work to `step()`.
    """

    gpu_buckets: int
    bucket_numel: int
    link_dtype: torch.dtype | None
    cores: int


@dataclass(frozen=True, slots=True)
class BucketTimes:
    """One bucket of a measured step.

    Attributes:
        elements: of its gradients.
        gradient_bytes: of one element, as it travelled.
        is_widened: whether the gradients travelled in fp32, though their own dtype is narrower.
        cores: that speculated on it; 0 for as many as there are, because `step()` waited for it.
        ready: seconds of `time.perf_counter()` when it had arrived on the host.
        worker_seconds: that it took there.
        handing_seconds: that handing it over took the training thread.
    """

    elements: int
    gradient_bytes: int
    is_widened: bool
    cores: int
    ready: float
    worker_seconds: float
    handing_seconds: float

    @property
    def seconds_per_element(self) -> float:
        """Of the worker."""
        return self.worker_seconds / max(1, self.elements)


def rate(times: Sequence[BucketTimes]) -> float:
    """Return the median seconds per element of some buckets."""
    return statistics.median(one.seconds_per_element for one in times)


def enough_cores(times: Sequence[BucketTimes]) -> int:
    """Return the least number of cores that was about as fast as the fastest; memory may not need them all."""
    tried = {cores: rate([one for one in times if one.cores == cores]) for cores in {one.cores for one in times}}
    return min(cores for cores, seconds in tried.items() if seconds * ENOUGH_SPEED <= min(tried.values()))


def should_widen(times: Sequence[BucketTimes], link_seconds_per_byte: float) -> bool:
    """Return whether gradients had better travel in fp32: transfer and step run side by side, the slower one counts.

    Args:
        times: of buckets of both kinds.
        link_seconds_per_byte: from the device to the host.
    """
    own = [one for one in times if not one.is_widened]
    wide = [one for one in times if one.is_widened]

    def seconds(some: Sequence[BucketTimes]) -> float:
        return max(rate(some), statistics.median(one.gradient_bytes for one in some) * link_seconds_per_byte)

    return bool(own) and bool(wide) and seconds(wide) < seconds(own)


def unmeasured_numel(total: int, least: int = LEAST_NUMEL) -> int:
    """Return the elements of a bucket as long as nothing is measured: an eighth of a step, within bounds.

    Args:
        total: elements of a whole step.
        least: lower bound.
    """
    return max(least, min(DEFAULT_NUMEL, total // LEAST_BUCKETS))


def numel_of_buckets(times: Sequence[BucketTimes], total: int) -> int:
    """Return the smallest bucket whose handing over is cheap beside its step, within bounds.

    Args:
        times: of measured buckets.
        total: elements of a whole step.
    """
    handing = statistics.median(one.handing_seconds for one in times)
    cheap = handing / OVERHEAD_SHARE / max(rate(times), 1e-15)
    return max(LEAST_NUMEL, min(unmeasured_numel(total), math.ceil(cheap)))


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
