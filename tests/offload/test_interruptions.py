"""Ctrl-C at random moments: a step is made wholly or not at all, nothing hangs, and training goes on as before."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from types import FrameType
from typing import Any

import pytest
import torch
from overlap import DeferredDevice, ImmediateDevice, ThreadDevice, adam, batch, mlp
from torch import Tensor
from visible import state_bits

from superadam import OffloadScheduler, SpeculativeCPUAdam
from superadam.devices.simulated import SimulatedDevice

INTERRUPTIONS = 1000 if os.environ.get("SUPERADAM_DEEP") == "1" else 60
STEPS = 40
LATEST_SECONDS = 0.003
"""After the beginning of an iteration, which takes about as long; decides where interruptions fall, and no result."""

SCHEDULED = {
    "thread": ThreadDevice,
    "deferred": DeferredDevice,
    "immediate": ImmediateDevice,
    "simulated": lambda: SimulatedDevice(5),
}


@pytest.fixture(autouse=True)
def interruptions() -> Iterator[None]:
    """Let an alarm be what Ctrl-C is."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before, threads = signal.signal(signal.SIGALRM, interrupt), torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    signal.signal(signal.SIGALRM, before)


class Training:
    """Steps that may be tried again until they are made."""

    def __init__(self, dtype: torch.dtype, how: str) -> None:
        self._own = ["master"] if dtype == torch.float32 else []  # which has masters on the simulated device only
        self.model = mlp(dtype, width=16, layers=4)
        self.optimizer: SpeculativeCPUAdam = adam(self.model)
        self._open = ExitStack()
        if how in SCHEDULED:
            device = SCHEDULED[how]()
            self._open.enter_context(OffloadScheduler(self.optimizer, self.model, device=device, bucket_numel=300))

    def loss(self, number: int) -> Tensor:
        dtype = next(self.model.parameters()).dtype
        loss: Tensor = 30 * (self.model(batch(number, dtype, 16)) - 1).float().square().mean()
        return loss

    def step(self, number: int) -> None:
        self.optimizer.zero_grad()
        self.loss(number).backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()

    def seen(self) -> dict[str, Any]:
        self.optimizer.zero_grad()
        return state_bits(self.optimizer, without=self._own)

    def close(self) -> None:
        self._open.close()


def is_interrupted(training: Training, number: int, seconds: float) -> bool:
    """Try to make a step; return whether it was interrupted."""
    try:
        try:
            signal.setitimer(signal.ITIMER_REAL, seconds)
            training.step(number)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    except KeyboardInterrupt:
        return True
    return False


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # an alarm may meet a finalizer
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("how", ["plain", *SCHEDULED])
def test_a_step_is_made_wholly_or_not_at_all(how: str, dtype: torch.dtype) -> None:
    plain = Training(dtype, "plain")
    expected = [plain.seen()]
    for number in range(STEPS):
        plain.step(number)
        expected.append(plain.seen())
    chance, count, number = random.Random(0), 0, STEPS
    training = plain
    while count < INTERRUPTIONS:
        if number == STEPS:
            training.close()
            training, number = Training(dtype, how), 0
        interrupted = is_interrupted(training, number, chance.uniform(1e-5, LATEST_SECONDS))
        count += interrupted
        seen = training.seen()
        assert torch.is_grad_enabled()
        number += seen == expected[number + 1]
        assert seen == expected[number], (count, number, interrupted)
    training.close()


def test_guard_of_the_optimizers_methods_puts_the_grad_mode_back() -> None:
    """Entered by one call into C, which no signal divides."""
    assert torch.is_grad_enabled()
    with torch._C._InferenceMode(False):
        torch.set_grad_enabled(False)
    assert torch.is_grad_enabled()
    with torch.no_grad(), torch._C._InferenceMode(False):
        assert torch.is_grad_enabled()
