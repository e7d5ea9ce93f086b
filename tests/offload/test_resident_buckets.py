"""Buckets that stay on the device: the bits of the synchronous run, whatever stays, and whatever users do meanwhile."""

import copy
import math
import time
from unittest.mock import Mock

import pytest
import torch
from support import overlap
from support.overlap import adam, devices_in_turn, loss_of, mlp, overlapped, slow_down, train
from support.programs import both
from torch import Tensor, nn

from superadam import OffloadScheduler, SpeculativeCPUAdam
from superadam.devices import Device, Stream
from superadam.state.resident import ResidentStates
from superadam.step.transaction import Transaction
from superadam.testing import SimulatedDevice

pytestmark = pytest.mark.timeout(240)  # a hang fails with the stack of every thread

ALL = 10**9
device = devices_in_turn("device", overlap.KeepingDevice, lambda: overlap.EagerSimulatedDevice(1, 1.0))


def resident(scheduler: OffloadScheduler) -> int:
    """Return how many parameters have their state on the device."""
    assert isinstance(scheduler._resident, ResidentStates)
    return len(scheduler._resident._arrays)


@pytest.mark.parametrize(("gpu_buckets", "count"), [(1, 2), (ALL, 6)])
def test_reading_state_brings_it_home_and_the_next_step_takes_it_back(gpu_buckets, count, device):
    with overlapped(steps=2, bucket_numel=70, gpu_buckets=gpu_buckets, device=device) as (model, optimizer, scheduler):
        for is_read in (True, False):
            loss_of(model, 2).backward()
            assert resident(scheduler) == count
            if is_read:
                assert optimizer.state
                assert resident(scheduler) == 0
            optimizer.step()
            optimizer.zero_grad()
        held = optimizer.state
        loss_of(model, 2).backward()
        optimizer.step()
        assert {int(entry["step"]) for entry in held.values()} == {5}
    assert not getattr(device, "has_memory_in_use", False)


@pytest.mark.parametrize("is_placed", [False, True])
def test_a_write_that_leaves_no_hint_counts_after_state_came_home(device: Device, is_placed: bool) -> None:
    options = {"bucket_numel": 70, "gpu_buckets": ALL, "device": device}
    with overlapped(torch.bfloat16, steps=2, **options) as (model, optimizer, scheduler):
        optimizer.param_groups[0] |= {"amsgrad": not is_placed, "lr": 0.01}
        train(model, optimizer, range(2, 3))
        if is_placed:
            scheduler.place(gpu_buckets=0)
        weight = next(model.parameters())
        weight.data.fill_(8.0)
        train(model, optimizer, range(3, 4))
        assert (optimizer.state[weight]["master"] - 8.0).abs().max() < 0.5


@pytest.mark.parametrize("gpu_buckets", [0, 1, ALL])
def test_a_driver_without_memory_for_events_makes_no_step_twice(gpu_buckets, monkeypatch):
    device, full = SimulatedDevice(1, 0.5), Mock(side_effect=RuntimeError("CUDA error: out of memory"))

    def story(model: nn.Module, optimizer: SpeculativeCPUAdam, scheduler: OffloadScheduler | None) -> None:
        train(model, optimizer, range(2))
        if scheduler is not None:
            monkeypatch.setattr(device.accelerator, "Event", full)
        train(model, optimizer, range(2, 5))

    both(story, {"bucket_numel": 70, "gpu_buckets": gpu_buckets, "device": device}, lambda: mlp(torch.bfloat16))
    monkeypatch.setattr(device.accelerator, "Event", lambda **_: {}["another error"])
    with pytest.raises(KeyError):
        device.record(Stream.CURRENT)


def test_first_kept_step_that_is_dropped_leaves_no_state(device: Device) -> None:
    options = {"bucket_numel": 70, "gpu_buckets": ALL, "device": device}
    with overlapped(torch.bfloat16, **options) as (model, optimizer, scheduler):
        (loss_of(model, 0) * math.nan).backward()
        optimizer.step()
        for ending in ("nan", "zero_grad", "rollback"):
            (loss_of(model, 1) * (math.nan if ending == "nan" else 1.0)).backward()
            getattr(optimizer, "step" if ending == "nan" else ending)()
            optimizer.zero_grad()
            optimizer.step()  # without any gradient
            assert not optimizer.state
            assert not getattr(device, "has_memory_in_use", False)
        assert scheduler.statistics.resident_buckets == 9


def test_parameters_that_are_negated_lazily_keep_their_sign() -> None:
    both(
        lambda model, optimizer, _: train(model, optimizer, range(4), lambda one, _: one[0].exp().sum()),
        {"device": overlap.KeepingDevice(), "gpu_buckets": ALL},
        lambda: nn.ParameterList([torch._neg_view(torch.ones(3))]),
    )


@pytest.mark.parametrize("gpu_buckets", [1, ALL])
@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("error", [torch.OutOfMemoryError("planted"), ValueError("planted")])
def test_device_without_any_memory(error, first, gpu_buckets, monkeypatch, caplog):
    """The host makes the step, and values go straight into the parameters; other errors are raised before anything."""
    device, is_full = SimulatedDevice(6), isinstance(error, torch.OutOfMemoryError)

    def full(*_: object) -> Tensor:
        raise copy.copy(error)  # whose traceback would keep the arguments alive

    def story(model: nn.Module, optimizer: SpeculativeCPUAdam, scheduler: OffloadScheduler | None) -> None:
        if first:  # its order becomes known, but there is no state yet
            (loss_of(model, 0) * math.nan).backward()
            optimizer.step()
            optimizer.zero_grad()
        else:
            train(model, optimizer, range(3))
        for count in (0, gpu_buckets) if scheduler is not None and not first else ():  # so that all has to move again
            scheduler.place(gpu_buckets=count)
        loss_of(model, 5).backward()
        with monkeypatch.context() as patch:
            if scheduler is not None:
                scheduler._catch_up()
                patch.setattr(device, "empty", full)
                if not is_full:
                    with pytest.raises(ValueError, match="planted"):
                        optimizer.step()
                    patch.undo()
            optimizer.step()
        if scheduler is not None and is_full:
            assert resident(scheduler) == 0
            assert scheduler.placement.gpu_buckets == gpu_buckets // 2
        train(model, optimizer, range(6, 8))
        if scheduler is not None and is_full:
            assert bool(resident(scheduler)) is (gpu_buckets > 1)

    options = {"bucket_numel": 70, "gpu_buckets": gpu_buckets, "device": device}
    scheduler = both(story, options, lambda: mlp(torch.bfloat16))
    assert scheduler.statistics.resident_buckets > 0
    assert not device.has_memory_in_use
    assert is_full == ("no memory left for the state" in caplog.text)


class Roomy(overlap.ThreadDevice):
    """Says that it can keep everything, and cannot: only for what is chosen."""

    can_update = True

    def free_bytes(self) -> int:
        return 10**12


def test_a_worker_that_is_far_behind_backward_leaves_all_to_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    slow_down(monkeypatch, Transaction, "speculate", 0.01)
    model = nn.Sequential(*[nn.Linear(8, 8, bias=False) for _ in range(6)]).to(torch.bfloat16)
    model[2].weight.register_hook(lambda gradient: time.sleep(0.01))  # so that the worker begins during backward
    optimizer = adam(model, max_grad_norm=math.inf)
    with OffloadScheduler(optimizer, model, device=Roomy(), bucket_numel=64) as scheduler:
        for seed in range(200):  # many more than a machine needs on which nothing else runs
            train(model, optimizer, range(seed, seed + 1))
            if scheduler.placement.gpu_buckets == 6:
                break
        assert scheduler.placement.gpu_buckets == 6
