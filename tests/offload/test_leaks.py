"""Long runs and many schedulers: neither objects nor memory grow in number, and no thread stays."""

import contextlib
import gc
import math
import os
import threading
import weakref
from collections import Counter, deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.deep import DEEP, TIMES
from support.overlap import ThreadDevice, adam, mlp
from torch import nn

from superadam import OffloadScheduler, SpeculativeCPUAdam
from superadam.devices import Device, PlainDevice
from superadam.kernels.hyperparameters import beta_power
from superadam.offload import trace
from superadam.testing import SimulatedDevice

STEPS, WARM_UP = (20_000, 2_000) if DEEP else (80, 24)
CREATED = 15 * TIMES
SLACK_BYTES = 4_000_000
"""By which the memory of the process may differ between two moments: the allocator keeps some."""

INPUTS = torch.randn(4, 4, generator=torch.Generator().manual_seed(1)).bfloat16()

DEVICES: dict[str, Callable[[], Device] | None] = {
    "no scheduler": None,
    "host": PlainDevice,
    "thread": ThreadDevice,
    "simulated": lambda: SimulatedDevice(0, eagerness=0.9),
    "simulated, kept": lambda: SimulatedDevice(1, eagerness=0.9),
}
"""The simulated ones are so eager that copies do not pile up where nothing waits for them."""


@pytest.fixture(autouse=True, scope="module")
def _count_only_what_is_made_here() -> None:
    """What other tests have left takes seconds to go through."""
    gc.freeze()


def scheduler_for(device: str, optimizer: SpeculativeCPUAdam, model: nn.Module) -> Any:
    make, kept = DEVICES[device], int(device.endswith("kept"))
    if make is None:
        return contextlib.nullcontext()
    return OffloadScheduler(optimizer, model, bucket_numel=16, device=make(), gpu_buckets=kept)


def census() -> Counter[str]:
    """Count objects by type, and what containers hold; caches of scalars, which take long to fill, are emptied."""
    beta_power.cache_clear()
    gc.collect()
    gc.collect()  # what finalizers of the first one have let go
    count: Counter[str] = Counter()
    for one in gc.get_objects():
        count[type(one).__qualname__] += 1
        if type(one) in (list, dict, set, deque):
            count[f"in a {type(one).__qualname__}"] += len(one)
    return count


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def backward(model: nn.Module) -> None:
    (30 * (model(INPUTS) - 1).float().square().mean()).backward()


def ordinary(model: nn.Module, optimizer: SpeculativeCPUAdam, _: Any, before_step: Callable[[], object] = bool) -> None:
    backward(model)
    before_step()
    optimizer.step()
    optimizer.zero_grad()


def one_of_each(model: nn.Module, optimizer: SpeculativeCPUAdam, scheduler: OffloadScheduler | None) -> None:
    """Make a step of each kind: micro-batches, clipped, skipped, dropped, edited, read and rolled back ones."""
    for dtype in (None, torch.float32):
        with contextlib.nullcontext() if scheduler is None else scheduler.accumulate(dtype):
            backward(model)
        ordinary(model, optimizer, scheduler)
    for before_step in (
        lambda: torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1),
        lambda: optimizer.clip_grad_norm_(0.1),
        lambda: next(model.parameters()).grad[0, 0].fill_(math.inf),
        optimizer.zero_grad,
        lambda: [optimizer.step(), optimizer.rollback()],
        lambda: [optimizer.step(), optimizer.zero_grad(set_to_none=False), backward(model)],
    ):
        ordinary(model, optimizer, scheduler, before_step)
    if scheduler is not None:
        scheduler.synchronize()


def without_steps(model: nn.Module, optimizer: SpeculativeCPUAdam, scheduler: OffloadScheduler | None) -> None:
    """Compute gradients that nothing is made of."""
    backward(model)
    optimizer.zero_grad()


def check_growth(work: Callable[[], object], warm_up: int, count: int, settle: Callable[[], object] = bool) -> None:
    """Check that calls from `warm_up` to `count` leave less than an object each, and no memory of the process.

    What leaks leaks again: memory that grew only the first or second time is an arena that the allocator gave a thread.
    """
    for _ in range(warm_up):
        work()
    settle()
    grown_bytes = []
    while not grown_bytes or (grown_bytes[-1] > SLACK_BYTES and len(grown_bytes) < 3):
        before, bytes_before = census(), resident_bytes()
        for _ in range(count - warm_up):
            work()
        settle()
        after = census()
        grown_bytes.append(resident_bytes() - bytes_before)
        assert after.total() - before.total() < 0.8 * (count - warm_up), (after - before).most_common(9)
    assert grown_bytes[-1] <= SLACK_BYTES, grown_bytes


@pytest.mark.slow
@pytest.mark.covering(1)
@pytest.mark.parametrize("make", [ordinary, one_of_each, without_steps])
@pytest.mark.parametrize("device", DEVICES)
def test_long_runs_do_not_grow(device, make, monkeypatch):
    monkeypatch.setattr(trace, "SPANS_KEPT", 20)
    model = mlp(torch.bfloat16, width=4, layers=2)
    optimizer = adam(model, max_grad_norm=None if make is without_steps else 20.0)
    warm_up, count = (WARM_UP // 8, STEPS // 8) if make is one_of_each else (WARM_UP, STEPS)
    with scheduler_for(device, optimizer, model) as scheduler:

        def settle() -> None:
            """Let the worker come to an end, and the next bucket forget those that are gone."""
            for _ in range(2):
                if scheduler is not None:
                    scheduler.synchronize()
                ordinary(model, optimizer, scheduler)
            if scheduler is not None:
                scheduler.synchronize()

        settle()
        check_growth(lambda: make(model, optimizer, scheduler), warm_up, count, settle)


@pytest.mark.slow
@pytest.mark.covering(1)
@pytest.mark.parametrize("stays", [False, True], ids=["with their optimizers", "of one optimizer"])
@pytest.mark.parametrize("device", DEVICES)
def test_schedulers_go(device: str, stays: bool) -> None:
    def make() -> tuple[nn.Module, SpeculativeCPUAdam]:
        model = mlp(torch.bfloat16, width=4, layers=2)
        return model, adam(model)

    threads, kept = {*threading.enumerate()}, make()

    def train() -> None:
        model, optimizer = kept if stays else make()
        with scheduler_for(device, optimizer, model) as scheduler:
            for _ in range(2):
                ordinary(model, optimizer, scheduler)

    check_growth(train, CREATED // 5, CREATED)
    assert {*threading.enumerate()} <= threads


@pytest.mark.parametrize("device", [device for device, make in DEVICES.items() if make is not None])
def test_an_optimizer_keeps_nothing_of_a_scheduler_that_was_closed(device: str) -> None:
    """Its buffers, and a program's own device, which may have pinned memory, before the optimizer is used again."""
    model = mlp(torch.bfloat16, 4, 2)
    optimizer = adam(model)
    with scheduler_for(device, optimizer, model) as scheduler:
        for _ in range(2):
            ordinary(model, optimizer, scheduler)
    references = [weakref.ref(scheduler._transfers), weakref.ref(scheduler._device)]
    del scheduler
    gc.collect()
    assert [reference() for reference in references] == [None, None]


@pytest.mark.parametrize("device", [device for device, make in DEVICES.items() if make is not None])
@pytest.mark.parametrize("steps", [0, 3])
def test_an_optimizer_is_freed_at_once_where_its_scheduler_was_closed(device: str, steps: int) -> None:
    """As one of torch is, with all of its state: Python's garbage collector counts objects, not their memory."""
    model = mlp(torch.bfloat16, 4, 2)
    optimizer = adam(model)
    with scheduler_for(device, optimizer, model) as scheduler:
        for _ in range(steps):
            one_of_each(model, optimizer, scheduler)
        backward(model)
    references = [weakref.ref(optimizer), weakref.ref(scheduler)]
    gc.collect()
    gc.disable()
    try:
        del optimizer, scheduler
        assert [reference() for reference in references] == [None, None]
    finally:
        gc.enable()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("steps", [0, 3])
def test_an_optimizer_that_is_dropped_with_an_open_scheduler_is_freed(device: str, steps: int) -> None:
    """As by a framework that makes another one; the gradient that was taken last stays readable."""
    model, threads = mlp(torch.bfloat16, 4, 2), {*threading.enumerate()}
    optimizer = adam(model)
    scheduler = scheduler_for(device, optimizer, model).__enter__()
    for _ in range(steps):
        optimizer.zero_grad()
        backward(model)
        optimizer.step()
    backward(model)
    expected = [one.grad.clone() for one in model.parameters()]
    reference = weakref.ref(optimizer)
    del optimizer, scheduler
    gc.collect()
    assert reference() is None
    assert {*threading.enumerate()} <= threads
    assert all(torch.equal(one.grad, before) for one, before in zip(model.parameters(), expected, strict=True))
