"""Placement: where each bucket's step is made, how large buckets are, how gradients travel, and on how many cores.

What is chosen here changes no bit of the result (a narrower dtype is only ever asked for), so placements may be tried
and changed in the middle of training. How many buckets stay on the device is chosen by how late the worker was in the
last steps, for as long as training goes on, because batch sizes change and layers get frozen. Everything else is chosen
before the first step.
"""

from __future__ import annotations

import collections
import itertools
import logging
import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

import torch

from superadam.devices import Device
from superadam.host.memory import gigabytes
from superadam.offload.buckets import Bucket
from superadam.state.parameter import Piece

_logger = logging.getLogger("superadam")

LEAST_BUCKETS = 8  # if the model is large enough: the work that remains after backward is about one bucket
LEAST_NUMEL = 1024 * 1024
MOST_NUMEL = 16 * 1024 * 1024  # 32 MiB of bf16 or 64 MiB of fp32, as in SuperOffload; saturates a link
USED_SHARE = 0.9  # of the room on a device that is short of memory
PACKED_UNDER_WAY = 2  # packed buckets that may wait for the link where the device is short of memory
AGREEING_STEPS = 3  # in a row, before anything moves
LEAST_DELAY = 0.02  # of the time from the first bucket to the last result: how late results must be
REMEMBERED_STEPS = 4  # of which the one with the most parameters gives the order
FREE_SHARE = 0.8  # of the device's free memory, what state may take: fragments and peaks need the rest


_Piece = TypeVar("_Piece", bound=Any)  # or what stands for one in a plan: it has a shape


@dataclass(frozen=True, slots=True)
class Placement:
    """Where and how steps are made.

    Attributes:
        gpu_buckets: number of last-ready buckets whose state stays on the device, where their steps are made.
        bucket_numel: elements that travel and are speculated on together.
        transfer_dtype: dtype in which gradients travel to the host; None for their own.
        num_threads: CPU threads that speculate while the model computes; 0, which "auto" alone chooses, leaves all work
            to `step()`.
    """

    gpu_buckets: int
    bucket_numel: int
    transfer_dtype: torch.dtype | None
    num_threads: int


def numel_of_buckets(total: int) -> int:
    """Return the elements of a bucket, an eighth of the `total` of a step, within bounds."""
    return max(LEAST_NUMEL, min(MOST_NUMEL, total // LEAST_BUCKETS))


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
        free: what the peak has left, below 0 where an earlier one was higher; None where that is unknown.
    """
    if free is None or max(0, free) >= travelled - packed:
        return None
    under_way = (PACKED_UNDER_WAY + 2) * largest  # with one that is packed, and one that is being freed
    return max(0, int(USED_SHARE * (free + packed - under_way)))


class Work(NamedTuple):
    """What the worker did for one bucket of a step.

    Attributes:
        ended: in seconds of `time.perf_counter()`.
        is_hidden: whether the model computed meanwhile, so that the worker used the placement's number of threads.
        is_resident: whether it only waited for the bucket, whose step is made on the device.
        waits: whether it did not speculate on the bucket, so that all but its norm is work after backward.
    """

    elements: int
    ended: float
    seconds: float = 0.0
    is_hidden: bool = True
    is_resident: bool = False
    waits: bool = False


class Autotuner:
    """The present placement, and the measurements that lead to it.

    If the worker ends after backward, more buckets become resident. If it has time for another bucket before backward
    ends, fewer are.

    Args:
        total: elements of all parameters.
        gpu_buckets, bucket_numel, transfer_dtype, num_threads: as in `superadam.Placement`, or "auto".
        bytes_of_state, bytes_of_gradient: of each element that stays on the device.

    Attributes:
        order: pieces in the order in which their gradients became ready, resident ones last; that of the step with the
            most pieces among the last ones.

    Raises:
        ValueError: buckets are to be resident but cannot be.
        MemoryError: the device has no room for them.
    """

    def __init__(
        self,
        device: Device,
        total: int,
        gpu_buckets: int | str,
        bucket_numel: int | str,
        transfer_dtype: torch.dtype | str,
        num_threads: int | str,
        bytes_of_state: float,
        bytes_of_gradient: int,
    ) -> None:
        self._device = device
        self._total = total
        self._bytes_of_state, self._bytes_of_gradient = bytes_of_state, bytes_of_gradient
        threads = device.idle_cores() if isinstance(num_threads, str) else num_threads
        self.placement = Placement(
            gpu_buckets=0,
            bucket_numel=numel_of_buckets(total) if isinstance(bucket_numel, str) else bucket_numel,
            transfer_dtype=None if isinstance(transfer_dtype, str) else transfer_dtype,
            num_threads=threads,
        )
        if not isinstance(gpu_buckets, str):
            self.placement = self._checked(replace(self.placement, gpu_buckets=gpu_buckets))
        self.order: list[Piece] = []
        self._orders: collections.deque[list[Piece]] = collections.deque(maxlen=REMEMBERED_STEPS)
        self._ready: dict[Piece, bool] = {}  # of this step: whether they stay
        self._buckets = 0  # of this step
        self._step: list[Work] = []  # of this step
        self._seconds_per_element = 0.0  # that the worker took in the last step in which it had work
        self._wanted: list[int] = []  # what the last steps asked for, all more or all less than there is
        self._most: int | None = None  # elements that the device had memory for
        self._is_automatic = isinstance(gpu_buckets, str) and device.can_update and threads > 0

    def add_bucket(self, bucket: Bucket) -> None:
        """Record a bucket of this step that is ready; programs may make any number of backwards before a step."""
        for piece in bucket.gradients:
            if self._ready.pop(piece, None) is not None:
                self._step = []  # its buckets are still counted, so that nothing is chosen by some of them
            self._ready[piece] = bucket.is_resident
        self._buckets += 1

    def add_work(self, work: Work) -> None:
        """Record what was done for a bucket of this step; called by the worker."""
        self._step.append(work)

    def choose(self, awaited_at: float, update_seconds: float) -> bool:
        """Learn from a step; return whether there is a new placement, or a new order that it applies to.

        Args:
            awaited_at: when the training thread began to wait for the worker; inf if it did not.
            update_seconds: time after backward that the updates of waiting buckets took.
        """
        step, self._step = self._step, []
        ready, self._ready = sorted(self._ready, key=self._ready.__getitem__), {}
        buckets, self._buckets = self._buckets, 0
        if not ready:
            return False
        self._orders.append(ready)
        order, self.order = self.order, max(reversed(self._orders), key=len)
        if self._is_automatic and len(step) == buckets and self._has_new_choice(step, awaited_at, update_seconds):
            _logger.info("placement: %s", self.placement)
            return True
        return self.placement.gpu_buckets > 0 and set(order) != set(self.order)

    def _has_new_choice(self, step: list[Work], awaited_at: float, update_seconds: float) -> bool:
        now = self.placement.gpu_buckets
        wanted = self._wanted_buckets(step, awaited_at, update_seconds)
        wanted = wanted if self._most is None else min(wanted, self._most // self.placement.bucket_numel)
        if wanted == now:
            self._wanted = []
            return False
        self._wanted = [count for count in self._wanted if (count > now) == (wanted > now)] + [wanted]
        if len(self._wanted) < AGREEING_STEPS:
            return False
        chosen, self._wanted = min(self._wanted, key=lambda count: abs(count - now)), []
        if chosen > now:
            chosen = min(chosen, self._affordable_buckets(step))
        self.placement = replace(self.placement, gpu_buckets=chosen)
        return chosen != now

    def _wanted_buckets(self, step: list[Work], awaited_at: float, update_seconds: float) -> int:
        """Return how many buckets would have let the worker end when backward did."""
        now, numel = self.placement.gpu_buckets, self.placement.bucket_numel
        waiting = sum(work.elements for work in step if work.waits)
        timed = [work for work in step if work.is_hidden and not work.is_resident and not work.waits]
        elements = sum(work.elements for work in timed) + waiting * (update_seconds > 0.0)
        if elements:
            self._seconds_per_element = (
                sum(work.seconds for work in timed) + update_seconds * (waiting > 0)
            ) / elements
        elif not now:
            return now
        began = step[0].ended - step[0].seconds
        done = max((work.ended for work in step if not work.is_resident), default=began)
        ended = min(awaited_at, max((work.ended for work in step if work.is_resident), default=math.inf))
        if ended == math.inf:  # the worker was done; for how long is unknown
            ended = done
        travelling = (work for work in reversed(step) if not work.is_resident)
        last = sum(work.elements for work in itertools.takewhile(operator.attrgetter("waits"), travelling))
        late = max(0.0, done - ended) + update_seconds * last / max(1, waiting)
        if late > LEAST_DELAY * (ended - began + late):
            more = math.ceil(late / max(self._seconds_per_element * numel, 1e-9))
            return min(now + more, max(now, -(-sum(work.elements for work in step) // numel)))
        interval = (ended - began) / max(1, sum(work.elements for work in step))  # in which one more element arrives
        fewer = (ended - done) / max((self._seconds_per_element + interval) * numel, 1e-9)
        return max(0, now - math.floor(max(0.0, fewer))) if late == 0.0 else now

    def _affordable_buckets(self, step: list[Work]) -> int:
        """Return how many buckets of whole pieces the device has memory for, those that are there now included.

        Asks the device, which takes its driver a while.
        """
        resident_now = sum(work.elements for work in step if work.is_resident)
        free = (self._device.free_bytes() or 0) + self._bytes_of_state * resident_now
        each = self._bytes_of_state + self._bytes_of_gradient
        elements = max(0, int(free * FREE_SHARE / each))  # a peak may have been higher
        taken = 0
        for piece in reversed(self.order):
            if taken + piece.shape.numel() > elements:
                return taken // self.placement.bucket_numel
            taken += piece.shape.numel()
        return elements // self.placement.bucket_numel

    def shrink(self) -> None:
        """Keep half as many buckets, and never more from now on: the device has no memory for the present number."""
        self.placement, self._wanted = replace(self.placement, gpu_buckets=self.placement.gpu_buckets // 2), []
        self._most = self.placement.gpu_buckets * self.placement.bucket_numel

    def place(self, placement: Placement, *, stays_automatic: bool) -> None:
        """Change the placement; `stays_automatic`: as far as it was, the number of resident buckets is.

        Raises ValueError where buckets are to be resident but cannot be, or a worker would have to be created or ended;
        MemoryError where the device has no room for them.
        """
        self._checked(placement)
        if (placement.num_threads > 0) != (self.placement.num_threads > 0):
            raise ValueError(
                f"num_threads is {placement.num_threads}, but the scheduler was made with "
                f"{self.placement.num_threads}, and a worker can neither come nor go; make another scheduler"
            )
        self._is_automatic &= stays_automatic
        self.placement, self._wanted = placement, []

    def _checked(self, placement: Placement) -> Placement:
        """Return a placement whose resident buckets the device can step, with room for what they have more than now."""
        if placement.gpu_buckets > 0 and not self._device.can_update:
            raise ValueError(
                f"gpu_buckets is {placement.gpu_buckets}, but steps cannot be made where the model is, expected a "
                "model on a GPU, and Triton; leave gpu_buckets at 'auto' or 0"
            )
        now, then = (min(each.gpu_buckets * each.bucket_numel, self._total) for each in (self.placement, placement))
        needed = math.ceil(self._bytes_of_state * (then - now))
        free = self._device.free_bytes() if then > now else None
        if free is not None and needed > free:
            raise MemoryError(
                f"the state that is to stay on the device takes {gigabytes(needed)}, but {gigabytes(free)} are free "
                "there; keep fewer buckets, or leave gpu_buckets at 'auto'"
            )
        return placement
