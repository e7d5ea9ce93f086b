"""What `superadam plan` finds out: memory, time at several efficiencies of the GPU, and what would be better."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from superadam.cli.plan.operations import operations
from superadam.cli.plan.rates import rates_of
from superadam.cli.plan.schedule import buckets_of, parts_of, placed, synchronous
from superadam.offload.needs import bytes_of_state
from superadam.plan.activations import FORWARD, HEAD
from superadam.plan.events import Clipping, Rates, Step, Work, simulate
from superadam.plan.machines import Machine
from superadam.plan.memory import MOST_TOKENS, SIZE, Memory, Setting, Subject, memory_of, placement_of, total
from superadam.plan.remedies import Remedy, remedies

EFFICIENCIES = (0.45, 0.55, 0.65)
"""Shares of the GPU's peak at which the model may compute: nothing but a measurement tells which."""

LATE_BUCKETS = 2
"""For as many more `step()` may wait where Adam counts as hidden."""

LEAST_GAIN = 0.05
"""Of tokens per second: a smaller one is not proposed."""


@dataclass(frozen=True, slots=True)
class Timing:
    """A step at one efficiency of the GPU.

    Attributes:
        efficiency: share of the peak, of the hardware's operations.
        step: seconds; `resident` buckets of `buckets` stay on the GPU.
        synchronous: seconds where the optimizer begins after backward.
        on_gpu: seconds with all state on the GPU; None where that does not fit.
        tokens_per_second, model_rate, hardware_rate: of all ranks, and operations per second of one: those of the
            model, and with those that the GPU repeats.
        hides_from: tokens of a step of all ranks from which `step()` hardly waits for the CPU.
    """

    efficiency: float
    step: Step
    resident: int
    buckets: int
    synchronous: float
    on_gpu: float | None
    tokens_per_second: float
    model_rate: float
    hardware_rate: float
    hides_from: float


@dataclass(frozen=True, slots=True)
class Answer:
    """Everything about one model, setting and machine."""

    name: str
    machine: Machine
    setting: Setting
    subject: Subject
    memory: Memory
    timings: Sequence[Timing]
    remedies: Sequence[Remedy]
    gains: Mapping[str, float]  # factors of tokens per second, by the change in words


def timing_of(subject: Subject, setting: Setting, machine: Machine, memory: Memory, efficiency: float) -> Timing:
    """Return a step's times at an efficiency; `memory` says what is left on the GPU for state."""
    counted = operations(subject, setting)
    placement, rate = placement_of(subject, setting), machine.gpu_operations.value * efficiency
    ordered = [(shard, counted.by_parameter.get(name, 0.0)) for name, shard in subject.shards(setting.ranks).items()]
    parts = parts_of(reversed(ordered), placement.bucket_numel)
    rates, state = rates_of(machine, setting.storage), bytes_of_state(setting.storage)
    work = Work(
        buckets_of(parts, placement),
        counted.forward / rate,
        (counted.hardware - counted.forward) / rate,
        micro_batches=setting.micro_batches,
        bucket_numel=placement.bucket_numel,
        size=SIZE,
        room=memory.room,
        flows=setting.flows,
        clipping=Clipping(setting.clipped),
        resident=2 * state,
    )
    free = max(0, memory.free) if work.room is None and not setting.flows else 0
    resident, work, step = placed(rates, work, parts, placement, free, state)
    forward, head = (total(memory.gpu[stage]) for stage in (FORWARD, HEAD))
    fixed = max(forward + SIZE * work.numel, head) + state * work.numel  # with all gradients, or the loss
    on_gpu = None
    if fixed <= memory.gpu_limit and not setting.flows:
        on_gpu = step.clock + (work.resident + 2 * SIZE) * work.numel / rates.memory
    return Timing(
        efficiency,
        step,
        resident,
        len(work.buckets),
        synchronous(rates, work),
        on_gpu,
        setting.tokens_of_step / step.seconds,
        counted.model * setting.micro_batches / step.seconds,
        counted.hardware * setting.micro_batches / step.seconds,
        hides_from(rates, work) * setting.tokens_of_step,
    )


def hides_from(rates: Rates, work: Work) -> float:
    """Return the factor by which forward and backward must change for `step()` to wait for no more than it always does.

    What arrives when backward ends, such as the last embedding, nothing hides.
    """

    def waited(factor: float) -> float:
        return simulate(rates, replace(work, forward=factor * work.forward, backward=factor * work.backward)).waited

    low, high = 1e-3, 1e3
    allowed = waited(high) + LATE_BUCKETS * (rates.passes.fused * work.bucket_numel + rates.worker_per_bucket)
    while high / low > 1.05:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if waited(middle) <= allowed else (middle, high)
    return high


def gains_of(subject: Subject, setting: Setting, machine: Machine, now: Timing) -> dict[str, float]:
    """Return changes that fit, and by what they multiply the tokens per second of now, the largest gain first."""
    changes = [(replace(setting, sequences=k * setting.sequences), f"--batch {k * setting.sequences}") for k in (2, 4)]
    if setting.micro_batches > 1:
        fewer = replace(setting, sequences=setting.sequences * setting.micro_batches, micro_batches=1)
        changes.append((fewer, f"--batch {fewer.sequences} --micro-batches 1"))
    if setting.checkpointing:
        changes.append((replace(setting, checkpointing=False), "--no-checkpointing"))
    if (setting.moments, setting.master) == ("fp32", "fp32"):
        changes.append((replace(setting, moments="bf16", master="24bit"), "--moments bf16 --master 24bit"))
    gains = {}
    for changed, words in changes:
        if changed.sequences * changed.tokens > MOST_TOKENS:
            continue
        memory = memory_of(subject, changed, machine)
        if not memory.trains:
            continue
        then = timing_of(subject, changed, machine, memory, now.efficiency)
        if (factor := then.tokens_per_second / now.tokens_per_second) > 1 + LEAST_GAIN:
            gains[words] = factor
    return dict(sorted(gains.items(), key=lambda gain: -gain[1]))


def answer_for(
    name: str,
    subject: Subject,
    setting: Setting,
    machine: Machine,
    efficiency: float | None = None,
    *,
    looks_for_gains: bool = True,
) -> Answer:
    """Return the answer; without an efficiency of the GPU, for a range of them. Gains take as long as all else.

    Raises:
        UnplannableError: the model's memory cannot be found out.
    """
    memory = memory_of(subject, setting, machine)
    chosen = EFFICIENCIES if efficiency is None else (efficiency,)
    if not memory.trains:
        return Answer(name, machine, setting, subject, memory, [], remedies(subject, setting, machine), {})
    timings = [timing_of(subject, setting, machine, memory, each) for each in chosen]
    gains = gains_of(subject, setting, machine, timings[len(timings) // 2]) if looks_for_gains else {}
    return Answer(name, machine, setting, subject, memory, timings, [], gains)
