"""Autotuning of the placement: how many buckets stay on the device, from the times of the last steps.

It goes on for as long as training does, because batch sizes change and layers get frozen. Everything else is chosen
before the first step.
"""

from __future__ import annotations

import collections
import logging
import math
from dataclasses import replace

import torch
from torch import Tensor

from superadam.devices import Device
from superadam.host.memory import gigabytes
from superadam.offload.buckets import DEFAULT_NUMEL, Bucket
from superadam.offload.needs import BYTES_OF_STATE
from superadam.offload.placement import (
    BucketTimes,
    Placement,
    elements_to_keep,
    last_parameters,
    numel_of_buckets,
    rate,
    saved_share,
)

_logger = logging.getLogger("superadam")

AGREEING_STEPS = 3  # in a row, before anything moves
LEAST_GAIN = 0.05  # of the time from the first bucket to the worker's end: what keeping more must save
RATED_BUCKETS = 32  # whose times count for the worker's rate
REMEMBERED_STEPS = 4  # of which the one with the most parameters gives the order
FREE_SHARE = 0.8  # of the device's free memory, what state may take: fragments and peaks need the rest
BYTES_PER_ELEMENT = 16 + 4  # at most: with amsgrad, and the gradient as well


class Autotuner:
    """The present placement, and the measurements that lead to it.

    `device` is the model's; where it cannot make steps, nothing is measured. `total` is the number of elements of all
    "auto". `order` holds parameters (of DTensors, the parts on this rank) as their gradients became ready, resident
    ones last, in that of the last steps that had the most of them. Raises ValueError where buckets are to be resident
    but cannot be, MemoryError where the device has no room for them.
    """

    def __init__(
        self,
        device: Device,
        total: int,
        gpu_buckets: int | str,
        bucket_numel: int | str,
        transfer_dtype: torch.dtype | str,
        num_threads: int | str,
    ) -> None:
        self._device = device
        self._total = total
        threads = device.idle_cores() if isinstance(num_threads, str) else num_threads
        numel = numel_of_buckets(total) if threads else DEFAULT_NUMEL
        self.placement = Placement(
            gpu_buckets=0,
            bucket_numel=numel if isinstance(bucket_numel, str) else bucket_numel,
            transfer_dtype=None if isinstance(transfer_dtype, str) else transfer_dtype,
            num_threads=threads,
        )
        if not isinstance(gpu_buckets, str):
            self.placement = self._checked(replace(self.placement, gpu_buckets=gpu_buckets))
        self.order: list[Tensor] = []
        self._orders: collections.deque[list[Tensor]] = collections.deque(maxlen=REMEMBERED_STEPS)
        self._ready: dict[bool, dict[int, Tensor]] = {False: {}, True: {}}  # of this step, by whether they stay
        self._buckets = 0  # of this step
        self._step: list[BucketTimes] = []  # times of this step
        self._rated: collections.deque[BucketTimes] = collections.deque(maxlen=RATED_BUCKETS)
        self._wanted: list[int] = []  # what the last steps asked for, all more or all less than there is
        self._most: int | None = None  # that the device had memory for
        self._is_automatic = isinstance(gpu_buckets, str) and device.can_update and threads > 0

    def add_bucket(self, bucket: Bucket) -> None:
        """Record a bucket of this step that is ready; programs may make any number of backwards before a step."""
        ready = self._ready[bucket.is_resident]
        for state in bucket.states:
            if ready.pop(id(state.local), None) is not None:
                self._step = []  # its buckets are still counted, so that nothing is chosen by some of them
            ready[id(state.local)] = state.local
        self._buckets += 1

    def add_times(self, times: BucketTimes) -> None:
        """Record a bucket of this step that was speculated on, or is resident; called by the worker."""
        self._step.append(times)

    def end_step(self, update_seconds: float = 0.0) -> bool:
        """Return whether there is a new placement from now on, or a new order that it applies to.

        `update_seconds` is the time that the updates of waiting buckets took after backward.
        """
        times, self._step = self._step, []
        ready = [*self._ready[False].values(), *self._ready[True].values()]
        self._ready = {False: {}, True: {}}
        buckets, self._buckets = self._buckets, 0
        if not ready:
            return False
        self._orders.append(ready)
        order, self.order = self.order, max(reversed(self._orders), key=len)
        self._rated += [one for one in times if one.is_hidden and not one.is_resident and not one.waits]
        waiting = [one for one in times if one.waits]
        if waiting and update_seconds > 0.0:
            elements, moved = sum(one.elements for one in waiting), sum(one.bytes for one in waiting)
            self._rated.append(BucketTimes(elements, moved, waiting[-1].ready, update_seconds))
        if self._is_automatic and len(times) == buckets and self._rated and self._has_new_choice(times):
            _logger.info("placement: %s", self.placement)
            return True
        return self.placement.gpu_buckets > 0 and set(map(id, order)) != set(map(id, self.order))

    def _has_new_choice(self, times: list[BucketTimes]) -> bool:
        """Change the placement where the last steps agree, and memory allows it; return whether it has changed."""
        now, seconds_per_byte = self.placement.gpu_buckets, rate(self._rated)
        wanted = self._wanted_buckets(times, seconds_per_byte, math.inf)
        if wanted == now or (wanted > now and not self._is_gain(times, seconds_per_byte, wanted)):
            self._wanted = []
            return False
        self._wanted = [one for one in self._wanted if (one > now) == (wanted > now)] + [wanted]
        if len(self._wanted) < AGREEING_STEPS:
            return False
        chosen, self._wanted = min(self._wanted, key=lambda one: abs(one - now)), []
        if chosen > now:
            affordable = self._affordable_elements(times)
            chosen = min(chosen, self._wanted_buckets(times, seconds_per_byte, affordable))
            if chosen == now or (chosen > now and not self._is_gain(times, seconds_per_byte, chosen)):
                return False
        self.placement = replace(self.placement, gpu_buckets=chosen)
        return True

    def _is_gain(self, times: list[BucketTimes], seconds_per_byte: float, buckets: int) -> bool:
        return saved_share(times, seconds_per_byte, buckets * self.placement.bucket_numel) >= LEAST_GAIN

    def _wanted_buckets(self, times: list[BucketTimes], seconds_per_byte: float, affordable: float) -> int:
        """Return how many buckets to keep by the times of a step, at most this number of elements."""
        numel = self.placement.bucket_numel
        resident = elements_to_keep(times, seconds_per_byte, affordable)
        rounded_up = replace(self.placement, gpu_buckets=-(-resident // numel))
        fits = sum(one.numel() for one in last_parameters(self.order, rounded_up)) <= affordable
        wanted = rounded_up.gpu_buckets if fits else resident // numel
        return wanted if self._most is None else min(wanted, self._most)

    def _affordable_elements(self, times: list[BucketTimes]) -> int:
        """Ask the device, which takes its driver a while, how many elements it has memory for, with those there now."""
        resident_now = sum(one.elements for one in times if one.is_resident)
        free = (self._device.free_bytes() or 0) + BYTES_OF_STATE * resident_now
        return max(0, int(free * FREE_SHARE) // BYTES_PER_ELEMENT)  # less than nothing is free where a peak was higher

    def shrink(self) -> None:
        """Keep half as many buckets, and never more from now on: the device has no memory for the present number."""
        self._most = self.placement.gpu_buckets // 2
        self.placement, self._wanted = replace(self.placement, gpu_buckets=self._most), []

    def place(self, placement: Placement) -> None:
        """Change the placement, which is not automatic any more.

        Raises ValueError where buckets are to be resident but cannot be, or a worker would have to be created or ended;
        MemoryError where the device has no room for them.
        """
        self._checked(placement)
        if (placement.num_threads > 0) != (self.placement.num_threads > 0):
            raise ValueError(
                f"num_threads is {placement.num_threads}, but the scheduler was made with "
                f"{self.placement.num_threads}, and a worker can neither come nor go; make another scheduler"
            )
        self._is_automatic = False
        self.placement = placement

    def _checked(self, placement: Placement) -> Placement:
        """Return a placement whose resident buckets the device can step, with room for what they have more than now."""
        if placement.gpu_buckets > 0 and not self._device.can_update:
            raise ValueError(
                f"gpu_buckets is {placement.gpu_buckets}, but {type(self._device).__name__} cannot make steps where "
                "the model is; it takes a GPU with Triton, so leave gpu_buckets at 'auto' or 0"
            )
        now, then = (min(one.gpu_buckets * one.bucket_numel, self._total) for one in (self.placement, placement))
        needed, free = BYTES_OF_STATE * (then - now), self._device.free_bytes() if then > now else None
        if free is not None and needed > free:
            raise MemoryError(
                f"the state that is to stay on the device takes {gigabytes(needed)}, but {gigabytes(free)} are free "
                "there; keep fewer buckets, or leave gpu_buckets at 'auto'"
            )
        return placement
