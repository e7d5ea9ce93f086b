"""Iterations with the scheduler on a device made of time, against that device's clock alone.

Scheduler, worker, hooks and CPU kernels are the real ones. `superadam.devices.paced` says what the device cannot show.
"""

from __future__ import annotations

import bisect
import functools
import gc
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from superadam import OffloadScheduler, SpeculativeCPUAdamW
from superadam.cli.bench.arrays import ADAMW_OPTIONS
from superadam.cli.bench.contests import MAX_GRAD_NORM, prepare_bfloat16
from superadam.cli.bench.pairs import Action, Spread
from superadam.cli.bench.timed_model import Gradients, TimedModel, without_samples
from superadam.devices import Stream
from superadam.devices.paced import PacedDevice, Rates
from superadam.kernels import native
from superadam.offload.autotune import BYTES_PER_ELEMENT, FREE_SHARE
from superadam.offload.placement import Placement
from superadam.offload.trace import Trace
from superadam.step.outcome import StepKind

CLIP_EVERY = 10
"""Interval of clipped steps."""

FORWARD_SHARE = 0.5
"""Forward's time as a share of backward's."""

SETTLING = 24
"""Iterations in which "auto" measures and chooses, with some in reserve."""

WARM_UPS = 2
"""Untimed iterations at the beginning of a turn, because the turn before committed every accepted step."""

TIMED = 4
"""Timed iterations of a turn."""

_TRACKS = {Stream.DOWNLOAD: "download", Stream.UPLOAD: "upload", Stream.CURRENT: "model"}


@dataclass
class Side:
    """One way to train, and the measurements of its timed iterations.

    Attributes:
        step: runs after backward; returns whether the step was clipped.
        placement: applied before each turn; None leaves the scheduler's.
        seconds: of iterations, by whether they were clipped.
        python: CPU seconds of the training thread, without the device's own, in each iteration that was not clipped: a
            clipped one runs kernels.
        waited: seconds in which the training thread waited for the worker.
        depths: number of arrived buckets that were not done, at each arrival.
        trace: of the last turn.
    """

    name: str
    model: TimedModel
    step: Callable[[], bool]
    scheduler: OffloadScheduler | None = None
    placement: Placement | None = None
    seconds: dict[bool, list[float]] = field(default_factory=lambda: {False: [], True: []})
    python: list[float] = field(default_factory=list)
    waited: float = 0.0
    buckets: int = 0
    depths: list[int] = field(default_factory=list)
    trace: Trace = field(default_factory=Trace)

    def iterate(self) -> bool:
        """Make one iteration; return whether it was clipped."""
        self.model().backward()
        return self.step()

    def turn(self, timed: int) -> None:
        """Run some iterations untimed, and then some timed."""
        device, scheduler = self.model.device, self.scheduler
        if scheduler is not None and self.placement is not None:
            place = self.placement
            scheduler.place(
                gpu_buckets=place.gpu_buckets, bucket_numel=place.bucket_numel, num_threads=place.num_threads
            )
        for _ in range(WARM_UPS):
            self.iterate()
        before = replace(scheduler.statistics) if scheduler is not None else None
        begin = end = device.record(Stream.CURRENT).passed_at()
        for _ in range(timed):
            last, python = end, time.thread_time() - device.own_seconds
            is_clipped = self.iterate()
            if not is_clipped:
                self.python.append(time.thread_time() - device.own_seconds - python)
            end = device.record(Stream.CURRENT).passed_at()
            self.seconds[is_clipped].append(end - last)
        device.record(Stream.CURRENT).synchronize()
        if scheduler is not None and before is not None:
            now = scheduler.statistics
            self.waited += now.waited_seconds - before.waited_seconds
            self.buckets += now.buckets - before.buckets
            self._look_back(scheduler, begin)
            scheduler.synchronize()  # or its worker would run in another side's turn

    def _look_back(self, scheduler: OffloadScheduler, since: float) -> None:
        """Record queue depths and trace of the turn."""
        self.trace = Trace()
        for span in scheduler.trace.spans:
            if span.begin >= since and span.track in ("training", "worker"):
                self.trace.add(span.name, span.track, span.begin, span.end, **span.details)
        for busy in list(self.model.device.busy):
            if busy.begin >= since:
                self.trace.add(busy.name, _TRACKS[busy.stream], busy.begin, busy.end)
        spans = scheduler.trace.spans
        done = sorted(span.end for span in spans if span.end >= since and span.name in ("adam", "norm", "norm to host"))
        arrived = sorted(span.end for span in self.trace.spans if span.track == "download")
        self.depths += [1 + index - bisect.bisect_right(done, at) for index, at in enumerate(arrived)]


@dataclass(frozen=True, slots=True)
class SideResult:
    """Measurements of one side of a row, per iteration.

    Attributes:
        seconds: of iterations whose step was not clipped.
        clipped_seconds: median of the others; None without any.
        over_clock: median time over the clock's.
        hidden_share: share of the CPU's Adam time by which iterations are not longer than the clock's.
        waited_seconds, python_seconds: in which the training thread waited for the worker, and of its CPU time, without
            what the device takes of it.
        bucket_seconds: CPU time of the training thread for each bucket, in hooks and in the step: what it takes longer
            than with the clock.
        queue_depth, deepest_queue: mean and maximum of arrived buckets that were not done.
    """

    name: str
    placement: str
    seconds: Spread
    clipped_seconds: float | None
    over_clock: float
    hidden_share: float
    waited_seconds: float
    python_seconds: float
    bucket_seconds: float
    queue_depth: float
    deepest_queue: int


@dataclass(frozen=True, slots=True)
class Row:
    """All sides with one workload.

    Attributes:
        parameters, layers: of the model, in bf16.
        ratio: of backward's time to the CPU's Adam time.
        adam_seconds: of a plain step on all threads, measured before the row.
        backward_seconds, forward_seconds: of the device.
        placements: sides with fixed placements.
        trace: of a turn of "auto".
    """

    parameters: int
    layers: int
    ratio: float
    adam_seconds: float
    backward_seconds: float
    forward_seconds: float
    clock: SideResult
    auto: SideResult
    placements: list[SideResult]
    after_backward: SideResult
    torch: SideResult
    trace: Trace

    @property
    def best(self) -> SideResult:
        """The fastest fixed placement."""
        return min(self.placements, key=lambda side: side.seconds.median)


def measure(
    parameters: int, layers: int, ratios: Sequence[float], rates: Rates, threads: int, rounds: int, free_share: float
) -> Iterator[Row]:
    """Yield one row for each ratio; thread counts are restored at the end.

    Args:
        parameters, layers: of the model; a layer has one tensor of a multiple of 64 elements.
        ratios: of backward's time to the CPU's Adam time.
        rates: of the device.
        threads: of the CPU.
        rounds: turns of each side.
        free_share: share of the parameters whose state "auto" may keep on the device.
    """
    before = torch.get_num_threads(), native.get_num_threads()
    torch.set_num_threads(threads)
    native.set_num_threads(threads)
    try:
        gradients = Gradients(layers, max(64, parameters // layers // 64 * 64))
        models = [TimedModel(gradients) for _ in range(3)]
        optimizers = [_optimizer(model) for model in models[:2]]
        plain_steps = prepare_bfloat16(layers, gradients.numel)
        for ratio in ratios:
            with without_samples():
                row = _row(gradients, models, optimizers, plain_steps, ratio, rates, threads, rounds, free_share)
            yield row
            gc.collect()  # schedulers are in cycles, which hold gigabytes
    finally:
        torch.set_num_threads(before[0])
        native.set_num_threads(before[1])


def _row(
    gradients: Gradients,
    models: Sequence[TimedModel],
    optimizers: Sequence[SpeculativeCPUAdamW],
    plain_steps: Sequence[Action],
    ratio: float,
    rates: Rates,
    threads: int,
    rounds: int,
    free_share: float,
) -> Row:
    total = gradients.layers * gradients.numel
    adam = _seconds_of(plain_steps[0])
    free_bytes = int(free_share * total * BYTES_PER_ELEMENT / FREE_SHARE) + BYTES_PER_ELEMENT
    for model in models:
        model.device = PacedDevice(rates, free_bytes=free_bytes, constants=gradients.sets)
        model.backward_seconds, model.forward_seconds = ratio * adam, FORWARD_SHARE * ratio * adam
    with ExitStack() as stack:

        def overlapped(which: int, buckets: int | str) -> tuple[Side, OffloadScheduler]:
            model, optimizer = models[which], optimizers[which]
            scheduler = stack.enter_context(
                OffloadScheduler(optimizer, model, gpu_buckets=buckets, num_threads=threads, device=model.device)
            )
            return Side("auto", model, functools.partial(_step, model, optimizer), scheduler), scheduler

        (auto, _), (first, scheduler) = overlapped(0, "auto"), overlapped(1, 0)
        for _ in range(SETTLING):
            auto.iterate()
        first.iterate()
        fixed = [
            Side("fixed", first.model, first.step, scheduler, placement)
            for placement in sweep(scheduler.placement, total, free_share)
        ]
        clock, *after = (
            Side(name, models[2], functools.partial(step, models[2]))
            for name, step in (
                ("clock", _drop_gradients),
                ("no overlap", functools.partial(_step_after_backward, plain_steps[0])),
                ("torch", functools.partial(_step_after_backward, plain_steps[1])),
            )
        )
        sides = [clock, auto, *fixed, *after]
        for turn in range(rounds):
            for side in sides if turn % 2 == 0 else reversed(sides):
                side.turn(TIMED)
        for side in (auto, first):
            side.model.device.constants.clear()
            side.iterate()  # publishes, before another scheduler compares parameters with masters
        result = functools.partial(_result, clock=clock, adam=adam)
        return Row(
            parameters=total,
            layers=gradients.layers,
            ratio=ratio,
            adam_seconds=adam,
            backward_seconds=clock.model.backward_seconds,
            forward_seconds=clock.model.forward_seconds,
            clock=result(clock),
            auto=result(auto),
            placements=[result(side) for side in fixed],
            after_backward=result(after[0]),
            torch=result(after[1]),
            trace=auto.trace,
        )


def sweep(default: Placement, total: int, free_share: float) -> list[Placement]:
    """Return fixed placements, which vary the number of kept buckets, the size of buckets, or the number of threads."""
    numel = default.bucket_numel
    most = int(free_share * total) // numel
    kept = sorted({most * part // 4 for part in range(5)})
    sizes = [replace(default, bucket_numel=max(1, size)) for size in (numel // 2, numel // 4, 2 * numel)]
    fewer = [replace(default, num_threads=default.num_threads // 2)] if default.num_threads > 1 else []
    return [*(replace(default, gpu_buckets=buckets) for buckets in kept), *sizes, *fewer]


def _optimizer(model: nn.Module) -> SpeculativeCPUAdamW:
    return SpeculativeCPUAdamW(
        model.parameters(),
        **ADAMW_OPTIONS,
    )


def _step(model: TimedModel, optimizer: SpeculativeCPUAdamW) -> bool:
    """Make a step; return whether it was clipped."""
    is_clipped = model.step % CLIP_EVERY == 0
    optimizer.max_grad_norm = 0.9 * model.gradients.norm if is_clipped else MAX_GRAD_NORM
    optimizer.step()
    optimizer.zero_grad()
    outcome = optimizer.last_outcome
    if outcome is None or (outcome.kind is StepKind.CLIPPED) != is_clipped:
        raise RuntimeError(f"the gradients of a benchmark were not judged as they should ({outcome}); report this")
    return is_clipped


def _drop_gradients(model: TimedModel) -> bool:
    model.zero_grad()
    return False


def _step_after_backward(action: Action, model: TimedModel) -> bool:
    """Download gradients after backward, make a whole step on the host, and upload the new values."""
    device, size = model.device, sum(parameter.nbytes for parameter in model.weights)
    device.wait(Stream.DOWNLOAD, device.record(Stream.CURRENT))
    device.spend(Stream.DOWNLOAD, size / device.rates.download, "gradients")
    device.record(Stream.DOWNLOAD).synchronize()
    action()
    device.spend(Stream.UPLOAD, size / device.rates.upload, "new values")
    device.wait(Stream.CURRENT, device.record(Stream.UPLOAD))
    return _drop_gradients(model)


def _seconds_of(action: Action, clock: Callable[[], float] = time.perf_counter) -> float:
    """Return the time of the shortest run: what other processes add says nothing about the action."""
    seconds = []
    for _ in range(WARM_UPS + TIMED + 1):
        begin = clock()
        action()
        seconds.append(clock() - begin)
    return min(seconds[WARM_UPS:])


def _result(side: Side, clock: Side, adam: float) -> SideResult:
    usual, clipped = side.seconds[False], side.seconds[True]
    count = len(usual) + len(clipped)
    placement = side.scheduler.placement if side.scheduler is not None and side.placement is None else side.placement
    python, of_clock = statistics.median(side.python), statistics.median(clock.python)
    alone = statistics.median(clock.seconds[False])
    spread = Spread.of(usual)
    return SideResult(
        name=side.name,
        placement="" if placement is None else words_of(placement),
        seconds=spread,
        clipped_seconds=statistics.median(clipped) if clipped else None,
        over_clock=spread.median / alone,
        hidden_share=max(0.0, 1.0 - max(0.0, spread.median - alone) / adam),
        waited_seconds=side.waited / count,
        python_seconds=python,
        bucket_seconds=(python - of_clock) * count / side.buckets if side.buckets else 0.0,
        queue_depth=statistics.fmean(side.depths) if side.depths else 0.0,
        deepest_queue=max(side.depths, default=0),
    )


def words_of(placement: Placement) -> str:
    """Return a placement as in tables: kept buckets, elements of a bucket, threads."""
    return f"{placement.gpu_buckets} {placement.bucket_numel / (1 << 20):.3g}Mi {placement.num_threads}"
