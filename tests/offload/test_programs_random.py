"""What programs do around a step, in sequences drawn at random: they end in the bits of the plain run.

Each action is tried alone in test_programs.py; what remains is what they do to one another.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, note, settings
from hypothesis import strategies as st
from offload.test_programs import (
    ACTIONS,
    EVERYTHING,
    LIMIT,
    Net,
    Program,
    Run,
    adamw,
    backward,
    first_difference,
    record,
)
from support.overlap import DeferredDevice, ImmediateDevice, PlantedError, ThreadDevice

from superadam import OffloadScheduler, SpeculativeCPUAdamW
from superadam.devices import Device
from superadam.offload import accumulation as micro_batches
from superadam.testing import SimulatedDevice

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore:Using backward.* with create_graph=True"),
    pytest.mark.filterwarnings("ignore:Detected call of .lr_scheduler.step"),
    pytest.mark.usefixtures("one_torch_thread"),
]

ERRORS = (AttributeError, IndexError, KeyError, RuntimeError, StopIteration, TypeError, ValueError, ZeroDivisionError)
"""What an action may raise where another one has taken away what it needs; both runs must raise the same."""


@dataclass(frozen=True)
class Iteration:
    """One iteration of a drawn program.

    Attributes:
        zeroes: how gradients are reset before it.
        micro_batches: the layers that each micro-batch uses.
        is_hinted: whether all but the last are within `accumulate()`.
        fails: whether the last backward fails half way; it is not made again.
        actions: what is done between backward and step.
        steps: how often `step()` is called.
        looks: whether state and gradients are read afterwards.
    """

    zeroes: str
    micro_batches: tuple[tuple[int, ...], ...]
    is_hinted: bool
    fails: bool
    actions: tuple[Program, ...]
    steps: int
    looks: bool

    def __repr__(self) -> str:
        actions = [str(one) for one in self.actions]
        fails = " fails" if self.fails else ""
        hint = " hinted" if self.is_hinted else ""
        return (
            f"<zero_grad {self.zeroes}; {list(self.micro_batches)}{hint}{fails}; {actions}; "
            f"step x{self.steps}{' looks' if self.looks else ''}>"
        )


def usual(*values: Any, or_else: tuple[Any, ...]) -> st.SearchStrategy[Any]:
    """Draw the usual value half of the time."""
    return st.one_of(st.sampled_from(values), st.sampled_from(or_else))


USES = usual((0, 1), or_else=((0,), (1,), (), (0, 0)))

ITERATIONS = st.builds(
    Iteration,
    zeroes=usual("none", or_else=("zeros", "by the model", "never")),
    micro_batches=st.lists(USES, min_size=1, max_size=3).map(tuple),
    is_hinted=st.booleans(),
    fails=usual(False, False, or_else=(False, True)),
    actions=st.lists(st.sampled_from([one for one in ACTIONS if one.name != "scheduler_closed"]), max_size=4).map(
        tuple
    ),
    steps=usual(1, or_else=(0, 2)),
    looks=st.booleans(),
)

DEVICES: dict[str, Callable[[int], Device]] = {
    "immediate": lambda seed: ImmediateDevice(),
    "thread": lambda seed: ThreadDevice(),
    "deferred": lambda seed: DeferredDevice(),
    "simulated": SimulatedDevice,
}


def iterate(iteration: Iteration, model: Any, optimizer: Any, step: int, scheduler: Any, runs: dict[str, Run]) -> Any:
    """Make one iteration; return what was read and raised."""
    match iteration.zeroes:
        case "none":
            optimizer.zero_grad()
        case "zeros":
            optimizer.zero_grad(set_to_none=False)
        case "by the model":
            model.zero_grad()
    last = len(iteration.micro_batches) - 1
    for micro, model.uses in enumerate(iteration.micro_batches):
        is_hinted = iteration.is_hinted and micro < last and scheduler is not None
        model.fails_after = 1 if iteration.fails and micro == last else None
        with scheduler.accumulate() if is_hinted else contextlib.nullcontext(), contextlib.suppress(PlantedError):
            backward(model, step, micro)
    model.uses, model.fails_after = (0, 1), None
    values: list[Any] = []
    for action in iteration.actions:
        run = runs.setdefault(action.name, Run(scheduler))
        try:
            values.append(action.body(model, optimizer, step, run))
        except ERRORS as error:
            values.append(type(error).__name__)
    for _ in range(iteration.steps):
        optimizer.step()
    return values


def go(program: list[Iteration], model: Any, optimizer: SpeculativeCPUAdamW, scheduler: Any) -> list[dict[str, Any]]:
    """Run a program; return a record of every iteration."""
    runs: dict[str, Run] = {}
    records = []
    for step, iteration in enumerate(program):
        value = iterate(iteration, model, optimizer, step, scheduler, runs)
        looks = iteration.looks or iteration is program[-1]
        records.append(record(model, optimizer, value, looks=looks))
    return records


@pytest.mark.slow
@settings(max_examples=2 * settings().max_examples)
@given(
    program=st.lists(ITERATIONS, min_size=4, max_size=7),
    dtype=st.sampled_from([torch.bfloat16, torch.bfloat16, torch.float32]),
    device=st.sampled_from(sorted(DEVICES)),
    seed=st.integers(0, 2**16),
    limit=st.sampled_from([None, LIMIT]),
    bucket_numel=st.sampled_from([1, 3000, 10**6]),
    gpu_buckets=st.sampled_from([0, 0, 1]),
    pauses=st.booleans(),
)
def test_any_program_has_the_bits_of_the_plain_run(
    program: list[Iteration],
    dtype: torch.dtype,
    device: str,
    seed: int,
    limit: float | None,
    bucket_numel: int,
    gpu_buckets: int,
    pauses: bool,
) -> None:
    plain = Net().to(dtype)
    has_outcome = all(action.outcome for iteration in program for action in iteration.actions)
    theirs = go(program, plain, adamw(plain, limit), None)
    model = Net().to(dtype)
    optimizer = adamw(model, limit)
    options: dict[str, Any] = {"gpu_buckets": gpu_buckets} if device == "simulated" else {}
    made = DEVICES[device](seed)
    with (
        pytest.MonkeyPatch.context() as patches,
        OffloadScheduler(optimizer, model, device=made, bucket_numel=bucket_numel, **options) as scheduler,
    ):
        if not pauses:
            patches.setattr(micro_batches, "PAUSE_STEPS", 0)
        ours = go(program, model, optimizer, scheduler)
        note(str(scheduler.statistics))
    found = first_difference(ours, theirs, [key for key in EVERYTHING if has_outcome or key != "outcome"])
    assert found is None
