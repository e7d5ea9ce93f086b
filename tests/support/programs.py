"""Programs that train in many settings: each ends in the bits of its run without a scheduler.

A program makes its optimizers with `Run.adamw`, trains within `Run.overlap`, and shows what it has at hand with
`Run.see`. Here is where and how programs train, and where two runs of one differ first.
"""

from __future__ import annotations

import contextlib
import math
import platform
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch
from support.deep import DEEP
from support.overlap import DeferredDevice, ImmediateDevice, ThreadDevice, eager, everything, mlp, twins
from support.visible import bits, parameters_of
from torch import Tensor, nn

from superadam import OffloadScheduler, SpeculativeCPUAdamW, StepKind
from superadam.devices import Device
from superadam.offload import buckets
from superadam.testing import SimulatedDevice

# ---- settings --------------------------------------------------------------------------------------------------------

Storage = tuple[tuple[str, str], ...]
"""How state is stored, as arguments of the optimizer."""
HALF_MOMENTS, EIGHT_BITS, SHORT_MASTERS = ("moments", "bf16"), ("moments", "8bit"), ("master", "24bit")


@dataclass(frozen=True)
class Setting:
    """Where and how a program trains. Parameters in fp32 on the host are never speculated on.

    Attributes:
        device: makes the scheduler's device; None without a scheduler.
        bucket_numel: 1 speculates on every gradient alone.
        clips: whether the gradient norm has a limit, over which some steps are.
        patches: whether all steps are clipped, and so small that values of an interval of factors are patched.
        looks: whether state and gradients are read after every step, which commits it; else after the last only.
        sums: whether gradients are added up in fp32 on the host: within a program's `accumulate()`, or wherever it has
            none. They are those of autograd where gradients are as wide.
        pauses: whether nothing is taken for some steps after one whose gradients were edited, as usual.
        is_torch: whether the optimizer is torch's.
    """

    name: str
    dtype: torch.dtype
    device: Callable[[], Device] | None = None
    bucket_numel: int = 1
    gpu_buckets: int | None = None
    clips: bool = False
    patches: bool = False
    looks: bool = False
    sums: bool = False
    pauses: bool = False
    storage: Storage = ()
    is_torch: bool = False

    def __str__(self) -> str:
        return self.name

    @property
    def plain(self) -> Setting:
        """The same without a scheduler."""
        return replace(
            self, name="plain", device=None, bucket_numel=1, gpu_buckets=None, sums=False, pauses=False, is_torch=False
        )


EAGER = Setting("bf16-immediate", torch.bfloat16, ImmediateDevice, looks=True)
"""Speculates on every gradient the moment that it is complete."""

PATCHED = [
    Setting("patched-immediate", torch.bfloat16, ImmediateDevice, 3000, patches=True),
    Setting("patched-simulated", torch.bfloat16, lambda: SimulatedDevice(2), 3000, gpu_buckets=0, patches=True),
]

OTHERS = [
    Setting("bf16-thread", torch.bfloat16, ThreadDevice, 3000),
    Setting("bf16-simulated", torch.bfloat16, lambda: SimulatedDevice(1), gpu_buckets=0, clips=True),
    Setting("8bit-24bit-immediate", torch.bfloat16, ImmediateDevice, looks=True, storage=(EIGHT_BITS, SHORT_MASTERS)),
    Setting("bf16-kept", torch.bfloat16, lambda: SimulatedDevice(2), 5000, gpu_buckets=1),
    Setting("fp32-thread", torch.float32, ThreadDevice, 3000, pauses=True),
    Setting("24bit-simulated", torch.bfloat16, lambda: SimulatedDevice(1), 3000, storage=(SHORT_MASTERS,), looks=True),
    Setting("fp32-simulated", torch.float32, lambda: SimulatedDevice(0), 3000, gpu_buckets=0, looks=True),
    Setting("bf16moments-thread", torch.bfloat16, ThreadDevice, 3000, clips=True, storage=(HALF_MOMENTS,)),
    Setting("8bit-kept", torch.bfloat16, lambda: SimulatedDevice(2), 5000, gpu_buckets=1, storage=(EIGHT_BITS,)),
    Setting("fp32-8bit-simulated", torch.float32, lambda: SimulatedDevice(0), 3000, storage=(EIGHT_BITS,)),
    Setting("fp64-kept", torch.float64, lambda: SimulatedDevice(1), 3000, gpu_buckets=1, clips=True),
]

SUMS = [
    Setting("sums-immediate", torch.float32, ImmediateDevice, clips=True, sums=True),
    Setting("sums-thread", torch.float32, ThreadDevice, clips=True, sums=True),
    Setting("sums-deferred", torch.float32, DeferredDevice, clips=True, sums=True),
    Setting("sums-lazy", torch.float32, lambda: SimulatedDevice(3, 0.0), clips=True, sums=True),
    Setting("sums-hasty", torch.float32, lambda: SimulatedDevice(5, 0.7), clips=True, sums=True),
    Setting("sums-fp64", torch.float64, lambda: SimulatedDevice(5, 0.7), clips=True, sums=True),
]

TORCH = Setting("torch", torch.float32, is_torch=True)


# ---- programs --------------------------------------------------------------------------------------------------------

Shown = list[dict[str, Any]]
"""What a program shows, in order: values by name, as `frozen` returns them."""


@dataclass
class Run:
    """One run of a program.

    Attributes:
        limit: of the gradient norm, in settings that clip.
        seen: what the program has shown.
        optimizers: all that it has made, whose parameters and state are compared at the end.
        schedulers: all that it has opened.
        scheduler: of the present step; None without one.
        block: of `accumulate()`, around a program that has none.
        kept: what a program remembers from step to step.
    """

    setting: Setting
    limit: float | None = None
    seen: Shown = field(default_factory=list)
    optimizers: list[Any] = field(default_factory=list)
    schedulers: list[OffloadScheduler] = field(default_factory=list)
    scheduler: OffloadScheduler | None = None
    block: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    kept: dict[str, Any] = field(default_factory=dict)

    @property
    def dtype(self) -> torch.dtype:
        """The models'."""
        return self.setting.dtype

    def adamw(self, params: Any, **options: Any) -> Any:
        """Return an optimizer."""
        options = {"lr": 1e-5 if self.setting.patches else 0.01, "weight_decay": 0.1, **options}
        if self.setting.is_torch:
            self.optimizers.append(torch.optim.AdamW(params, fused=True, **options))
        else:
            limit = self.limit if self.setting.clips else 1.0 if self.setting.patches else None
            options = {"max_grad_norm": limit, **dict(self.setting.storage), **options}
            self.optimizers.append(SpeculativeCPUAdamW(params, **options))
        return self.optimizers[-1]

    @contextlib.contextmanager
    def overlap(self, optimizer: Any, model: nn.Module) -> Iterator[OffloadScheduler | None]:
        """Open a scheduler, where there is to be one."""
        setting, before = self.setting, self.scheduler
        if setting.device is None:
            yield None
            return
        options = {} if setting.gpu_buckets is None else {"gpu_buckets": setting.gpu_buckets}
        device, bucket_numel = setting.device(), setting.bucket_numel
        self.scheduler = OffloadScheduler(optimizer, model, device=device, bucket_numel=bucket_numel, **options)
        self.schedulers.append(self.scheduler)
        with self.scheduler, self.block:
            if setting.sums:
                self.block.enter_context(self.scheduler.accumulate(torch.float32))
            yield self.scheduler
        self.scheduler = before

    def accumulate(self) -> AbstractContextManager[None]:
        """Enter `accumulate()`, where there is a scheduler."""
        if self.scheduler is None:
            return contextlib.nullcontext()
        self.block.close()
        return self.scheduler.accumulate(torch.float32 if self.setting.sums else None)

    def once(self) -> bool:
        """Whether this is the first time that a run asks."""
        return self.kept.setdefault("once", 0) == 0 and not self.kept.update(once=1)

    def see(self, *values: Any, **named: Any) -> None:
        """Show values, to be compared."""
        self.seen.append(frozen({**({"values": values} if values else {}), **named}))


@dataclass(frozen=True)
class Program:
    """A whole training.

    Attributes:
        train: makes a model and its optimizer, and trains them.
        torch: whether it runs on `torch.optim.AdamW`, with the same bits.
        speculates: whether some bf16 parameter's speculation is good as it is in some step.
        admits_8bit: whether it runs with 8-bit moments, which amsgrad does not.
        ignores: names of shown values that need not be those of the plain run.
        settings: `EAGER` and one of these in turn; `EAGER` alone if there are none.
        limit: of the gradient norm, over which some steps are, in settings that clip.
    """

    name: str
    train: Callable[[Run], object]
    torch: bool = True
    speculates: bool = True
    admits_8bit: bool = True
    ignores: tuple[str, ...] = ()
    settings: Sequence[Setting] = tuple(OTHERS)
    limit: float | None = None

    def __str__(self) -> str:
        return self.name


def in_settings(programs: Sequence[Program]) -> pytest.MarkDecorator:
    """Give a test each program with its settings: `EAGER` and one of the others in turn; all of them if `DEEP`."""
    cases = []
    for number, program in enumerate(programs):
        others = dict.fromkeys([*program.settings, *OTHERS] if DEEP and program.settings else program.settings)
        admitted = [one for one in others if program.admits_8bit or EIGHT_BITS not in one.storage]
        chosen = admitted if DEEP else admitted[number % len(admitted) :][:1] if admitted else []
        cases.append(pytest.param(program, [EAGER, *chosen], id=program.name))
    return pytest.mark.parametrize(("program", "settings"), cases)


def in_turn(programs: Sequence[Program], settings: Sequence[Setting]) -> pytest.MarkDecorator:
    """Give a test each program with one of the settings, or with all of them if `DEEP`, without torch."""
    cases = []
    for number, program in enumerate(programs):
        chosen = settings if DEEP else [settings[number % len(settings)]]
        cases.append(pytest.param(replace(program, torch=False), chosen, id=program.name))
    return pytest.mark.parametrize(("program", "settings"), cases)


def run_in(program: Program, setting: Setting, run: Run | None = None) -> Shown:
    """Train; return what was shown, and parameters and state of each optimizer at the end."""
    run = run or Run(setting, program.limit)
    with pytest.MonkeyPatch.context() as patch:
        if not setting.pauses:
            patch.setattr(buckets, "PAUSE_STEPS", 0)
        program.train(run)
    if program.speculates and setting is EAGER:
        # Of parameters: a bucket counts as redone if another one was.
        assert sum(one.statistics.accepted for one in run.optimizers) > 0, "nothing was speculated on"
    for one in run.optimizers:
        run.see(parameters=parameters_of(one), state=state_of(one))
    return run.seen


def differences(program: Program, settings: Iterable[Setting]) -> list[str]:
    """Return where a program differs first in each setting from its plain run, and that from its run with torch."""
    plain: dict[Setting, Shown] = {}
    found = []

    def compare(setting: Setting, ignored: Iterable[str]) -> None:
        other = setting.plain
        if replace(other, looks=True) in plain:
            other = replace(other, looks=True)
        if other not in plain:
            plain[other] = run_in(program, other)
        difference = first_difference(run_in(program, setting), plain[other], ignored)
        if difference is not None:
            found.append(f"{program} in {setting}, {difference}")

    for setting in settings:
        compare(setting, program.ignores)
    if program.torch and platform.machine() == "x86_64":  # elsewhere torch's fused kernel rounds differently
        compare(TORCH, ("outcome", "gradients"))
    return found


Story = Callable[[nn.Module, Any, OffloadScheduler | None], object]
"""Training of a model with an optimizer, and a scheduler or none; returns what it has seen."""


def both(
    story: Story,
    scheduled: dict[str, Any],
    make: Callable[[], nn.Module] = mlp,
    plain: Story | None = None,
    **options: Any,
) -> OffloadScheduler:
    """Tell a story under a scheduler, which is returned, and another or the same without; all bits agree.

    Args:
        scheduled: options of the scheduler, which speculates on every gradient alone otherwise.
        make: returns the model.
        plain: the other story.
        options: of the optimizers.
    """
    model, optimizer, twin, other = twins(make, **options)
    with eager(optimizer, model, **scheduled) as scheduler:
        seen = frozen(story(model, optimizer, scheduler))
        optimizer.zero_grad()
    assert difference(seen, frozen((plain or story)(twin, other, None))) is None
    other.zero_grad()
    assert everything(model, optimizer) == everything(twin, other)
    ours, theirs = optimizer.last_outcome, other.last_outcome
    assert (ours.kind is StepKind.SKIPPED) == (theirs.kind is StepKind.SKIPPED)
    if math.isfinite(optimizer.max_grad_norm or math.inf) and ours.kind is not StepKind.SKIPPED:  # judged by the norm
        assert ours == theirs
    assert optimizer.statistics.steps == other.statistics.steps
    return scheduler


# ---- what is compared ------------------------------------------------------------------------------------------------


def frozen(value: Any) -> Any:
    """Return a value as something that can be compared bit for bit, later."""
    if isinstance(value, Tensor):
        return bits(value)
    if isinstance(value, float):
        return struct.pack("d", math.nan if math.isnan(value) else value)
    if isinstance(value, dict):
        return {key: frozen(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [frozen(inner) for inner in value]
    return value


def state_of(optimizer: Any) -> dict[int, dict[str, Any]]:
    """Return the state by position, with the master of a parameter that is its own master."""
    state = optimizer.state_dict()["state"]
    for number, parameter in enumerate(parameters_of(optimizer)):
        if state.get(number) and "master" not in state[number] and parameter.dtype.itemsize >= 4:
            state[number] = {**state[number], "master": parameter}
    return {number: entry for number, entry in state.items() if entry}


class Near:
    """A number that equals those within this share of it; NaN equals NaN."""

    def __init__(self, number: float, share: float) -> None:
        self.number, self.share = number, share

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Near) or not math.isfinite(self.number):
            return isinstance(other, Near) and frozen(self.number) == frozen(other.number)
        return abs(self.number - other.number) <= self.share * self.number

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"{self.number!r} within {self.share:.1g}"


def difference(ours: Any, theirs: Any, where: str = "") -> str | None:
    """Return where two values, as `frozen` returns them, differ first; None if they do not."""
    pairs: Iterable[tuple[Any, Any, Any]]
    if isinstance(ours, dict) and isinstance(theirs, dict) and ours.keys() == theirs.keys():
        pairs = [(key, ours[key], theirs[key]) for key in ours]
    elif isinstance(ours, list) and isinstance(theirs, list) and len(ours) == len(theirs):
        pairs = [(number, *pair) for number, pair in enumerate(zip(ours, theirs, strict=True))]
    elif ours == theirs:
        return None
    elif isinstance(ours, tuple) and isinstance(theirs, tuple) and ours[:2] == theirs[:2]:
        mine, other = (np.frombuffer(one[2], np.uint8) for one in (ours, theirs))
        element = int(np.flatnonzero(mine != other)[0]) // (len(mine) // math.prod(ours[1]))
        return f"{where}, element {element} of {ours[1]}"
    else:
        return f"{where}: {str(ours)[:80]} instead of {str(theirs)[:80]}"
    return next((found for key, *pair in pairs if (found := difference(*pair, f"{where}[{key}]"))), None)


def first_difference(ours: Shown, theirs: Shown, ignored: Iterable[str] = ()) -> str | None:
    """Return where two runs differ first, in what both have shown: which step, value and element."""
    for step, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
        for name in sorted((mine.keys() & other.keys()) - {*ignored}):
            if found := difference(mine[name], other[name], f"step {step}: {name}"):
                return found
    return None
