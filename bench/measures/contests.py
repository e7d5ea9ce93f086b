"""Ours against its peers: the same step by superadam, and by what a script with another optimizer does today.

Both sides do complete steps over as many elements of the same values, with new gradients before each of them.
"""

from __future__ import annotations

import enum
import gc
import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

import superadam
from measures.peers import LeftOut, Peer
from measures.threads import computing_threads
from superadam.cli.bench import floor, passes
from superadam.cli.bench.arrays import ADAMW_OPTIONS, PassArrays
from superadam.cli.bench.pairs import Action, Comparison, compare
from superadam.host.machine import Host
from superadam.host.memory import HostMemory, gigabytes
from superadam.kernels import native
from superadam.kernels.native import Dtype, Pass
from superadam.kernels.torch_private import foreach_copy_

MAX_GRAD_NORM = 1e6
"""Far above the norm of every contest: the usual step is not clipped, but the norm must be known before it is made."""

FLOOR = "floor of memory traffic"
"""The opponent that moves the memory of the norm and of the update, and computes nothing."""

FLOOR_FROM = 16 * native.CHUNK
"""Elements, in whole chunks as far as they go, below which moving memory is not what takes the time."""

SMALL = (64, 1 << 10, 1 << 14, 1 << 18)
"""Elements of one tensor; larger ones follow from 1 Mi on, each four times the one before."""

MANY, MANY_NUMEL = (10, 100, 1_000, 10_000), 1_000
"""Numbers of tensors, and the elements of each."""

SMALL_MODELS = ((12, 4096), (150, 65_536))
"""Numbers of tensors, and the elements of each."""

USUAL = 1 << 24
"""Elements of the largest tensor of all contests but those of the whole step in bf16 against peers of one pass."""

FEW = ((1, 1 << 20), (1, 1 << 24), (1_000, 1_000))
"""Shapes of contests on other numbers of threads; those with moments of 8 bits have the single tensors."""

FACTORS = (1.0, 0.5, 2.0)
"""What gradients are multiplied with in one step after another, exactly in every dtype."""

REST, AWAKE = 5e-3, 2e-4
"""Seconds of sleep before each timed step, because OpenMP's threads go on spinning for about 3 ms, on cores that the
other side needs; and of spinning after that, until the processor runs at its usual clock."""

BYTES_PER_ELEMENT = 64
"""Memory of both sides together, at most: state, gradients, what they are copied from, torch's temporary lists."""


class Task(enum.Enum):
    """What a script has to do; ours takes the norm in each of them. Values are keys in files."""

    CAST = "cast"  # bf16 weights and gradients, fp32 masters: widen, clip, step, copy to the weights
    CLIP = "clip"  # fp32 parameters: clip, step
    STEP = "step"  # fp32 parameters: step, without norm or check

    @property
    def in_words(self) -> str:
        """What the other side does."""
        return {
            Task.CAST: "bf16: widen, clip, step, copy",
            Task.CLIP: "fp32: clip, step",
            Task.STEP: "fp32: step without norm",
        }[self]


@dataclass(frozen=True, slots=True)
class Side:
    """One side: `run` is timed, `renew` goes before it and makes new gradients."""

    renew: Action
    run: Action


@dataclass(frozen=True, slots=True)
class Contest:
    """One comparison.

    Attributes:
        peer: the other side; None for the floor.
        tensors, numel: number of parameters, and the elements of each.
        threads: of both sides.
    """

    task: Task
    peer: Peer | None
    tensors: int
    numel: int
    threads: int

    @property
    def against(self) -> str:
        """Name of the peer, or FLOOR."""
        return FLOOR if self.peer is None else self.peer.name

    @property
    def moments(self) -> str:
        """How ours are stored."""
        return "fp32" if self.peer is None else self.peer.moments


@dataclass(frozen=True, slots=True)
class ContestResult:
    """One row: the result of a contest."""

    contest: Contest
    comparison: Comparison


def _tensors(count: int, numel: int, scale: float, seed: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [(scale * torch.randn(numel, generator=generator, device="cpu")).to(dtype) for _ in range(count)]


def _rest() -> None:
    time.sleep(REST)
    end = time.perf_counter() + AWAKE
    while time.perf_counter() < end:
        pass


def _renewal(parameters: Sequence[Tensor], dtype: torch.dtype) -> Action:
    """Return an action that gives parameters new gradients in new memory, as backward does, and lets threads rest."""
    sources = _tensors(len(parameters), parameters[0].numel(), 1e-3, 1, dtype)
    factors = itertools.cycle(FACTORS)

    def renew() -> None:
        for parameter in parameters:
            parameter.grad = None
        factor = next(factors)
        for parameter, source in zip(parameters, sources, strict=True):
            parameter.grad = source * factor
        _rest()

    return renew


def _parameters(tensors: int, numel: int, dtype: torch.dtype) -> list[Tensor]:
    return [tensor.requires_grad_(True) for tensor in _tensors(tensors, numel, 1.0, 0, dtype)]


def ours(task: Task, tensors: int, numel: int, moments: str = "fp32") -> Side:
    """Return the side of superadam's optimizer."""
    dtype = torch.bfloat16 if task is Task.CAST else torch.float32
    parameters = _parameters(tensors, numel, dtype)
    optimizer = superadam.SpeculativeCPUAdamW(parameters, **ADAMW_OPTIONS, max_grad_norm=MAX_GRAD_NORM, moments=moments)
    return Side(_renewal(parameters, dtype), optimizer.step)


def theirs(task: Task, peer: Peer, tensors: int, numel: int) -> Side:
    """Return the side of a peer."""
    masters = _parameters(tensors, numel, torch.float32)
    optimizer = peer.make(masters)
    values = [master.detach() for master in masters]

    def clip_and_step() -> None:
        torch.nn.utils.clip_grad_norm_(masters, MAX_GRAD_NORM)
        optimizer.step()

    if task is not Task.CAST:
        return Side(_renewal(masters, torch.float32), optimizer.step if task is Task.STEP else clip_and_step)
    weights = [value.to(torch.bfloat16) for value in values]
    gradients = [torch.zeros_like(value) for value in values]
    for master, gradient in zip(masters, gradients, strict=True):
        master.grad = gradient

    def run() -> None:
        foreach_copy_(gradients, [weight.grad for weight in weights])
        clip_and_step()
        foreach_copy_(weights, values)

    return Side(_renewal(weights, torch.bfloat16), run)


def floor_of(task: Task, numel: int, threads: int) -> Side:
    """Return the side that reads the gradient for the norm, and moves the memory of the update, in whole chunks."""
    dtypes = (Dtype.BFLOAT16, Dtype.BFLOAT16) if task is Task.CAST else (Dtype.FLOAT32, Dtype.NONE)
    length = native.chunk_count(numel) * native.CHUNK
    arrays = PassArrays(length, *dtypes)
    probe = arrays if length <= USUAL else PassArrays(USUAL, *dtypes)  # far above caches; trying all ways takes long
    setting = passes.Setting(native.active_isa(), threads)
    moves = []
    for which in (Pass.NORM, Pass.UPDATE):
        kernel = passes.action(probe, which, setting, with_norm=which is Pass.NORM)
        variant = floor.find_floor(probe, which, threads, kernel, rounds=2)
        moves.append(floor.action(arrays, which, variant, threads))

    def run(arrays: PassArrays = arrays) -> None:  # without a reference, their memory would be freed
        for move in moves:
            move()

    return Side(_rest, run)


def sides_of(contest: Contest) -> tuple[Side, Side]:
    """Make the tensors, and return our side and the other."""
    task, tensors, numel = contest.task, contest.tensors, contest.numel
    mine = ours(task, tensors, numel, contest.moments)
    if contest.peer is None:
        return mine, floor_of(task, tensors * numel, contest.threads)
    return mine, theirs(task, contest.peer, tensors, numel)


def contests(numel: int, threads: Sequence[int], peers: Sequence[Peer]) -> list[Contest]:
    """Return the comparisons, the most important first: single tensors of up to `numel` elements, and many small ones.

    The first number of threads is for all of them, the others for a few. Peers that take several passes over memory are
    not compared at sizes where one step of theirs takes most of a second.
    """
    large = itertools.takewhile(lambda size: size <= numel, (1 << (20 + 2 * k) for k in itertools.count()))
    single = [(1, size) for size in (*SMALL, *large) if size <= numel]
    usual = [shape for shape in single if shape[1] <= USUAL]
    few = [shape for shape in FEW if shape[0] * shape[1] <= numel]
    many = [(count, MANY_NUMEL) for count in MANY]
    plain = [peer for peer in peers if peer.moments == "fp32"]
    found: list[Contest] = []

    def add(task: Task, shapes: Sequence[tuple[int, int]], peers: Sequence[Peer], threads: int, floor: bool) -> None:
        for tensors, numel in shapes:
            opponents = [*peers, None] if floor and tensors * numel >= FLOOR_FROM else peers
            found.extend(Contest(task, opponent, tensors, numel, threads) for opponent in opponents)

    fast = [peer for peer in plain if peer.is_one_pass]
    slow = [peer for peer in plain if not peer.is_one_pass]
    compact = [peer for peer in peers if peer.moments != "fp32"]
    add(Task.CAST, [*single, *many, *SMALL_MODELS], fast, threads[0], floor=True)
    add(Task.CAST, [*usual, *many, *SMALL_MODELS], slow, threads[0], floor=False)
    add(Task.CLIP, [*usual, *many, *SMALL_MODELS], fast, threads[0], floor=True)
    add(Task.CLIP, [*usual, *many[:-1]], slow, threads[0], floor=False)
    for others in threads[1:]:
        add(Task.CAST, few, fast, others, floor=True)
    add(Task.CAST, [shape for shape in few if shape[0] == 1], compact, threads[0], floor=False)
    add(Task.STEP, [*usual, *many[:-1], *SMALL_MODELS], fast, threads[0], floor=False)
    add(Task.STEP, [*usual, *many[:-1]], slow, threads[0], floor=False)
    return found


def measure(chosen: Sequence[Contest], pairs: int, end: float) -> Iterator[ContestResult | LeftOut]:
    """Yield one row for each contest as it is measured, over `pairs` of steps.

    None begins when `time.monotonic()` is above `end`, or where both sides would not fit into memory.
    """
    for number, contest in enumerate(chosen):
        if time.monotonic() > end:
            yield LeftOut(f"{len(chosen) - number} comparisons", "the time was over")
            return
        needed = BYTES_PER_ELEMENT * contest.tensors * contest.numel
        if needed > (free := HostMemory.of(Host()).available):
            why = f"needs {gigabytes(needed)} of memory, {gigabytes(free)} are free"
            yield LeftOut(f"{contest.tensors} x {contest.numel} against {contest.against}", why)
            continue
        with computing_threads(contest.threads):
            first, second = sides_of(contest)
            renewals = (first.renew, second.renew)
            yield ContestResult(contest, compare(first.run, second.run, pairs, before=renewals))
        del first, second, renewals
        gc.collect()  # before the next contest makes its tensors
