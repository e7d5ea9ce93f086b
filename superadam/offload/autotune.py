"""Autotuning of the placement: chooses once, from the times of the first steps, how many buckets stay on the device.

Everything else is chosen before the first step.
"""

from __future__ import annotations

import itertools
import logging
from dataclasses import replace

import torch
from torch import Tensor

from superadam.devices import Device
from superadam.offload.buckets import DEFAULT_NUMEL, Bucket
from superadam.offload.placement import (
    BucketTimes,
    Placement,
    elements_to_keep,
    last_parameters,
    numel_of_buckets,
    rate,
)

_logger = logging.getLogger("superadam")

WARM_UP_STEPS = 2  # not measured: the first step of a parameter is never speculated on
MEASURED_STEPS = 2  # after those
FREE_SHARE = 0.8  # of the device's free memory, what state may take: fragments and peaks need the rest
LEAST_BYTES_PER_ELEMENT = 12  # of state on the device: master and moments
BYTES_PER_ELEMENT = 16 + 4  # at most: with amsgrad, and the gradient as well


class Autotuner:
    """The present placement, and the measurements that lead to it.

    `device` is the model's, `can_keep` says whether it or another tier can hold state (otherwise nothing is measured),
    `total` is the number of elements of all parameters, and the other arguments are as in `superadam.Placement`, or
    "auto". `order` holds the parameters in the order in which their gradients became ready in the last step, kept ones
    last. Raises ValueError where buckets are to be kept but cannot be, MemoryError where the device has no room for
    them.
    """

    def __init__(
        self,
        device: Device,
        can_keep: bool,
        total: int,
        gpu_buckets: int | str,
        bucket_numel: int | str,
        transfer_dtype: torch.dtype | str,
        num_threads: int | str,
    ) -> None:
        self._device = device
        self.can_keep = can_keep
        self._check_can_keep(gpu_buckets)
        self._total = total
        threads = device.idle_cores() if isinstance(num_threads, str) else num_threads
        numel = numel_of_buckets(total) if threads else DEFAULT_NUMEL
        self.placement = Placement(
            gpu_buckets=0 if isinstance(gpu_buckets, str) else gpu_buckets,
            bucket_numel=numel if isinstance(bucket_numel, str) else bucket_numel,
            transfer_dtype=None if isinstance(transfer_dtype, str) else transfer_dtype,
            num_threads=threads,
        )
        self._check_room(self.placement.gpu_buckets * self.placement.bucket_numel)
        self.order: list[Tensor] = []
        self._ready: dict[bool, list[Tensor]] = {False: [], True: []}  # of this step, by whether they stay
        self._buckets = 0  # of this step that travelled
        self._steps = 0
        self._step: list[BucketTimes] = []  # times of this step
        self._measured: list[list[BucketTimes]] = []
        self._is_measuring = isinstance(gpu_buckets, str) and can_keep and threads > 0

    def add_bucket(self, bucket: Bucket) -> None:
        """Record a bucket of this step that is ready."""
        self._ready[bucket.is_kept] += [state.parameter for state in bucket.states]
        self._buckets += not bucket.is_kept

    def add_times(self, times: BucketTimes) -> None:
        """Record a bucket of this step that was speculated on; called by the worker."""
        self._step.append(times)

    def end_step(self) -> bool:
        """Return whether there is a new placement from now on, or a new order that it applies to."""
        times, self._step = self._step, []
        ready, self._ready = self._ready[False] + self._ready[True], {False: [], True: []}
        buckets, self._buckets = self._buckets, 0
        if not ready:
            return False
        is_new = False
        if len(ready) >= len(self.order):
            is_new = self.placement.gpu_buckets > 0 and set(map(id, ready)) != set(map(id, self.order))
            self.order = ready
        self._steps += 1
        is_timed = len(times) == buckets and any(one.is_hidden for one in times)
        if self._is_measuring and self._steps > WARM_UP_STEPS and is_timed:
            self._measured.append(times)
            if len(self._measured) == MEASURED_STEPS:
                self._is_measuring = False
                self.placement = self._chosen()
                _logger.info("placement: %s", self.placement)
                return True
        return is_new

    def place(self, placement: Placement) -> None:
        """Change the placement and stop measuring.

        Raises ValueError where buckets are to be kept but cannot be, or the worker would have to be created or ended;
        MemoryError where the device has no room for them.
        """
        self._check_can_keep(placement.gpu_buckets)
        before = self.placement.gpu_buckets * self.placement.bucket_numel
        self._check_room(placement.gpu_buckets * placement.bucket_numel - min(before, self._total))
        if (placement.num_threads > 0) != (self.placement.num_threads > 0):
            raise ValueError(
                f"num_threads is {placement.num_threads}, but the scheduler was made with "
                f"{self.placement.num_threads}, and a worker can neither come nor go; make another scheduler"
            )
        self._is_measuring = False
        self.placement = placement

    def _check_can_keep(self, gpu_buckets: int | str) -> None:
        if isinstance(gpu_buckets, int) and gpu_buckets > 0 and not self.can_keep:
            raise ValueError(
                f"gpu_buckets is {gpu_buckets}, but {type(self._device).__name__} cannot make steps where the model "
                "is; it takes a GPU with Triton, so leave gpu_buckets at 'auto' or 0"
            )

    def _check_room(self, elements: int) -> None:
        """Raise MemoryError if the state of this many more elements does not fit on the device."""
        if elements <= 0:
            return
        needed, free = min(elements, self._total) * LEAST_BYTES_PER_ELEMENT, self._device.free_bytes()
        if free is not None and needed > free:
            raise MemoryError(
                f"the state that is to stay on the device takes {needed / 1e9:.2f} GB, but {free / 1e9:.2f} GB are "
                "free there; keep fewer buckets, or leave gpu_buckets at 'auto'"
            )

    def _chosen(self) -> Placement:
        hidden = [one for one in itertools.chain.from_iterable(self._measured) if one.is_hidden]
        affordable = int((self._device.free_bytes() or 0) * FREE_SHARE) // BYTES_PER_ELEMENT
        kept = elements_to_keep(self._measured[-1], rate(hidden), affordable)
        numel = self.placement.bucket_numel
        rounded_up = replace(self.placement, gpu_buckets=-(-kept // numel))
        fits = sum(one.numel() for one in last_parameters(self.order, rounded_up)) <= affordable
        return rounded_up if fits else replace(self.placement, gpu_buckets=kept // numel)
