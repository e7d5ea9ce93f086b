"""What a scheduler counts adds up: every speculation has one fate, bytes are those that moved, times are sane."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.overlap import (
    DeferredDevice,
    ImmediateDevice,
    PlantedError,
    ThreadDevice,
    adam,
    batch,
    eager,
    loss_of,
    mlp,
    train,
)
from torch import Tensor, nn

from superadam import OffloadScheduler, SpeculativeCPUAdam
from superadam.devices import Device
from superadam.devices.flat import FlatLayout
from superadam.devices.worker import WorkerError
from superadam.offload.statistics import OverlapStatistics
from superadam.state.parameter import ParameterState
from superadam.step.transaction import Transaction
from superadam.testing import SimulatedDevice


def fates(scheduler: OffloadScheduler) -> tuple[int, int, int, int]:
    """Return buckets that waited, and parameters that were accepted, respeculated and dropped."""
    counts = scheduler.optimizer.statistics
    return scheduler.statistics.waiting_buckets, counts.accepted, counts.respeculated, counts.dropped


@given(st.floats(0, 1e6), st.floats(0, 1e6))
def test_hidden_share_is_a_share(worker: float, waited: float) -> None:
    share = OverlapStatistics(worker_seconds=worker, waited_seconds=waited).hidden_share
    assert 0.0 <= share <= 1.0
    if worker and waited == 0.0:
        assert share == 1.0


def test_hidden_share_before_any_work() -> None:
    assert OverlapStatistics().hidden_share == 0.0


# ---- of real schedulers ----------------------------------------------------------------------------------------------

DEVICES = [
    ImmediateDevice,
    ThreadDevice,
    pytest.param(lambda: SimulatedDevice(3, 0.0), id="lazy device"),
    pytest.param(lambda: SimulatedDevice(4, 0.7), id="hasty device"),
]


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> Device:
    one: Device = request.param()
    return one


def check(scheduler: OffloadScheduler) -> None:
    statistics = scheduler.statistics
    assert statistics.speculated_buckets == statistics.buckets - statistics.waiting_buckets
    counts = scheduler.optimizer.statistics
    assert counts.accepted + counts.respeculated + counts.dropped >= statistics.speculated_buckets
    assert 0.0 <= statistics.hidden_share <= 1.0


EVENTS = [
    *["plain", "plain", "clipped", "skipped", "rolled back", "zero_grad", "lr", "limit", "micro-batches", "forward"],
    *["replaced", "written"],
]


def one_step(event: str, model: nn.Module, optimizer: SpeculativeCPUAdam, scheduler: OffloadScheduler) -> None:
    optimizer.zero_grad()
    optimizer.max_grad_norm = 1e-3 if event == "clipped" else math.inf
    if event == "micro-batches":
        with scheduler.accumulate(torch.float32):
            loss_of(model, 1).backward()
        loss_of(model, 2).backward()
    else:
        (loss_of(model, 3) * (math.nan if event == "skipped" else 1.0)).backward()
    match event:
        case "rolled back":
            scheduler._catch_up()
            optimizer.zero_grad()
            optimizer.rollback()
        case "zero_grad":
            scheduler._catch_up()
            optimizer.zero_grad()
        case "forward":
            model(batch(0, torch.bfloat16))
        case "lr":
            optimizer.param_groups[0]["lr"] *= 0.9
        case "limit":
            optimizer.clip_grad_norm_(1e-3)
        case "replaced":
            scheduler._catch_up()
            for parameter in model.parameters():
                parameter.grad = torch.ones_like(parameter)
        case "written":
            scheduler._catch_up()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(0.97)
    optimizer.step()


@pytest.mark.slow
@pytest.mark.covering(1)
@pytest.mark.parametrize("bucket_numel", [1, 100, 10**6])
def test_speculation_has_the_fate_that_the_event_gives_it(bucket_numel: int, device: Device) -> None:
    model = mlp(torch.bfloat16)
    optimizer = adam(model, lr=1e-3)
    events = EVENTS + random.Random(0).choices(EVENTS, k=30)
    with eager(optimizer, model, device=device, bucket_numel=bucket_numel) as scheduler:
        one_step("plain", model, optimizer, scheduler)
        assert fates(scheduler) == (scheduler.statistics.buckets, 0, 0, 0)  # there was no state
        assert scheduler.statistics.buckets == {1: 6, 100: 2, 10**6: 1}[bucket_numel]
        for event in events + ["clipped"] * 12:
            before = fates(scheduler)
            one_step(event, model, optimizer, scheduler)
            check(scheduler)
            waiting, accepted, respeculated, dropped = (
                now - then for now, then in zip(fates(scheduler), before, strict=True)
            )
            is_sent_by_the_step = bucket_numel == 10**6
            if event in ("plain", "micro-batches", "forward") or (event == "lr" and is_sent_by_the_step):
                assert accepted > 0 == waiting == respeculated == dropped, event
            elif event == "skipped":  # after the first NaN nothing is worth speculating on
                assert dropped + waiting > 0 == respeculated == accepted, event
            elif event in ("rolled back", "zero_grad", "replaced"):
                assert dropped > 0 == waiting == respeculated == accepted, event
            elif event in ("lr", "limit", "written"):
                assert respeculated > 0 == waiting == accepted == dropped, event
            else:
                assert waiting + accepted + respeculated > 0 == dropped, event
        for _ in range(8):  # in which the policy forgets
            one_step("plain", model, optimizer, scheduler)
        before = fates(scheduler)
        one_step("plain", model, optimizer, scheduler)
        assert fates(scheduler)[0] == before[0] < scheduler.statistics.buckets
        assert fates(scheduler)[1] > before[1]


@pytest.mark.parametrize("device_class", [ImmediateDevice, ThreadDevice])
def test_every_bucket_of_own_masters_waits(device_class: type[Device]) -> None:
    """They are updated in one pass with the verdict."""
    model = mlp()
    optimizer = adam(model, lr=1e-3)
    with eager(optimizer, model, device=device_class()) as scheduler:
        train(model, optimizer, range(3))
        check(scheduler)
    assert scheduler.statistics.waiting_buckets == scheduler.statistics.buckets == 3 * 6


def test_there_are_no_buckets_where_no_core_is_idle() -> None:
    model = mlp(torch.bfloat16)
    optimizer = adam(model, lr=1e-3)
    with eager(optimizer, model, device=DeferredDevice()) as scheduler:
        for event in EVENTS:
            one_step(event, model, optimizer, scheduler)
            check(scheduler)
    assert scheduler.statistics.buckets == 0


def test_after_the_first_nan_every_bucket_waits(device: Device) -> None:
    model = mlp(torch.bfloat16)
    optimizer = adam(model, max_grad_norm=1e-3)
    with eager(optimizer, model, device=device) as scheduler:
        for seed in range(13):
            loss_of(model, seed).backward()
            optimizer.step()
            optimizer.zero_grad()
            check(scheduler)
        before = scheduler.statistics.waiting_buckets
        (loss_of(model, 20) * math.nan).backward()
        optimizer.step()
        check(scheduler)
        assert scheduler.statistics.waiting_buckets - before == 6


@pytest.mark.parametrize("at", [1, 2, 4])
def test_only_speculation_has_a_fate_after_the_worker_failed(
    at: int, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = mlp(torch.bfloat16)
    optimizer = adam(model, max_grad_norm=math.inf)
    speculate, calls = Transaction.speculate, []

    def stumble(*arguments: object, **options: object) -> None:
        calls.append(1)
        if len(calls) == at:
            raise PlantedError("planted")
        speculate(*arguments, **options)  # type: ignore[arg-type]

    def step() -> None:
        loss_of(model, 0).backward()
        optimizer.step()
        optimizer.zero_grad()

    with eager(optimizer, model, device=device) as scheduler:
        step()
        step()
        with monkeypatch.context() as patch:
            patch.setattr(Transaction, "speculate", stumble)
            with pytest.raises(WorkerError):
                step()
        optimizer.step()  # without the worker
        optimizer.zero_grad()
        dropped = optimizer.statistics.dropped
        assert dropped == at - 1  # the others were never speculated on
        step()
        assert fates(scheduler) == (6, 12, 0, dropped)


def test_times_are_those_of_the_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    model = mlp()
    optimizer = adam(model, max_grad_norm=math.inf)
    speculate = Transaction.speculate

    def slow(*arguments: object, **options: object) -> None:
        time.sleep(0.01)
        speculate(*arguments, **options)  # type: ignore[arg-type]

    begin = time.perf_counter()
    with eager(optimizer, model, device=ThreadDevice()) as scheduler:
        statistics = scheduler.statistics
        with monkeypatch.context() as patch:
            patch.setattr(Transaction, "speculate", slow)
            loss_of(model, 0).backward()
            optimizer.step()
        elapsed = time.perf_counter() - begin
        assert 0.0 < statistics.waited_seconds < elapsed
        assert 0.06 <= statistics.worker_seconds < elapsed
        optimizer.zero_grad()
        loss_of(model, 1).backward()
        optimizer.step()
    assert statistics.worker_seconds < time.perf_counter() - begin


# ---- bytes -----------------------------------------------------------------------------------------------------------


def mixed() -> nn.Module:
    model = mlp()
    model[0].to(torch.bfloat16)
    return model


def mixed_loss(model: nn.Module, seed: int) -> Tensor:
    hidden = model[0](batch(seed, torch.bfloat16)).float()
    return 30 * (model[1:](hidden) - 1).square().mean()


def flat_bytes(parameters: list[nn.Parameter], dtype: torch.dtype | None = None) -> int:
    """Return what parameters, or gradients of `dtype`, take in one flat buffer for each dtype."""
    by_dtype: dict[torch.dtype, list[ParameterState]] = {}
    for row, parameter in enumerate(parameters):
        by_dtype.setdefault(dtype or parameter.dtype, []).append(ParameterState(parameter, row, ""))
    return sum(FlatLayout(states).numel * one.itemsize for one, states in by_dtype.items())


@pytest.mark.parametrize("link", [None, torch.float32], ids=str)
@pytest.mark.parametrize("bucket_numel", [1, 10**6])
def test_bytes_are_those_of_flat_buffers(bucket_numel: int, link: torch.dtype | None) -> None:
    """Whether values were speculated or made with the verdict, each parameter comes up once in a step."""
    model = mixed()
    optimizer = adam(model, max_grad_norm=math.inf, lr=1e-3)
    device = SimulatedDevice(0, 0.5)
    with eager(optimizer, model, device=device, bucket_numel=bucket_numel, transfer_dtype=link or "auto") as scheduler:
        statistics = scheduler.statistics
        parameters = list(model.parameters())
        buckets = [parameters] if bucket_numel > 1 else [[parameter] for parameter in parameters]
        down = sum(flat_bytes(bucket, link) for bucket in buckets)
        up = sum(flat_bytes(bucket) for bucket in buckets)

        def step(seed: int, factor: float = 1.0) -> tuple[int, int]:
            before = statistics.downloaded_bytes, statistics.uploaded_bytes
            (mixed_loss(model, seed) * factor).backward()
            optimizer.step()
            optimizer.zero_grad()
            return statistics.downloaded_bytes - before[0], statistics.uploaded_bytes - before[1]

        for seed in range(4):
            assert step(seed) == (down, flat_bytes(parameters) if seed == 0 else up)
        optimizer.max_grad_norm = 1e-3
        moved = step(4)
        assert moved[0] == down
        patches = 10 * optimizer.statistics.patched_elements  # values, and where they go
        assert up <= moved[1] <= flat_bytes(parameters) + up + patches
        optimizer.max_grad_norm = math.inf
        assert step(5, math.nan)[0] == down


@pytest.mark.parametrize("make", [ImmediateDevice, ThreadDevice])
def test_nothing_moves_in_host_memory(make: Callable[[], Device]) -> None:
    model = mixed()
    optimizer = adam(model)
    with eager(optimizer, model, device=make(), transfer_dtype=torch.float32) as scheduler:
        for step in range(3):
            mixed_loss(model, step).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert scheduler.statistics.downloaded_bytes == scheduler.statistics.uploaded_bytes == 0
