"""Memory runs out anywhere in `speculate()` and `step()`, and the program goes on: the bits are the plain run's.

Also with other hyper-parameters, where it ran out while state was created.
"""

import random
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import pytest
import torch
from support.deep import TIMES
from support.visible import bits, give_gradients, parameter, state_bits
from torch import nn

from superadam import SpeculativeCPUAdam, SpeculativeCPUAdamW, StepKind
from superadam.devices import PlainDevice
from superadam.state.parameter import ParameterState
from superadam.state.table import CoefficientTable, ParameterTable
from superadam.step import transaction

ALLOCATING = (
    (PlainDevice, "host_empty"),
    (ParameterState, "zeros"),
    (ParameterState, "host_copy"),
    (ParameterTable, "job"),
    (ParameterTable, "prepared_count"),
    (CoefficientTable, "array"),
    (transaction, "empty_lists"),
)
FORMATS = ({}, {"amsgrad": True}, {"moments": "bf16"}, {"moments": "8bit", "master": "24bit"})


class Memory:
    """Fails at an allocation that is drawn for each call; `left` counts down to it."""

    def __init__(self, patch: pytest.MonkeyPatch, allocating: Iterable[tuple[Any, str]] = ALLOCATING) -> None:
        self.left: int | None = None
        for owner, name in allocating:
            patch.setattr(owner, name, self.failing(getattr(owner, name)))

    def failing(self, ordinary: Any) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            if self.left is not None:
                self.left -= 1
                if self.left < 0:
                    self.left = None
                    raise MemoryError("planted")
            return ordinary(*arguments, **options)

        return call

    def during(self, call: Any, left: int | None) -> None:
        """Call, and pass over the planted failure, if it comes to that."""
        self.left = left
        with suppress(MemoryError):
            call()
        self.left = None


def seen(seed: int, memory: Memory | None) -> list[object]:
    """Return what a program sees of each step, and its state; without `memory` nothing speculates and nothing fails."""
    draw, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    dtypes = [draw.choice([torch.bfloat16, torch.float32, torch.float16]) for _ in range(4)]
    parameters = [nn.Parameter(torch.linspace(-1, 1, 64 * (1 + row)).to(dtype)) for row, dtype in enumerate(dtypes)]
    limit = draw.choice([None, 1.0, 0.1])
    optimizer = SpeculativeCPUAdamW(parameters, lr=0.05, max_grad_norm=limit, **draw.choice(FORMATS))
    steps: list[object] = []
    for _ in range(6):
        for one in parameters:
            gradient = draw.choice([0.01, 1.0]) * torch.randn(one.shape, generator=generator)
            one.grad = gradient.to(one.dtype) if draw.random() < 0.8 else None
        failures = [draw.choice([None, 0, 1, 2, 3, 5, 8]) for _ in range(draw.randint(0, 2))]
        for failure in failures if memory is not None else ():
            memory.during(optimizer.speculate, failure)
        chosen = draw.choice(parameters)
        action = draw.choice(["nothing", "drop", "scale", "replace", "clip", "look"])
        if action == "drop":
            chosen.grad = None
        elif action == "scale" and chosen.grad is not None:
            chosen.grad.mul_(0.5)
        elif action == "replace":
            chosen.grad = torch.full_like(chosen, 0.25)
        elif action == "clip":
            torch.nn.utils.clip_grad_norm_(parameters, 0.5)
        elif action == "look":
            optimizer.state_dict()
        made, failure = optimizer.statistics.steps, draw.choice([None, 0, 1, 2, 4, 6])
        if memory is not None:
            memory.during(optimizer.step, failure)
        if optimizer.statistics.steps == made:  # as the docstring says: call it again
            optimizer.step()
        is_skipped = optimizer.last_outcome is not None and optimizer.last_outcome.kind is StepKind.SKIPPED
        steps.append((is_skipped, [bits(one) for one in parameters]))
        optimizer.zero_grad()
    return [*steps, state_bits(optimizer)]


@pytest.mark.slow
def test_where_memory_runs_out_the_bits_are_those_of_the_plain_run(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = Memory(monkeypatch)
    assert [seed for seed in range(75 * TIMES) if seen(seed, memory) != seen(seed, None)] == []


@pytest.mark.parametrize("failing", range(7))
def test_state_that_was_created_in_part_serves_the_next_step(failing: int, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, plain = (
        SpeculativeCPUAdam([parameter(3, 5, dtype=torch.bfloat16), parameter(4, dtype=torch.bfloat16)], amsgrad=amsgrad)
        for amsgrad in (True, False)
    )
    memory = Memory(monkeypatch, [(ParameterState, "zeros"), (ParameterTable, "prepared_count")])
    for one in (ours, plain):
        give_gradients(one, 1)
    memory.during(ours.step, failing)
    assert ours.state_dict()["state"] == {}
    ours.param_groups[0]["amsgrad"] = False
    for one in (ours, plain):
        one.step()
    ours.param_groups[0]["amsgrad"] = True
    memory.during(ours.step, failing % 3)
    assert state_bits(ours) == state_bits(plain)
