"""Iterations with the scheduler on a paced device, against that device's clock alone.

Scheduler, worker, hooks and CPU kernels are the real ones. `measures.paced_device` says what the device cannot show.
"""

from __future__ import annotations

import functools
import gc
import math
import statistics
import timeit
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace

import torch

from measures import contests
from measures.gradient_norms import MAX_NORM, gradient_norms
from measures.paced_device import H200, PacedDevice
from measures.peers import FUSED
from measures.threads import computing_threads
from measures.timed_model import Gradients, TimedModel, without_samples
from superadam import OffloadScheduler, SpeculativeCPUAdamW
from superadam.cli.bench import passes
from superadam.cli.bench.arrays import ADAMW_OPTIONS, PassArrays
from superadam.cli.bench.pairs import Action, Spread, times_of
from superadam.cli.plan.rates import PASSES, WITH_NORM
from superadam.devices import Stream
from superadam.kernels import native
from superadam.offload.needs import bytes_of_state
from superadam.offload.placement import FREE_SHARE, Placement
from superadam.step.outcome import StepKind

CLIP_EVERY = 10
"""Interval of clipped steps where no share is asked for."""

WITHIN, BEYOND = 0.9, 1.1
"""Norms of the other steps and of these, over the limit."""

FORWARD_SHARE = 0.5
"""Forward's time as a share of backward's."""

KEPT_SHARE = 0.5
"""Share of the parameters whose state "auto" may keep on the device."""

SETTLING = 4
"""Turns in which "auto" measures and chooses, with some in reserve."""

WARM_UPS = 2
"""Untimed iterations at the beginning of a turn, because the turn before committed every accepted step."""

TIMED = 4
"""Timed iterations of a turn."""

MOST_OF_PASSES = 1 << 26
"""Elements over which passes are timed: more take as long for each."""

SEEDS = 50
"""Tried, to have the wanted share of clipped steps also in a run's few steps, and in the fewer that are timed."""


@dataclass
class Side:
    """One way to train, and the measurements of its timed iterations.

    Attributes:
        step: runs after backward; returns whether the step was clipped.
        placement: applied before each turn; None leaves the scheduler's.
        seconds: of iterations, by whether they were clipped.
        accepted, redone: tensors whose speculation was published, and those that were updated again with the verdict.
    """

    name: str
    model: TimedModel
    step: Callable[[], bool]
    scheduler: OffloadScheduler | None = None
    placement: Placement | None = None
    seconds: dict[bool, list[float]] = field(default_factory=lambda: {False: [], True: []})
    accepted: int = 0
    redone: int = 0

    def iterate(self) -> bool:
        """Make one iteration; return whether it was clipped."""
        self.model().backward()
        return self.step()

    def settle(self) -> None:
        """Run the iterations of a turn untimed."""
        self.model.step = 0
        for _ in range(WARM_UPS + TIMED):
            self.iterate()
        if self.scheduler is not None:
            self.scheduler.synchronize()

    def turn(self, timed: int) -> None:
        """Run some iterations untimed, and then some timed."""
        device, scheduler = self.model.device, self.scheduler
        self.model.step = 0
        if scheduler is not None and self.placement is not None:
            place = self.placement
            scheduler.place(
                gpu_buckets=place.gpu_buckets, bucket_numel=place.bucket_numel, num_threads=place.num_threads
            )
        for _ in range(WARM_UPS):
            self.iterate()
        before = None
        if scheduler is not None:
            before = replace(scheduler.optimizer.statistics)
        end = device.record(Stream.CURRENT).passed_at()
        for _ in range(timed):
            last, is_clipped = end, self.iterate()
            end = device.record(Stream.CURRENT).passed_at()
            self.seconds[is_clipped].append(end - last)
        device.record(Stream.CURRENT).synchronize()
        if scheduler is not None and before is not None:
            now = scheduler.optimizer.statistics
            self.accepted += now.accepted - before.accepted
            self.redone += now.respeculated - before.respeculated
            scheduler.synchronize()  # or its worker would run in another side's turn


@dataclass(frozen=True, slots=True)
class SideResult:
    """Measurements of one side of a row, per iteration.

    Attributes:
        seconds: of iterations whose step was not clipped; None without any.
        clipped_seconds: median of the others; None without any.
        typical_seconds: median of iterations whose step was not clipped. Where a share was asked for, the mean of both
            medians, weighted by the number of iterations.
        over_clock: typical time over the clock's.
        hidden_share: share of the CPU's Adam time by which iterations are not longer than the clock's. What a clipped
            step computes again counts as not hidden, as far as it takes the iteration longer.
        accepted, redone: shares of the tensors of all timed steps: those whose speculation was published, and those
            that were speculated on but updated again with the verdict. All others were updated once, with the verdict.
    """

    name: str
    placement: str
    seconds: Spread | None
    clipped_seconds: float | None
    typical_seconds: float
    over_clock: float
    hidden_share: float
    accepted: float
    redone: float


@dataclass(frozen=True, slots=True)
class Row:
    """All sides with one workload.

    Attributes:
        parameters, layers: of the model, in bf16.
        adam_seconds: of a plain step on all threads: the median of the row's turns.
        passes: seconds of an element in each pass of the kernels, by the names that `superadam plan` has for them.
        backward_seconds, forward_seconds: of the device.
        lr: learning rate.
        clipped_share: of the timed steps.
        lowest_norm, highest_norm: of the gradients of timed steps; the limit is `gradient_norms.MAX_NORM`.
        placements: sides with fixed placements.
    """

    parameters: int
    layers: int
    adam_seconds: float
    passes: dict[str, float]
    backward_seconds: float
    forward_seconds: float
    lr: float
    clipped_share: float
    lowest_norm: float
    highest_norm: float
    clock: SideResult
    auto: SideResult
    placements: list[SideResult]
    after_backward: SideResult
    torch: SideResult

    @property
    def ratio(self) -> float:
        """Of backward's time to Adam's, about what was asked for."""
        return self.backward_seconds / self.adam_seconds

    @property
    def best(self) -> SideResult:
        """The fastest fixed placement."""
        return min(self.placements, key=lambda side: side.typical_seconds)


@dataclass(frozen=True, slots=True)
class Settings:
    """What is the same in all rows.

    Attributes:
        threads: of the CPU.
        rounds: turns of each side.
        lr: learning rate.
        clipped: share of clipped steps; None for one in `CLIP_EVERY`, whose times do not count.
    """

    threads: int
    rounds: int
    lr: float
    clipped: float | None = None


def measure(parameters: int, layers: int, ratios: Sequence[float], settings: Settings) -> Iterator[Row]:
    """Yield one row for each ratio.

    Args:
        parameters, layers: of the model; a layer has one tensor of a multiple of 64 elements.
        ratios: of backward's time to the CPU's Adam time.
        settings: all else.
    """
    with computing_threads(settings.threads):
        numel = max(64, parameters // layers // 64 * 64)
        gradients = Gradients([numel] * layers, WARM_UPS + TIMED)
        norms = norms_of_turns(settings.clipped, settings.rounds)
        models = [TimedModel(gradients) for _ in range(3)]
        optimizers = [_optimizer(model, settings.lr, norms) for model in models[:2]]
        task = contests.Task.CAST
        sides = contests.ours(task, layers, numel), contests.theirs(task, FUSED, layers, numel)
        for side in sides:
            side.renew()
        plain_steps = [side.run for side in sides]
        for ratio in ratios:
            with without_samples():
                row = _row(gradients, models, optimizers, plain_steps, norms, ratio, settings)
            yield row
            gc.collect()  # schedulers are in cycles, which hold gigabytes


def norms_of_turns(clipped: float | None, rounds: int) -> list[list[float]]:
    """Return the norms of each turn's gradients, of `SETTLING` untimed turns and of `rounds` timed ones."""
    length = WARM_UPS + TIMED
    count = (SETTLING + rounds) * length
    if clipped is None:
        norms = [BEYOND * MAX_NORM if step % CLIP_EVERY == 0 else WITHIN * MAX_NORM for step in range(count)]
        return _cut(norms, length)
    tried = [_cut(gradient_norms(clipped, count, seed), length) for seed in range(SEEDS)]

    def missed(turns: Sequence[Sequence[float]]) -> float:
        every = [norm for turn in turns for norm in turn]
        return abs(_clipped_share(timed_norms(turns)) - clipped) + abs(_clipped_share(every) - clipped)

    return min(tried, key=missed)


def timed_norms(turns: Sequence[Sequence[float]]) -> list[float]:
    """Return the norms of the steps that are timed."""
    return [norm for turn in turns[SETTLING:] for norm in turn[WARM_UPS:]]


def _cut(norms: Sequence[float], length: int) -> list[list[float]]:
    return [list(norms[begin : begin + length]) for begin in range(0, len(norms), length)]


def _clipped_share(norms: Sequence[float]) -> float:
    return statistics.fmean(norm > MAX_NORM for norm in norms)


def _row(
    gradients: Gradients,
    models: Sequence[TimedModel],
    optimizers: Sequence[SpeculativeCPUAdamW],
    plain_steps: Sequence[Action],
    norms: Sequence[Sequence[float]],
    ratio: float,
    settings: Settings,
) -> Row:
    threads, total = settings.threads, sum(gradients.numels)
    plain: list[float] = []
    adam, timed_step = _seconds_of(plain_steps[0]), functools.partial(timeit.timeit, plain_steps[0], number=1)
    free_bytes = int((KEPT_SHARE * total / FREE_SHARE + 1) * (bytes_of_state() + torch.bfloat16.itemsize))
    for model in models:
        model.device = PacedDevice(H200, free_bytes=free_bytes, constants=gradients.sets, norms=gradients.sums)
        model.backward_seconds, model.forward_seconds = ratio * adam, FORWARD_SHARE * ratio * adam

    def begin_turn(number: int) -> None:
        for model in models:
            model.device.run_deferred()  # of the turn before, with its gradients
        gradients.scale_to(norms[number])

    with ExitStack() as stack:

        def overlapped(which: int, buckets: int | str) -> tuple[Side, OffloadScheduler]:
            model, optimizer = models[which], optimizers[which]
            scheduler = stack.enter_context(
                OffloadScheduler(optimizer, model, gpu_buckets=buckets, num_threads=threads, device=model.device)
            )
            return Side("auto", model, functools.partial(_step, model, optimizer), scheduler), scheduler

        (auto, _), (first, scheduler) = overlapped(0, "auto"), overlapped(1, 0)
        for number in range(SETTLING):
            begin_turn(number)
            auto.settle()
            first.settle()
        fixed = [
            Side("fixed", first.model, first.step, scheduler, placement)
            for placement in sweep(scheduler.placement, total, KEPT_SHARE)
        ]
        clock, *after = (
            Side(name, models[2], functools.partial(step, models[2]))
            for name, step in (
                ("clock", _drop_gradients),
                ("no overlap", functools.partial(_step_after_backward, lambda: plain.append(timed_step()))),
                ("torch", functools.partial(_step_after_backward, plain_steps[1])),
            )
        )
        sides = [clock, auto, *fixed, *after]
        for turn in range(settings.rounds):
            begin_turn(SETTLING + turn)  # for all sides, so that they train with the same norms
            for side in sides if turn % 2 == 0 else reversed(sides):
                side.turn(TIMED)
        for side in (auto, first):
            side.model.device.constants.clear()
            side.iterate()  # publishes, before another scheduler compares parameters with masters
        adam = statistics.median(plain)
        result = functools.partial(_result, clock=clock, adam=adam, counts_clipped=settings.clipped is not None)
        timed = timed_norms(norms)
        return Row(
            parameters=total,
            layers=len(gradients.numels),
            adam_seconds=adam,
            passes=seconds_of_passes(min(total, MOST_OF_PASSES), threads),
            backward_seconds=clock.model.backward_seconds,
            forward_seconds=clock.model.forward_seconds,
            lr=settings.lr,
            clipped_share=_clipped_share(timed),
            lowest_norm=min(timed),
            highest_norm=max(timed),
            clock=result(clock),
            auto=result(auto),
            placements=[result(side) for side in fixed],
            after_backward=result(after[0]),
            torch=result(after[1]),
        )


def sweep(default: Placement, total: int, free_share: float) -> list[Placement]:
    """Return fixed placements, which vary the number of resident buckets, the size of buckets, or the threads."""
    numel = default.bucket_numel
    most = int(free_share * total) // numel
    kept = sorted({most * part // 4 for part in range(5)})
    sizes = [replace(default, bucket_numel=max(1, size)) for size in (numel // 2, numel // 4, 2 * numel)]
    fewer = [replace(default, num_threads=default.num_threads // 2)] if default.num_threads > 1 else []
    return [*(replace(default, gpu_buckets=buckets) for buckets in kept), *sizes, *fewer]


def _optimizer(model: TimedModel, lr: float, norms: Sequence[Sequence[float]]) -> SpeculativeCPUAdamW:
    """Return an optimizer whose state is that of training for long with such norms, and set the weights accordingly."""
    options = ADAMW_OPTIONS | {"lr": lr, "max_grad_norm": MAX_NORM}
    optimizer = SpeculativeCPUAdamW(model.parameters(), **options)
    applied = math.sqrt(statistics.fmean(min(norm, MAX_NORM) ** 2 for turn in norms for norm in turn))
    for weight in model.weights:
        state = model.gradients.steady_state(applied, weight.numel())
        weight.data.copy_(state["master"])
        optimizer.state[weight] = state
    return optimizer


def _step(model: TimedModel, optimizer: SpeculativeCPUAdamW) -> bool:
    """Make a step; return whether it was clipped."""
    is_clipped = model.norm > MAX_NORM
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
    device.spend(Stream.DOWNLOAD, size / device.rates.download)
    device.record(Stream.DOWNLOAD).synchronize()
    action()
    device.spend(Stream.UPLOAD, size / device.rates.upload)
    device.wait(Stream.CURRENT, device.record(Stream.UPLOAD))
    return _drop_gradients(model)


def _seconds_of(action: Action) -> float:
    """Return the time of the shortest run: what other processes add says nothing about the action."""
    return min(times_of(action, TIMED + 1))


def seconds_of_passes(numel: int, threads: int) -> dict[str, float]:
    """Return the seconds of an element in each pass over so many, in bf16 with fp32 state."""
    arrays = PassArrays(numel, *passes.DTYPES)
    setting = passes.Setting(native.active_isa(), threads)
    return {
        name: _seconds_of(passes.action(arrays, which, setting, with_norm=name in WITH_NORM)) / numel
        for name, which in PASSES.items()
    }


def _result(side: Side, clock: Side, adam: float, *, counts_clipped: bool) -> SideResult:
    usual, clipped = side.seconds[False], side.seconds[True]
    count = len(usual) + len(clipped)
    placement = side.scheduler.placement if side.scheduler is not None and side.placement is None else side.placement
    alone, typical = statistics.median(clock.seconds[False]), _typical(usual, clipped if counts_clipped else [])
    tensors = count * len(side.model.gradients.numels)
    return SideResult(
        name=side.name,
        placement="" if placement is None else words_of(placement),
        seconds=Spread.of(usual) if usual else None,
        clipped_seconds=statistics.median(clipped) if clipped else None,
        typical_seconds=typical,
        over_clock=typical / alone,
        hidden_share=max(0.0, 1.0 - max(0.0, typical - alone) / adam),
        accepted=side.accepted / tensors,
        redone=side.redone / tensors,
    )


def _typical(usual: Sequence[float], clipped: Sequence[float]) -> float:
    """Return the mean of the medians of both kinds of iterations, weighted by their number."""
    kinds = [kind for kind in (usual, clipped) if kind]
    return sum(len(kind) * statistics.median(kind) for kind in kinds) / sum(map(len, kinds))


def words_of(placement: Placement) -> str:
    """Return a placement as in tables: resident buckets, elements of a bucket, threads."""
    return f"{placement.gpu_buckets} {placement.bucket_numel / (1 << 20):.3g}Mi {placement.num_threads}"
