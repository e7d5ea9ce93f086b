"""Programs that train in many settings: each ends in the bits of its run without a scheduler.

A program is whatever a test file makes of one; it shows what it has at hand as a list of values, step by step. Here is
where and how they train, and where two runs of one differ first.
"""

from __future__ import annotations

import functools
import math
import os
import struct
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np
import pytest
import torch
from support.overlap import ImmediateDevice, ThreadDevice
from support.visible import bits, parameters_of
from torch import Tensor, nn

from superadam import OffloadScheduler
from superadam.devices import Device
from superadam.testing import SimulatedDevice

DEEP = os.environ.get("SUPERADAM_DEEP") == "1"


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
        looks: whether state and gradients are read after every step, which commits it; else after the last only.
        pauses: whether nothing is taken for some steps after one whose gradients were edited, as usual.
    """

    name: str
    dtype: torch.dtype
    device: Callable[[], Device] | None = None
    bucket_numel: int = 1
    gpu_buckets: int | None = None
    clips: bool = False
    looks: bool = False
    pauses: bool = False
    storage: Storage = ()

    def __str__(self) -> str:
        return self.name

    @property
    def plain(self) -> Setting:
        """The same without a scheduler."""
        return Setting("plain", self.dtype, clips=self.clips, looks=True, storage=self.storage)

    def scheduled(self, optimizer: Any, model: nn.Module) -> AbstractContextManager[OffloadScheduler | None]:
        """Return a scheduler, if there is to be one."""
        if self.device is None:
            return nullcontext()
        options = {} if self.gpu_buckets is None else {"gpu_buckets": self.gpu_buckets}
        return OffloadScheduler(optimizer, model, device=self.device(), bucket_numel=self.bucket_numel, **options)


EAGER = Setting("bf16-immediate", torch.bfloat16, ImmediateDevice, looks=True)
"""Speculates on every gradient the moment that it is complete."""

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
]


class Named(Protocol):
    """A program, as far as it matters here."""

    @property
    def admits_8bit(self) -> bool:
        """Whether it trains with 8-bit moments, which amsgrad does not."""


Program = TypeVar("Program", bound=Named)


def in_settings(programs: Sequence[Program]) -> pytest.MarkDecorator:
    """Give a test each program in `EAGER` and in one of the others in turn; in all of them if `DEEP`."""
    cases = []
    for number, program in enumerate(programs):
        others = [one for one in OTHERS if program.admits_8bit or EIGHT_BITS not in one.storage]
        for setting in [EAGER, *(others if DEEP else [others[number % len(others)]])]:
            cases.append(pytest.param(program, setting, id=f"{program}-{setting}"))
    return pytest.mark.parametrize(("program", "setting"), cases)


# ---- what is compared ------------------------------------------------------------------------------------------------

Shown = list[dict[str, Any]]
"""What a program shows: after each step, values by name."""


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


def first_difference(ours: Shown, theirs: Shown, names: Iterable[str] | None = None) -> str | None:
    """Return where two runs differ first, in what both have shown: which step, value and element."""
    for step, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
        for name in mine.keys() & other.keys() if names is None else mine.keys() & other.keys() & {*names}:
            if found := difference(mine[name], other[name], f"step {step}: {name}"):
                return found
    return None


Run = Callable[[Program, Setting], Shown]


@functools.cache
def plain_run(run: Run[Program], program: Program, plain: Setting) -> Shown:
    """Return what a program shows without a scheduler."""
    return run(program, plain)


def differs(run: Run[Program], program: Program, setting: Setting, names: Iterable[str] | None = None) -> str | None:
    """Return how a program differs in this setting from its plain run; None if it does not.

    Args:
        run: trains, and returns what was shown.
        names: of the values that are compared; None for all.
    """
    found = first_difference(run(program, setting), plain_run(run, program, setting.plain), names)
    return None if found is None else f"{program} in {setting}, {found}"
