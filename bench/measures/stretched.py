"""The real scheduler at a fraction of a large model's size, against the events of a plan.

Elements, buckets and rates are divided by a scale, and passes are stretched, by sleeping, to what the whole would take.
So Python, threads, order and placement are real, and the machine nearly sleeps. The clock runs slower by `dilation`, so
that what Python and waking threads take counts for less.
"""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import astuple, dataclass, replace
from unittest import mock

import torch

from measures.paced_device import PacedDevice
from measures.paced_device import Rates as Links
from measures.threads import computing_threads
from measures.timed_model import Gradients, TimedModel, without_samples
from superadam import OffloadScheduler, SpeculativeCPUAdamW
from superadam.cli.plan.schedule import buckets_of, parts_of
from superadam.devices import Stream
from superadam.offload.placement import Placement, numel_of_buckets
from superadam.plan.events import Passes, Rates, Work, simulate
from superadam.state.parameter import Pending, Phase, Piece, Prediction
from superadam.state.table import GradientNorm
from superadam.step.transaction import Transaction

FORWARD_SHARE = 1 / 3
"""Forward's time as a share of backward's, which computes layers again."""

SETTLING, TIMED = 4, 5  # iterations
BUCKETS = 100  # at most, but for the rest: more of them need a slower clock
SMALL_NUMEL = 4 << 20  # elements that the model is scaled down to, about
SECONDS = 0.05  # of the slowed clock for the work of a bucket, in which waking threads counts for little
SLACK = 4e-3
"""Seconds: a job that begins so soon after another counts from that one's end, for the system wakes threads late."""


@dataclass(frozen=True, slots=True)
class Stretched:
    """Seconds of an iteration of the whole model: `measured` (the median), `quickest`, and by `events`."""

    parameters: int
    buckets: int
    ratio: float
    clock: float
    measured: float
    quickest: float
    events: float

    @property
    def error(self) -> float:
        """How far the events are from what was measured, as a share."""
        return self.events / self.measured - 1


@contextmanager
def _passes_last(passes: Passes) -> Iterator[None]:
    """Let each pass of the worker last as many seconds for an element as these."""
    plain_speculate, plain_commit, ended = Transaction.speculate, Transaction.commit, 0.0

    def last(seconds: float, begin: float) -> None:
        nonlocal ended
        ended = (ended if begin - ended < SLACK else begin) + seconds
        if (left := ended - time.perf_counter()) > 0:
            time.sleep(left)

    def speculate(
        self: Transaction,
        pending: Mapping[Piece, Pending],
        num_threads: int | None = None,
        norm: GradientNorm | None = None,
        prediction: Prediction | None = None,
    ) -> None:
        begin, seconds = time.perf_counter(), 0.0
        for piece, record in pending.items() if norm is None else ():
            is_accepted = piece.phase is Phase.ACCEPTED
            each = passes.norm if record.slot is None else passes.fused if is_accepted else passes.speculate
            seconds += each * piece.shape.numel()
        plain_speculate(self, pending, num_threads, norm, prediction)
        if seconds:
            last(seconds, begin)

    def commit(self: Transaction, elements: float = math.inf, num_threads: int | None = None) -> int:
        begin = time.perf_counter()
        count = plain_commit(self, elements, num_threads)
        if count:
            last(passes.commit * count, begin)
        return count

    with mock.patch.multiple(Transaction, speculate=speculate, commit=commit):
        yield


def measure(rates: Rates, parameters: int, layers: int, ratio: float) -> Stretched:
    """Run the scheduler with buckets of the usual size or larger, and simulate it.

    Args:
        rates: of the machine that is imitated, of which Python's own seconds are not used.
        parameters, layers: of the model; a layer has one tensor.
        ratio: of backward's time to Adam's.
    """
    bucket_numel = max(numel_of_buckets(parameters), parameters // BUCKETS)
    scale = 1 << max(0, round(math.log2(parameters / SMALL_NUMEL)))
    dilation = max(1.0, SECONDS / (rates.passes.fused * bucket_numel))
    bucket_numel = -(-bucket_numel // scale) * scale
    numel = max(64, parameters // layers // scale // 64 * 64)
    backward = ratio * rates.passes.fused * numel * scale * layers
    gradients = Gradients([numel] * layers, 2)
    gradients.scale_to([0.5, 0.5])
    model = TimedModel(gradients)
    links = Links(*(rate / scale / dilation for rate in (rates.download, rates.upload, rates.memory)))
    model.device = PacedDevice(links, free_bytes=1 << 40, constants=gradients.sets, norms=gradients.sums)
    model.backward_seconds, model.forward_seconds = dilation * backward, dilation * FORWARD_SHARE * backward
    optimizer = SpeculativeCPUAdamW(model.parameters(), lr=1e-5, max_grad_norm=1.0)
    slowed = Passes(*(scale * dilation * seconds for seconds in astuple(rates.passes)))
    ends: list[float] = []
    with (
        computing_threads(1),
        _passes_last(slowed),
        without_samples(),
        OffloadScheduler(
            optimizer, model, device=model.device, num_threads=1, bucket_numel=bucket_numel // scale, gpu_buckets=0
        ),
    ):
        for _ in range(SETTLING + TIMED):
            model().backward()
            optimizer.step()
            optimizer.zero_grad()
            ends.append(model.device.record(Stream.CURRENT).passed_at())
        model.device.record(Stream.CURRENT).synchronize()
        model.device.constants.clear()
        model.step = 0
    gaps = [(end - begin) / dilation for begin, end in itertools.pairwise(ends)][-TIMED:]
    shape = torch.empty(numel * scale, dtype=torch.bfloat16, device="meta")
    parts = parts_of([(shape, 1 / layers)] * layers, bucket_numel)
    buckets = buckets_of(parts, Placement(0, bucket_numel, None, 1))
    work = Work(buckets, FORWARD_SHARE * backward, backward, bucket_numel=bucket_numel)
    python = {name: getattr(rates, name) / dilation for name in ("worker_per_bucket", "step_per_bucket")}
    step = simulate(replace(rates, **python), work)
    return Stretched(
        numel * scale * layers, len(buckets), ratio, step.clock, statistics.median(gaps), min(gaps), step.seconds
    )
