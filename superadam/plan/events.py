"""A step's schedule as events: what superadam/offload does, with rates in place of hardware, in seconds and bytes.

The order of work is that of the code: a bucket is packed on the model's stream when it is full, downloaded, and
speculated on by one worker. While that waits, it commits what was accepted, in the order of forward, so that what
arrives last comes first. New values are uploaded; the verdict publishes them. Everything else is a rate.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from fractions import Fraction

LEFT_OUT = 3  # iterations at the beginning
COUNTED = 12  # iterations whose mean counts: schedules may alternate


@dataclass(frozen=True, slots=True)
class Passes:
    """Seconds of one element in each pass; `fused` commits and speculates."""

    norm: float
    speculate: float
    commit: float
    fused: float
    update: float


@dataclass(frozen=True, slots=True)
class Rates:
    """Rates of one rank."""

    memory: float  # bytes per second of the device's kernels
    download: float  # bytes per second
    upload: float  # bytes per second
    passes: Passes
    worker_per_bucket: float = 0.0  # seconds of Python in the worker, ...
    step_per_bucket: float = 0.0  # ... and in `step()`
    host: float = math.inf  # bytes per second that the CPU copies in host memory


@dataclass(frozen=True, slots=True)
class Bucket:
    """Elements, the share of backward after which it is full, and whether it stays on the device."""

    numel: int
    at: float
    is_resident: bool = False


@dataclass(frozen=True, slots=True)
class Clipping:
    """Steps that are clipped; docs/clipping.md has the times of test and patch."""

    share: float = 0.0  # of the steps
    is_predicted: bool = True  # else the worker only sums norms in such steps, and `step()` makes them
    test: float = 1.30  # time of a pass that lists uncertain elements, in times of one that does not
    patch: float = 0.08  # in the same
    missed: float = 0.07  # of the elements of such steps: updated again with the verdict


@dataclass(frozen=True, slots=True)
class Work:
    """What is trained."""

    buckets: Sequence[Bucket]  # in the order in which they are full
    forward: float  # seconds of the device for a micro-batch, ...
    backward: float  # ... recomputation included
    micro_batches: int = 1  # of a step
    bucket_numel: int = 1 << 24  # elements that are committed at a time
    size: int = 2  # bytes of a gradient and of a working copy
    room: float | None = None  # bytes of new values that the device has room for; None for all of them
    flows: bool = False  # whether weights are in host memory, and copied to the device when a layer computes
    clipping: Clipping = Clipping()
    resident: float = 24.0  # bytes of state that a resident step moves for each element

    @property
    def numel(self) -> int:
        """Elements of all buckets."""
        return sum(bucket.numel for bucket in self.buckets)


@dataclass(frozen=True, slots=True)
class Step:
    """A steady iteration, in seconds."""

    seconds: float
    clock: float  # the model's forward and backward alone, all micro-batches
    adam: float  # all of the optimizer's work on the CPU, by itself
    waited: float  # after backward, for the worker
    python: float  # in `step()`
    updated: float  # updates and patches after the verdict
    published: float  # until new values are in the parameters
    stalled: float  # in which backward waits for copies

    @property
    def packed(self) -> float:
        """Copies into buckets, on the device, during backward: what no other part of the step is."""
        others = self.clock + self.waited + self.python + self.updated + self.published + self.stalled
        return max(0.0, self.seconds - others)

    @property
    def hidden(self) -> float:
        """The share of the optimizer's work for which training does not wait; the glossary's, as seen from outside."""
        return max(0.0, 1.0 - max(0.0, self.seconds - self.clock) / self.adam)


def simulate(rates: Rates, work: Work) -> Step:
    """Return the mean of iterations, but for the first ones."""
    runner, steps, share = _Runner(rates, work), [], work.clipping.share
    period = Fraction(share).limit_denominator(100).denominator  # shares are met to 1 %
    counted = -(-COUNTED // period) * period
    for number in range(LEFT_OUT + counted):
        steps.append(runner.iterate(math.floor((number + 1) * share) > math.floor(number * share)))
    return Step(*(sum(each) / counted for each in zip(*map(astuple, steps[LEFT_OUT:]), strict=True)))


class _Runner:
    """The clocks of model, link and worker, and what the worker has yet to commit."""

    def __init__(self, rates: Rates, work: Work) -> None:
        self.rates, self.work = rates, work
        self.now = self.worker = self.down = self.up = 0.0
        self.uncommitted: dict[int, None] = {}
        self.leaving = [index for index, bucket in enumerate(work.buckets) if not bucket.is_resident]

    def iterate(self, is_clipped: bool) -> Step:
        rates, work, clipping = self.rates, self.work, self.work.clipping
        passes, size = rates.passes, work.size
        waits = is_clipped and not clipping.is_predicted
        began, forward, backward = self.now, work.forward, work.backward
        if work.flows:  # copies run while the model computes: the longer of both counts
            layers = size * work.numel
            forward = max(forward, layers / rates.upload)
            backward = max(backward, layers / min(rates.upload, rates.download))
        before = work.micro_batches * forward + (work.micro_batches - 1) * backward
        arrived, ended, stalled = self._arrivals(began + before, backward)
        stalled += work.micro_batches * max(0.0, forward + backward - work.forward - work.backward)
        waits_on_host, travelled, leaving = 0.0, 0, sum(work.buckets[index].numel for index in self.leaving)
        for index, bucket in enumerate(work.buckets):
            while arrived[index] > self.worker and self.uncommitted and self.worker < ended:
                self._commit()
            self.worker = max(self.worker, arrived[index])
            if bucket.is_resident:
                continue
            each = passes.fused if index in self.uncommitted else passes.speculate
            each = passes.norm if waits else each * (clipping.test if is_clipped else 1.0)
            if waits and index in self.uncommitted:
                each += passes.commit
            self.uncommitted.pop(index, None)
            self.worker += each * bucket.numel + rates.worker_per_bucket
            travelled += bucket.numel
            is_on_host = work.room is not None and size * (leaving - travelled) + size * bucket.numel > work.room
            if work.flows or waits:
                continue
            if is_on_host:
                waits_on_host += size * bucket.numel
            else:
                self.up = max(self.up, self.worker) + size * bucket.numel / rates.upload
        waited, python = max(0.0, self.worker - ended), rates.step_per_bucket * len(work.buckets)
        missed = (1.0 if waits else clipping.missed) if is_clipped else 0.0
        patch = clipping.patch * passes.speculate if is_clipped and not waits else 0.0
        updated = (missed * passes.update + patch) * leaving
        judged = max(self.worker, ended) + python + updated
        late = missed * size * min(leaving, work.bucket_numel) / rates.upload  # parts: one travels, the next is made
        published = max(judged + late + waits_on_host / rates.upload, self.up)
        copied = 2 * size * leaving
        published += copied / (rates.host if work.flows else rates.memory)
        published += (work.resident + 2 * size) * (work.numel - leaving) / rates.memory
        self.now, self.worker = published, max(self.worker, judged)
        self.uncommitted = {} if waits else dict.fromkeys(reversed(self.leaving))
        clock = work.micro_batches * (work.forward + work.backward)
        adam = passes.fused * work.numel
        return Step(published - began, clock, adam, waited, python, updated, published - judged, stalled)

    def _arrivals(self, at: float, backward: float) -> tuple[list[float], float, float]:
        """Return when each bucket has arrived on the host, when backward ends, and how long it waited for the link."""
        rates, work, position, stalled = self.rates, self.work, 0.0, 0.0
        arrived: list[float] = []
        sent: list[float] = []
        for bucket in work.buckets:
            at += (bucket.at - position) * backward
            position = bucket.at
            if work.room is not None and not bucket.is_resident and len(sent) > 2 and sent[-3] > at:
                stalled, at = stalled + (sent[-3] - at), sent[-3]  # the host waits, and the model's stream runs dry
            at += 2 * work.size * bucket.numel / rates.memory
            if bucket.is_resident:
                arrived.append(at)
                continue
            self.down = max(self.down, at) + work.size * bucket.numel / rates.download
            arrived.append(self.down)
            sent.append(self.down)
        return arrived, at + (1.0 - position) * backward, stalled

    def _commit(self) -> None:
        """Commit a bucket's worth of what was accepted."""
        count = 0
        while self.uncommitted and count < self.work.bucket_numel:
            index = next(iter(self.uncommitted))
            del self.uncommitted[index]
            count += self.work.buckets[index].numel
        self.worker += self.rates.passes.commit * count + self.rates.worker_per_bucket
