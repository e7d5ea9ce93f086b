"""What users do around a scheduled step: every sequence ends in the bits of the run without overlap, or in an error."""

from __future__ import annotations

import copy
import gc
import io
import json
import math
import os
import pickle
import subprocess
import sys
import textwrap
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from children import exit_code_of_child
from overlap import (
    DeferredDevice,
    ImmediateDevice,
    PlantedError,
    RaiseInBackward,
    ThreadDevice,
    adam,
    batch,
    changes_nothing,
    eager,
    everything,
    loss_of,
    mlp,
    train,
)
from reference import Synchronous, flat, same_bits
from torch import Tensor, nn
from torch.utils.data import DataLoader
from visible import shown

import superadam
from superadam import GradScaler, OffloadScheduler, SpeculativeCPUAdam, StepKind, native
from superadam.devices import Device, PlainDevice, Stream
from superadam.devices.simulated import SimulatedDevice
from superadam.hyperparameters import Hyperparameters
from superadam.transaction import Transaction
from superadam.worker import WorkerError

pytestmark = pytest.mark.timeout(20)  # a hang fails with the stack of every thread

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
DEVICES = [ImmediateDevice, ThreadDevice, DeferredDevice]


@pytest.fixture(params=DEVICES, ids=["immediate", "thread", "deferred"])
def device(request: pytest.FixtureRequest) -> PlainDevice:
    """Return the worst timing, and the usual worker."""
    one: PlainDevice = request.param()
    return one


def both(
    story: Callable[[nn.Module, SpeculativeCPUAdam, OffloadScheduler | None], None],
    make: Callable[[], nn.Module] = mlp,
    device: PlainDevice | None = None,
    bucket_numel: int = 1,
    **options: Any,
) -> OffloadScheduler:
    """Run a story with and without a scheduler, check that the bits agree, and return the closed scheduler."""
    results = []
    for overlaps in (False, True):
        model = make()
        optimizer = adam(model, **options)
        if not overlaps:
            story(model, optimizer, None)
        else:
            with eager(optimizer, model, bucket_numel=bucket_numel, device=device or ImmediateDevice()) as scheduler:
                story(model, optimizer, scheduler)
        results.append((everything(model, optimizer), optimizer.last_outcome, optimizer.statistics.steps))
    assert results[0] == results[1]
    return scheduler


# ---- ordinary training ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bucket_numel", [1, 70, 1_000_000])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_and_bucket_size(dtype: torch.dtype, bucket_numel: int, device: PlainDevice) -> None:
    scheduler = both(
        lambda model, optimizer, _: train(model, optimizer, range(8)),
        lambda: mlp(dtype),
        device,
        bucket_numel,
    )
    counts = scheduler.optimizer.statistics
    assert counts.committed
    assert counts.clipped


def test_groups_with_their_own_rates_and_decay(device: PlainDevice) -> None:
    def grouped(model: nn.Module, optimizer: SpeculativeCPUAdam, scheduler: OffloadScheduler | None) -> None:
        first, *others = optimizer.param_groups[0]["params"]
        optimizer.param_groups[0]["params"] = [first]
        optimizer.add_param_group({"params": others[:2], "lr": 1e-3, "weight_decay": 0.1})
        optimizer.add_param_group({"params": others[2:], "betas": (0.5, 0.9), "amsgrad": True, "maximize": True})
        train(model, optimizer, range(5))

    both(grouped, device=device)


def test_group_added_between_two_steps(device: PlainDevice) -> None:
    def grow(model: nn.Module, optimizer: SpeculativeCPUAdam, scheduler: OffloadScheduler | None) -> None:
        train(model, optimizer, range(2))
        model.append(nn.Linear(8, 8))
        torch.manual_seed(0)
        nn.init.normal_(model[-1].weight)
        nn.init.zeros_(model[-1].bias)
        optimizer.add_param_group({"params": list(model[-1].parameters()), "lr": 0.01})
        train(model, optimizer, range(2, 5))

    both(grow, device=device)


def test_group_added_while_a_step_is_open_is_refused() -> None:
    model = mlp()
    optimizer = adam(model)
    with eager(optimizer, model), changes_nothing(model, optimizer):
        loss_of(model, 0).backward()
        with pytest.raises(RuntimeError, match="a parameter group cannot be added while speculation is open"):
            optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]})


def test_parameters_without_a_gradient_in_some_steps(device: PlainDevice) -> None:
    def parts(model: nn.Module, optimizer: SpeculativeCPUAdam, scheduler: OffloadScheduler | None) -> None:
        for step in range(6):
            optimizer.zero_grad()
            if step != 3:  # a step with no gradient at all
                loss_of(model[2 * (step % 3) :], step).backward()
            optimizer.step()

    both(parts, device=device)


def test_parameters_frozen_and_thawed(device: PlainDevice) -> None:
    def toggled(model: nn.Module, optimizer: SpeculativeCPUAdam, scheduler: OffloadScheduler | None) -> None:
        for step in range(8):
            model[0].requires_grad_(step % 4 >= 2)
            model[4].requires_grad_(step % 4 < 2)
            train(model, optimizer, range(step, step + 1))

    def frozen() -> nn.Module:
        model = mlp()
        model[0].requires_grad_(False)
        return model

    scheduler = both(toggled, frozen, device)
    assert scheduler.statistics.buckets > 8 * 2


def test_model_without_anything_to_train() -> None:
    model = mlp().requires_grad_(False)
    optimizer = adam(model)
    with eager(optimizer, model), changes_nothing(model, optimizer):
        optimizer.step()


def test_parameters_that_are_not_in_the_model_or_not_in_the_optimizer(device: PlainDevice) -> None:
    for overlaps in (False, True):
        model, extra = mlp(), nn.Parameter(torch.ones(8))
        optimizer = SpeculativeCPUAdam([*model[2:].parameters(), extra], lr=0.05, max_grad_norm=20.0)
        scheduler = eager(optimizer, model, device=device) if overlaps else None
        for seed in range(3):
            optimizer.zero_grad()
            ((model(batch(seed)) * extra - 1) ** 2).sum().backward()
            optimizer.step()
        assert model[0].weight.grad is not None
        if scheduler is None:
            expected = shown(optimizer)
        else:
            scheduler.close()
            assert shown(optimizer) == expected


def test_overlap_off_leaves_everything_to_the_step() -> None:
    model = mlp()
    optimizer = adam(model)
    expected = mlp()
    train(expected, twin := adam(expected), range(4))
    with OffloadScheduler(optimizer, model, overlap=False) as scheduler:
        loss_of(model, 0).backward()
        assert model[0].weight.grad is not None
        loss_of(model, 1)  # a forward between backward and step is nothing special then
        optimizer.zero_grad()
        train(model, optimizer, range(4))
    assert scheduler.statistics.buckets == 0
    assert everything(model, optimizer) == everything(expected, twin)


def test_closures_and_learning_rate_schedulers(device: PlainDevice) -> None:
    def closures(model: nn.Module, optimizer: SpeculativeCPUAdam, scheduler: OffloadScheduler | None) -> None:
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        for seed in range(4):

            def closure(seed: int = seed) -> float:
                optimizer.zero_grad()
                loss = loss_of(model, seed)
                loss.backward()
                return loss.item()

            assert optimizer.step(closure) > 0
            schedule.step()

    both(closures, device=device)


@pytest.mark.parametrize("change", ["lr", "tensor lr", "weight_decay", "betas", "amsgrad", "max_grad_norm", "limit"])
def test_hyperparameters_that_change_between_backward_and_step(change: str, device: PlainDevice) -> None:
    def changing(model: nn.Module, optimizer: SpeculativeCPUAdam, scheduler: OffloadScheduler | None) -> None:
        group = optimizer.param_groups[0]
        if change == "tensor lr":
            group["lr"] = torch.tensor(0.05)
        for seed in range(4):
            optimizer.zero_grad()
            loss_of(model, seed).backward()
            match change:
                case "lr":
                    group["lr"] *= 0.7
                case "tensor lr":
                    group["lr"].mul_(0.7)
                case "weight_decay":
                    group["weight_decay"] += 0.1
                case "betas":
                    group["betas"] = (0.5 + 0.1 * seed, 0.9)
                case "amsgrad":
                    group["amsgrad"] = seed % 2 == 1
                case "max_grad_norm":
                    optimizer.max_grad_norm = 1.0 + seed
                case "limit":
                    assert optimizer.clip_grad_norm_(2.0) > 0
            optimizer.step()

    both(changing, device=device)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_amsgrad_that_is_switched_off_before_its_first_step(dtype: torch.dtype, device: PlainDevice) -> None:
    """What was made when speculating is absent again."""

    def switched(model: nn.Module, optimizer: SpeculativeCPUAdam, scheduler: OffloadScheduler | None) -> None:
        for seed in range(3):
            optimizer.zero_grad()
            optimizer.param_groups[0]["amsgrad"] = True
            loss_of(model, seed).backward()
            if scheduler is not None:
                scheduler.catch_up()
            optimizer.param_groups[0]["amsgrad"] = False
            optimizer.step()

    both(switched, lambda: mlp(dtype), device)


def test_the_optimizer_steps_by_hand(device: PlainDevice) -> None:
    """`speculate()` takes what backward left, `resolve()` judges, `rollback()` drops, with a scheduler as without."""

    def by_hand(model: nn.Module, optimizer: SpeculativeCPUAdam, scheduler: OffloadScheduler | None) -> None:
        for seed in range(6):
            loss_of(model, seed).backward()
            optimizer.speculate()
            if seed % 3 == 2:
                optimizer.rollback()
            else:
                optimizer.resolve()
            optimizer.zero_grad()

    both(by_hand, device=device)


# ---- accumulation ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_accumulated_gradients_are_those_of_autograd(dtype: torch.dtype, device: PlainDevice) -> None:
    def micro_batches(model: nn.Module, optimizer: SpeculativeCPUAdam, scheduler: OffloadScheduler | None) -> None:
        for step in range(4):
            optimizer.zero_grad()
            for micro in range(3):
                last = micro == 2
                if scheduler is None or last:
                    loss_of(model, 10 * step + micro).backward()
                else:
                    with scheduler.accumulate():
                        loss_of(model, 10 * step + micro).backward()
            optimizer.step()

    both(micro_batches, lambda: mlp(dtype), device)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("bucket_numel", [1, 1_000_000])
def test_sums_in_fp32_equal_the_oracle(dtype: torch.dtype, bucket_numel: int, device: PlainDevice) -> None:
    model, twin = mlp(dtype), mlp(dtype)
    optimizer = adam(model, max_grad_norm=30.0)
    parameters = list(model.parameters())
    reference = Synchronous(parameters)
    hyper = [Hyperparameters.of_group(optimizer.param_groups[0])] * len(parameters)
    with eager(optimizer, model, bucket_numel=bucket_numel, device=device) as scheduler:
        for step in range(4):
            twin.load_state_dict(model.state_dict())
            sums: dict[int, np.ndarray[Any, Any]] = {}
            for micro in range(3):
                used = slice(2 * (micro % 2), None)  # the first layer has no gradient from the second micro-batch
                if micro == 2:
                    used = slice(2, None)  # nor from the last, so that its sum is left for the step
                twin.zero_grad()
                loss_of(twin[used], 10 * step + micro).backward()
                for i, parameter in enumerate(twin.parameters()):
                    if parameter.grad is not None:
                        one = flat(parameter.grad, parameter)
                        sums[i] = sums[i] + one if i in sums else one
                if micro < 2:
                    with scheduler.accumulate(torch.float32):
                        loss_of(model[used], 10 * step + micro).backward()
                else:
                    loss_of(model[used], 10 * step + micro).backward()
                assert all(parameter.grad is None for parameter in parameters)
            optimizer.step()
            kind, norm = reference.step(sums, hyper, 30.0)
            assert optimizer.last_outcome is not None
            assert (optimizer.last_outcome.kind, optimizer.last_outcome.grad_norm) == (kind, norm)
            for parameter, one in zip(parameters, reference.parameters, strict=True):
                assert same_bits(flat(parameter, parameter), one.shown)


@pytest.mark.parametrize("dtype", [None, torch.float32])
@pytest.mark.parametrize("inside", [False, True])
def test_zero_grad_forgets_what_was_accumulated(dtype: torch.dtype | None, inside: bool) -> None:
    model, expected = mlp(), mlp()
    optimizer, twin = adam(model), adam(expected)
    train(expected, twin, range(1))
    with eager(optimizer, model) as scheduler:
        with scheduler.accumulate(dtype):
            loss_of(model, 7).backward()
            if inside:
                optimizer.zero_grad()
        train(model, optimizer, range(1))
    assert everything(model, optimizer) == everything(expected, twin)


def test_all_micro_batches_inside_accumulate(device: PlainDevice) -> None:
    for dtype in (None, torch.float32):

        def accumulated(
            model: nn.Module,
            optimizer: SpeculativeCPUAdam,
            scheduler: OffloadScheduler | None,
            dtype: torch.dtype | None = dtype,
        ) -> None:
            for seed in range(3):
                optimizer.zero_grad()
                if scheduler is None:
                    loss_of(model, seed).backward()
                else:
                    with scheduler.accumulate(dtype):
                        loss_of(model, seed).backward()
                optimizer.step()

        both(accumulated, device=device)


def test_accumulate_ends_with_its_block() -> None:
    model = mlp()
    optimizer = adam(model)
    with eager(optimizer, model) as scheduler:
        with pytest.raises(PlantedError), scheduler.accumulate(), scheduler.accumulate(torch.float32):
            raise PlantedError
        loss_of(model, 0).backward()
        assert model[0].weight.grad is None
        with pytest.raises(ValueError, match=r"accumulate\(\) got dtype torch.bfloat16, expected None"):
            scheduler.accumulate(torch.bfloat16).__enter__()


# ---- loss scaling ---------------------------------------------------------------------------------------------------


def scaled_training(
    model: nn.Module, optimizer: SpeculativeCPUAdam, scaler: torch.amp.GradScaler, steps: int = 12
) -> list[float]:
    scales = []
    for seed in range(steps):
        optimizer.zero_grad()
        loss = loss_of(model, seed)
        if seed == 5:
            loss = loss * math.inf
        scaler.scale(loss).backward()
        if isinstance(scaler, GradScaler):
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    optimizer.zero_grad()
    return scales


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_grad_scaler_with_a_scheduler(dtype: torch.dtype, overlap: bool, device: PlainDevice) -> None:
    options = {"init_scale": 2.0**14, "growth_interval": 2}
    model, expected = mlp(dtype), mlp(dtype)
    optimizer, twin = adam(model), adam(expected)
    scales = scaled_training(expected, twin, torch.amp.GradScaler("cpu", **options))
    scaler = GradScaler("cpu", **options)
    with eager(optimizer, model, device=device, grad_scaler=scaler, overlap=overlap) as scheduler:
        assert scaled_training(model, optimizer, scaler) == scales
    assert len(set(scales)) > 2  # it grew and it backed off
    assert optimizer.statistics.skipped >= 1
    assert optimizer.statistics.clipped >= 1
    assert bool(scheduler.statistics.buckets) == overlap
    assert everything(model, optimizer) == everything(expected, twin)


def test_grad_scaler_with_accumulation(device: PlainDevice) -> None:
    results = []
    for overlaps in (False, True):
        model = mlp(torch.float16)
        optimizer = adam(model)
        scaler = GradScaler("cpu", init_scale=256.0)
        scheduler = eager(optimizer, model, device=device, grad_scaler=scaler) if overlaps else None
        for seed in range(4):
            optimizer.zero_grad()
            if scheduler is None:
                scaler.scale(loss_of(model, seed)).backward()
            else:
                with scheduler.accumulate():
                    scaler.scale(loss_of(model, seed)).backward()
            scaler.scale(loss_of(model[2:], seed)).backward()
            scaler.step(optimizer)
            scaler.update()
        optimizer.zero_grad()
        results.append(everything(model, optimizer))
    assert results[0] == results[1]


# ---- reading and writing at any moment ------------------------------------------------------------------------------


def states(model: nn.Module, optimizer: SpeculativeCPUAdam) -> dict[str, Any]:
    """Return both state dicts as bytes."""
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    return torch.load(io.BytesIO(file.getvalue()), weights_only=True)


def same(first: Any, second: Any) -> bool:
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(same(first[key], second[key]) for key in first)
    if isinstance(first, list | tuple):
        return len(first) == len(second) and all(map(same, first, second))
    return torch.equal(first, second) if isinstance(first, Tensor) else bool(first == second)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_state_dicts_show_the_last_accepted_step_at_every_moment(dtype: torch.dtype, device: PlainDevice) -> None:
    model, twin = mlp(dtype), mlp(dtype)
    optimizer, plain = adam(model), adam(twin)
    with eager(optimizer, model, bucket_numel=70, device=device):
        for seed in range(4):
            optimizer.zero_grad()
            expected = states(twin, plain)
            assert same(states(model, optimizer), expected)
            loss = loss_of(model, seed)
            assert same(states(model, optimizer), expected)
            loss.backward()
            assert same(states(model, optimizer), expected)
            assert same(model[2].state_dict(), twin[2].state_dict())
            optimizer.step()
            train(twin, plain, range(seed, seed + 1))
            assert same(states(model, optimizer), states(twin, plain))
    assert everything(model, optimizer) == everything(twin, plain)


def test_exposed_state_follows_every_step(device: PlainDevice) -> None:
    model, twin = mlp(), mlp()
    optimizer, plain = adam(model), adam(twin)
    with eager(optimizer, model, device=device):
        for seed in range(4):
            train(model, optimizer, range(seed, seed + 1))
            train(twin, plain, range(seed, seed + 1))
            for p, q in zip(model.parameters(), twin.parameters(), strict=True):
                assert all(torch.equal(optimizer.state[p][key], plain.state[q][key]) for key in plain.state[q])
    assert everything(model, optimizer) == everything(twin, plain)


@pytest.mark.parametrize("moment", ["clean", "after backward", "after the step"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_checkpoint_loaded_under_the_scheduler(dtype: torch.dtype, moment: str, device: PlainDevice) -> None:
    source = mlp(dtype)
    other = adam(source)
    train(source, other, range(10, 13))
    saved = states(source, other)
    train(source, other, range(2))
    model = mlp(dtype)
    optimizer = adam(model)
    with eager(optimizer, model, device=device) as scheduler:
        train(model, optimizer, range(3))
        if moment != "clean":
            loss_of(model, 3).backward()
        if moment == "after the step":
            optimizer.step()
        optimizer.load_state_dict(saved["optimizer"])
        model.load_state_dict(saved["model"])
        buckets = scheduler.statistics.buckets
        train(model, optimizer, range(2))
        assert scheduler.statistics.buckets == buckets + 2 * 6  # it overlaps again
    assert everything(model, optimizer) == everything(source, other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_weights_written_from_outside(dtype: torch.dtype, device: PlainDevice) -> None:
    weights = {name: value.clone() for name, value in mlp(dtype).state_dict().items()}
    for value in weights.values():
        value[0] = 0.25

    def written(model: nn.Module, optimizer: SpeculativeCPUAdam, scheduler: OffloadScheduler | None) -> None:
        model.load_state_dict(weights)  # after construction
        train(model, optimizer, range(2))
        with torch.no_grad():
            model[0].weight.mul_(0.5)
            model[2].bias[1:3] = 1.0
        train(model, optimizer, range(2, 4))
        model.load_state_dict(model.state_dict())  # changes nothing
        train(model, optimizer, range(4, 6))

    both(written, lambda: mlp(dtype), device)


def test_averaged_weights_swapped_in_for_evaluation(device: PlainDevice) -> None:
    def averaged(model: nn.Module, optimizer: SpeculativeCPUAdam, scheduler: OffloadScheduler | None) -> None:
        average = torch.optim.swa_utils.AveragedModel(model)  # deep copies the hooked model
        for seed in range(4):
            train(model, optimizer, range(seed, seed + 1))
            average.update_parameters(model)
            own = {name: value.clone() for name, value in model.state_dict().items()}
            model.load_state_dict(average.module.state_dict())
            with torch.no_grad():
                loss_of(model, 99)
            model.load_state_dict(own)

    both(averaged, device=device)


def test_evaluation_after_the_step_and_between_backward_and_step(device: PlainDevice) -> None:
    model = mlp()
    optimizer = adam(model)
    with eager(optimizer, model, device=device), torch.no_grad():
        with torch.enable_grad():
            train(model, optimizer, range(2))
        first = loss_of(model.eval(), 5)
        assert torch.equal(loss_of(model, 5), first)
        with torch.inference_mode():
            assert torch.equal(loss_of(model, 5), first)
        with changes_nothing(model, optimizer):
            with torch.enable_grad():
                loss_of(model, 3).backward()
            with pytest.raises(RuntimeError, match=r"Linear.forward reads parameters whose step has no verdict yet; "):
                loss_of(model, 5)
            assert torch.equal(loss_of(model, 5), first)  # what was open is dropped by then


# ---- failures -------------------------------------------------------------------------------------------------------


def failing(model: nn.Module, error: BaseException, at: int = 2) -> None:
    """Run a backward that fails after the layers from `at` on have their gradients."""
    x = RaiseInBackward.apply(model[:at](batch(9)), error)
    (30 * (model[at:](x) - 1) ** 2).mean().backward()


@pytest.mark.parametrize("then", ["zero_grad", "forward", "step elsewhere"])
@pytest.mark.parametrize("error", [PlantedError("planted"), KeyboardInterrupt(), torch.OutOfMemoryError("planted")])
def test_backward_that_fails(error: BaseException, then: str, device: PlainDevice) -> None:
    model, twin = mlp(), mlp()
    optimizer, plain = adam(model), adam(twin)
    train(twin, plain, range(4))
    with eager(optimizer, model, device=device):
        train(model, optimizer, range(2))
        before = everything(model, optimizer)
        with pytest.raises(type(error)):
            failing(model, error)
        if then == "zero_grad":
            optimizer.zero_grad()
            assert everything(model, optimizer) == before
        elif then == "forward":
            with torch.no_grad():
                loss_of(model, 3)
            assert shown(optimizer) == before["parameters"]
            optimizer.zero_grad()
        train(model, optimizer, range(2, 4))
    assert everything(model, optimizer) == everything(twin, plain)


def one_step(optimizer: SpeculativeCPUAdam, loss: Tensor) -> None:
    loss.backward()
    optimizer.step()


def test_dropped_step_of_a_failed_backward_is_told(caplog: pytest.LogCaptureFixture) -> None:
    model = mlp()
    optimizer = adam(model)
    with eager(optimizer, model):
        with pytest.raises(PlantedError):
            failing(model, PlantedError("planted"))
        loss_of(model, 1)
    (record,) = [record for record in caplog.records if record.levelname == "WARNING"]
    assert "the step of a backward that failed was dropped" in record.getMessage()


def test_bad_step_is_left_out(device: PlainDevice) -> None:
    def careful(model: nn.Module, optimizer: SpeculativeCPUAdam, scheduler: OffloadScheduler | None) -> None:
        for seed in range(6):
            loss = loss_of(model, seed)
            loss.backward()
            if seed % 2:
                optimizer.zero_grad()
                continue
            optimizer.step()
            optimizer.zero_grad()

    both(careful, device=device)


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_step_with_nonfinite_gradients_is_skipped(value: float, device: PlainDevice) -> None:
    def poisoned(model: nn.Module, optimizer: SpeculativeCPUAdam, scheduler: OffloadScheduler | None) -> None:
        for seed in range(5):
            optimizer.zero_grad()
            (loss_of(model, seed) * (value if seed in (0, 3) else 1.0)).backward()
            optimizer.step()
            assert optimizer.last_outcome is not None
            assert (optimizer.last_outcome.kind is StepKind.SKIPPED) == (seed in (0, 3))
        optimizer.last_outcome = None  # its norm is NaN, which equals nothing

    both(poisoned, device=device)


def test_nonfinite_gradients_may_raise(device: PlainDevice) -> None:
    model = mlp()
    optimizer = adam(model, on_nonfinite="raise")
    with eager(optimizer, model, device=device):
        train(model, optimizer, range(2))
        with changes_nothing(model, optimizer):
            (loss_of(model, 2) * math.nan).backward()
            with pytest.raises(FloatingPointError, match="nothing was changed"):
                optimizer.step()
        train(model, optimizer, range(2))


class FailingSpeculation:
    """Lets one call of `Transaction.speculate` fail, after it has done its work or before."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, at: int, *, after: bool) -> None:
        self.calls, self.at, self.after = 0, at, after
        self.speculate = Transaction.speculate
        failing = self
        monkeypatch.setattr(Transaction, "speculate", lambda *args, **options: failing(*args, **options))

    def __call__(self, *args: Any, **options: Any) -> None:
        self.calls += 1
        fails = self.calls == self.at
        if not fails or self.after:
            self.speculate(*args, **options)
        if fails:
            raise PlantedError("the worker stumbled")


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("at", [1, 3, 6])
def test_worker_that_fails(at: int, after: bool, device: PlainDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    model, twin = mlp(), mlp()
    optimizer, plain = adam(model), adam(twin)
    train(twin, plain, range(4))
    with eager(optimizer, model, device=device):
        train(model, optimizer, range(2))
        before = everything(model, optimizer)
        with monkeypatch.context() as patch:
            FailingSpeculation(patch, at, after=after)
            begin = time.perf_counter()
            told = r"worker failed with PlantedError: the worker stumbled; .* zero_grad"
            with pytest.raises(WorkerError, match=told) as caught:
                one_step(optimizer, loss_of(model, 2))
        assert time.perf_counter() - begin < 1.0
        assert isinstance(caught.value.__cause__, PlantedError)
        assert shown(optimizer) == before["parameters"]
        optimizer.zero_grad()
        assert everything(model, optimizer) == before
        train(model, optimizer, range(2, 4))
    assert everything(model, optimizer) == everything(twin, plain)


def test_idle_commit_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    model, twin = mlp(), mlp()
    optimizer, plain = adam(model), adam(twin)
    train(twin, plain, range(2))
    failed = threading.Event()

    def stumble(*_: object) -> bool:
        failed.set()
        raise PlantedError("the commit stumbled")

    with eager(optimizer, model, device=ThreadDevice()):
        with monkeypatch.context() as patch:
            patch.setattr(Transaction, "commit_some", stumble)
            loss_of(model, 0).backward()
            optimizer.step()
            assert failed.wait(5)
            time.sleep(0.05)  # between the call and the note of its failure
            with pytest.raises(WorkerError, match="the commit stumbled"):
                optimizer.zero_grad()
        train(model, optimizer, range(1, 2))
    assert everything(model, optimizer) == everything(twin, plain)


def test_sparse_gradient_is_refused_and_nothing_stays_open(device: PlainDevice) -> None:
    model = nn.Sequential(nn.Embedding(8, 8, sparse=True), nn.Linear(8, 8))
    optimizer = adam(model)
    with eager(optimizer, model, device=device):
        with pytest.raises(TypeError, match="is sparse, expected a dense one"):
            one_step(optimizer, model(batch(0).argmax(-1)).sum())
        optimizer.zero_grad()
        model[0].weight.requires_grad_(False)
        model(batch(0).argmax(-1)).sum().backward()
        optimizer.step()
        assert optimizer.last_outcome is not None
        assert optimizer.last_outcome.kind is not StepKind.SKIPPED


def test_torch_clipping_between_backward_and_step_sees_nothing(device: PlainDevice) -> None:
    """As documented: the limit is the optimizer's, and gradients are gone."""

    def clipped(model: nn.Module, optimizer: SpeculativeCPUAdam, scheduler: OffloadScheduler | None) -> None:
        for seed in range(3):
            optimizer.zero_grad()
            loss_of(model, seed).backward()
            if scheduler is not None:
                assert float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)) == 0.0
            optimizer.step()

    both(clipped, device=device)


# ---- arguments ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "sentence"),
    [
        ({"bucket_numel": 0}, ValueError, "bucket_numel is 0, expected 'auto' or an integer of at least 1"),
        ({"bucket_numel": "big"}, ValueError, "bucket_numel is 'big', expected"),
        ({"bucket_numel": 1.5}, ValueError, "bucket_numel is 1.5, expected"),
        ({"bucket_numel": True}, ValueError, "bucket_numel is True, expected"),
        ({"cores": -1}, ValueError, "cores is -1, expected 'auto' or an integer of at least 1"),
        ({"grad_scaler": torch.amp.GradScaler("cpu")}, ValueError, "expected a superadam.GradScaler"),
        ({"max_grad_norm": None}, ValueError, "max_grad_norm=None, expected an explicit limit"),
        ({"model": [nn.Linear(2, 2)]}, TypeError, "model is a list, expected the nn.Module"),
        ({"optimizer": "torch"}, TypeError, "optimizer is a AdamW, expected a SpeculativeCPUAdam"),
    ],
)
def test_bad_arguments(options: dict[str, Any], error: type[Exception], sentence: str) -> None:
    threads = threading.active_count()
    model = mlp()
    optimizer: Any = adam(model, max_grad_norm=options.pop("max_grad_norm", 1.0))
    if options.pop("optimizer", None):
        optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(error, match=sentence) as caught:
        OffloadScheduler(optimizer, options.pop("model", model), **options)
    assert "\n" not in str(caught.value)
    assert threading.active_count() == threads


class DistributedModel(nn.parallel.DistributedDataParallel):
    """Counts as a DistributedDataParallel model, without the process group that a real one needs."""

    def __init__(self, module: nn.Module) -> None:
        nn.Module.__init__(self)
        self.module = module


def test_distributed_data_parallel_is_refused() -> None:
    model = mlp()
    with pytest.raises(RuntimeError, match=r"DistributedDataParallel.*FSDP2"):
        OffloadScheduler(adam(model), nn.Sequential(DistributedModel(model)))


@pytest.mark.parametrize(("cores", "expected"), [("auto", 2), (1, 1), (3, 3)])
def test_cores_limit_what_runs_beside_backward(
    cores: int | str, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker uses so many threads until somebody waits for it, and others use theirs meanwhile."""
    used: list[tuple[bool, int]] = []
    speculate, before, model = Transaction.speculate, superadam.get_num_threads(), mlp()

    def noting(*arguments: Any, **options: Any) -> None:
        used.append((threading.current_thread() is threading.main_thread(), native._threads_here()))
        speculate(*arguments, **options)

    monkeypatch.setattr(Transaction, "speculate", noting)
    superadam.set_num_threads(8)
    try:
        with eager(optimizer := adam(model), model, cores=cores, device=ThreadDevice()):
            loss_of(model, 0).backward()
            time.sleep(0.1)
            assert native._threads_here() == 8
            optimizer.step()
    finally:
        superadam.set_num_threads(before)
    assert used
    assert all(thread == (False, expected) for thread in used[:-1])


@pytest.mark.parametrize("has_link", [False, True])
def test_without_idle_cores_the_work_waits_for_the_step(has_link: bool) -> None:
    model = mlp()
    optimizer = adam(model)
    threads = threading.active_count()
    device = DeferredDevice()
    device.has_link = has_link
    with eager(optimizer, model, device=device) as scheduler:
        assert threading.active_count() == threads
        loss_of(model, 0).backward()
        assert scheduler.statistics.buckets == (6 if has_link else 0)
        assert optimizer.statistics.speculate_seconds == 0.0
        optimizer.step()
        assert scheduler.statistics.buckets == 6
        assert optimizer.statistics.speculate_seconds > 0.0
        assert scheduler.statistics.hidden_share == 0.0
        scheduler.close()
        with pytest.raises(RuntimeError, match="worker is closed"):
            scheduler._pipeline._worker.submit(lambda: None)


def test_second_scheduler_on_one_optimizer_is_refused() -> None:
    model = mlp()
    optimizer = adam(model)
    with OffloadScheduler(optimizer, model):
        threads = threading.active_count()
        with pytest.raises(RuntimeError, match=r"has a scheduler already; close\(\) it"):
            OffloadScheduler(optimizer, model)
        assert threading.active_count() == threads
        train(model, optimizer, range(2))
    OffloadScheduler(optimizer, model).close()


def test_optimizer_that_cannot_be_bound_leaves_no_thread() -> None:
    shared = torch.zeros(8)
    first, second = nn.Parameter(shared[:5]), nn.Parameter(shared[3:])
    model = nn.ParameterList([first, second])
    threads = threading.active_count()
    with pytest.raises(ValueError, match="share memory"):
        OffloadScheduler(adam(model), model)
    assert threading.active_count() == threads


# ---- life and death -------------------------------------------------------------------------------------------------


def test_closed_and_made_again(device: PlainDevice) -> None:
    model, twin = mlp(torch.bfloat16), mlp(torch.bfloat16)
    optimizer, plain = adam(model), adam(twin)
    for begin in (0, 2, 4):
        with eager(optimizer, model, device=device) as scheduler:
            train(model, optimizer, range(begin, begin + 1))
            loss_of(model, 77).backward()  # dropped when closing
        scheduler.close()
        assert (optimizer.statistics.dropped > 0) is not isinstance(device, DeferredDevice)  # where nothing was written
        train(model, optimizer, range(begin + 1, begin + 2))
        loss_of(model, 77).backward()
        assert model[0].weight.grad is not None  # no hook is left
    optimizer.zero_grad()
    train(twin, plain, range(6))
    assert everything(model, optimizer) == everything(twin, plain)
    assert not any(module._forward_pre_hooks or module._state_dict_hooks for module in model.modules())


def test_no_thread_is_left_after_close() -> None:
    model = mlp()
    before = set(threading.enumerate())
    with OffloadScheduler(adam(model), model, cores=1) as scheduler:
        (worker,) = set(threading.enumerate()) - before
        assert worker.name == "superadam-worker"
        train(model, scheduler.optimizer, range(2))
    assert not worker.is_alive()
    with pytest.raises(RuntimeError, match="worker is closed; make a new OffloadScheduler"):
        scheduler._pipeline._worker.submit(lambda: None)


def test_closed_scheduler_is_collected() -> None:
    model = mlp()
    scheduler = OffloadScheduler(adam(model), model, cores=1)
    train(model, scheduler.optimizer, range(2))
    collected: list[int] = []
    weakref.finalize(scheduler, collected.append, 1)
    scheduler.close()
    del scheduler
    gc.collect()
    assert collected == [1]


def test_two_schedulers_in_one_process(device: PlainDevice) -> None:
    models, twins = [mlp(), mlp(torch.bfloat16)], [mlp(), mlp(torch.bfloat16)]
    optimizers, plain = [adam(model) for model in models], [adam(model) for model in twins]
    schedulers = [eager(o, m, device=device) for o, m in zip(optimizers, models, strict=True)]
    for seed in range(3):
        for model in models:
            loss_of(model, seed).backward()
        for optimizer in optimizers:
            optimizer.step()
        for model, optimizer in zip(twins, plain, strict=True):
            train(model, optimizer, range(seed, seed + 1))
    for scheduler in schedulers:
        scheduler.close()
    for i in range(2):
        assert everything(models[i], optimizers[i]) == everything(twins[i], plain[i])


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "save"])
def test_copies_of_the_model_are_plain_models(how: str) -> None:
    model = mlp()
    optimizer = adam(model)
    with eager(optimizer, model) as scheduler:
        train(model, optimizer, range(2))
        if how == "deepcopy":
            other = copy.deepcopy(model)
        elif how == "pickle":
            other = pickle.loads(pickle.dumps(model))
        else:
            file = io.BytesIO()
            torch.save(model, file)
            other = torch.load(io.BytesIO(file.getvalue()), weights_only=False)
        buckets = scheduler.statistics.buckets
        loss_of(other, 0).backward()
        loss_of(other, 0).backward()
        assert same(other.state_dict(), model.state_dict())
        assert all(parameter.grad is not None for parameter in other.parameters())
        assert scheduler.statistics.buckets == buckets
        copied = adam(other)
        with eager(copied, other):
            other.zero_grad()
            train(other, copied, range(2))


def test_optimizer_is_copied_without_its_scheduler() -> None:
    model = mlp()
    optimizer = adam(model)
    with eager(optimizer, model):
        train(model, optimizer, range(2))
        twin_model, twin = copy.deepcopy((model, optimizer))
        train(model, optimizer, range(2, 4))
        train(twin_model, twin, range(2, 4))
        assert everything(model, optimizer) == everything(twin_model, twin)
        loss_of(model, 4).backward()
        with pytest.raises(RuntimeError, match="cannot be copied or pickled while speculation is open"):
            copy.deepcopy(optimizer)


def test_step_returns_before_the_commits_are_done(monkeypatch: pytest.MonkeyPatch) -> None:
    model = mlp()
    optimizer = adam(model)
    began, may_go_on, ended = threading.Event(), threading.Event(), threading.Event()
    commit_some = Transaction.commit_some

    def slow(self: Transaction, elements: int) -> bool:
        began.set()
        assert may_go_on.wait(10)
        ended.set()
        return commit_some(self, elements)

    monkeypatch.setattr(Transaction, "commit_some", slow)
    with OffloadScheduler(optimizer, model, cores=1):
        loss_of(model, 0).backward()
        optimizer.step()
        assert began.wait(5)
        loss_of(model, 1)  # the next forward runs beside the commit
        assert not ended.is_set()
        may_go_on.set()
        assert ended.wait(5)


def test_synchronize_leaves_nothing_accepted(device: PlainDevice) -> None:
    model = mlp()
    optimizer = adam(model)
    with eager(optimizer, model, device=device) as scheduler:
        loss_of(model, 0).backward()
        optimizer.step()
        scheduler.synchronize()
        transaction = optimizer.last_transaction
        assert transaction is not None
        assert not transaction.in_phase(superadam.parameter.Phase.ACCEPTED)


def test_data_loader_workers_are_forked_beside_the_worker() -> None:
    def loaded(model: nn.Module, optimizer: SpeculativeCPUAdam, scheduler: OffloadScheduler | None) -> None:
        data = [batch(seed, rows=1)[0] for seed in range(12)]
        workers = {"num_workers": 2, "multiprocessing_context": "fork", "timeout": 10} if scheduler else {}
        for _ in range(2):
            for x in DataLoader(data, batch_size=3, **workers):
                optimizer.zero_grad()
                (30 * (model(x) - 1).square().mean()).backward()
                optimizer.step()

    both(loaded, device=ThreadDevice())


def test_forked_child_is_told_instead_of_hanging() -> None:
    model = mlp()
    optimizer = adam(model)
    with eager(optimizer, model, device=ThreadDevice()):
        loss_of(model, 0).backward()

        def in_child() -> None:
            with pytest.raises(RuntimeError, match="belongs to the process that this one was forked from"):
                optimizer.step()
            other = mlp()
            train(other, fresh := adam(other), range(2))
            with eager(fresh, other, device=ThreadDevice()):
                train(other, fresh, range(2))

        assert exit_code_of_child(in_child, seconds=10) == 0
        optimizer.step()


@pytest.mark.subprocess
@pytest.mark.parametrize("ending", ["loss(1).backward()", "raise KeyError('the end')", "os.kill(os.getpid(), 2)"])
def test_interpreter_ends_without_close(ending: str) -> None:
    """With commits under way: a thread that the interpreter has to kill would abort the process."""
    program = f"""
        import os, torch, superadam
        model = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(40)])
        optimizer = superadam.SpeculativeCPUAdam(model.parameters(), max_grad_norm=1.0)
        scheduler = superadam.OffloadScheduler(optimizer, model, bucket_numel=100, cores=1)
        loss = lambda seed: model(torch.randn(8, 64)).square().mean()
        for seed in range(3):
            loss(seed).backward()
            optimizer.step()
        {ending}
    """
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, timeout=15, check=False
    )
    assert run.returncode == {"raise": 1, "os.ki": -2}.get(ending[:5], 0), run.stderr
    assert ("KeyError" in run.stderr) == ending.startswith("raise")


# ---- seeing it ------------------------------------------------------------------------------------------------------


def test_statistics_of_overlap() -> None:
    model = mlp(width=64)
    optimizer = adam(model, max_grad_norm=math.inf)
    with OffloadScheduler(optimizer, model, bucket_numel=64 * 64 + 64, cores=1) as scheduler:
        assert scheduler.statistics.hidden_share == 0.0
        for seed in range(4):
            model(batch(seed, width=64)).square().sum().backward()
            optimizer.step()
        statistics = scheduler.statistics
    assert statistics.buckets == statistics.speculated_buckets == 4 * 3
    assert statistics.waiting_buckets == 0
    assert statistics.downloaded_bytes == statistics.uploaded_bytes == 0
    assert statistics.worker_seconds > 0
    assert 0.0 <= statistics.hidden_share <= 1.0
    assert statistics.waited_seconds >= 0.0


def test_frequent_clipping_makes_buckets_wait() -> None:
    """The early verdict within a step, then the governor over steps; neither changes a bit."""
    limits = [1e-3] * 12 + [math.inf] * 12

    def clipped(model: nn.Module, optimizer: SpeculativeCPUAdam, scheduler: OffloadScheduler | None) -> None:
        waiting = []
        for seed, limit in enumerate(limits):
            optimizer.max_grad_norm = limit
            optimizer.zero_grad()
            loss_of(model, seed).backward()
            optimizer.step()
            if scheduler is not None:
                waiting.append(scheduler.statistics.waiting_buckets)
        if scheduler is not None:
            assert waiting[0] == 5  # all but the first, whose norm was over the limit at once
            assert waiting[11] - waiting[10] == 6  # not even that one, after enough clipped steps
            assert waiting[-1] == waiting[11]  # without a limit nothing is clipped

    scheduler = both(clipped)
    assert scheduler.statistics.waiting_buckets + scheduler.statistics.speculated_buckets == 24 * 6


@pytest.mark.parametrize("poison", [False, True])
def test_exported_trace(tmp_path: Path, poison: bool) -> None:
    model = mlp()
    optimizer = adam(model)
    with OffloadScheduler(optimizer, model, bucket_numel=70, cores=1) as scheduler:
        train(model, optimizer, range(3))
        if poison:
            (loss_of(model, 3) * math.nan).backward()
            optimizer.step()
        scheduler.synchronize()
        scheduler.export_trace(tmp_path / "trace.json")

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    trace = json.loads((tmp_path / "trace.json").read_text(), parse_constant=refuse)
    names = {event["name"] for event in trace["traceEvents"]}
    assert {"adam", "backward and step", "gradients to host"} <= names
    assert any(name.startswith("verdict: ") for name in names)
    assert ("verdict: skipped" in names) == poison
    assert os.listdir(tmp_path) == ["trace.json"]


def test_first_step_that_is_dropped_leaves_no_state(device: PlainDevice) -> None:
    model = mlp(torch.bfloat16)
    optimizer = adam(model)
    with eager(optimizer, model, device=device):
        loss_of(model, 0).backward()
        optimizer.zero_grad()
        assert not optimizer.state
        (loss_of(model, 0) * math.inf).backward()
        optimizer.step()
        assert not optimizer.state


# ---- an asynchronous device, and gradients in other dtypes on the link ----------------------------------------------

ASYNCHRONOUS = [
    pytest.param(lambda: SimulatedDevice(1, 0.0), id="lazy device"),
    pytest.param(lambda: SimulatedDevice(2, 0.6), id="hasty device"),
]


@pytest.fixture(params=[*DEVICES, *ASYNCHRONOUS])
def anywhere(request: pytest.FixtureRequest) -> Device:
    """Return the host with each worker, and two asynchronous devices."""
    one: Device = request.param()
    return one


@pytest.fixture(params=ASYNCHRONOUS)
def asynchronous(request: pytest.FixtureRequest) -> Device:
    """Return a device that does nothing before somebody waits, and one that does."""
    one: Device = request.param()
    return one


def twins(
    story: Callable[[nn.Module, SpeculativeCPUAdam], None],
    plain_story: Callable[[nn.Module, SpeculativeCPUAdam], None] | None = None,
    make: Callable[[], nn.Module] = mlp,
    scheduled: dict[str, Any] | None = None,
    **options: Any,
) -> OffloadScheduler:
    """Run one story under a scheduler and another, or the same, without; bits and outcomes agree."""
    model, twin = make(), make()
    optimizer, plain = adam(model, **options), adam(twin, **options)
    with eager(optimizer, model, **(scheduled or {})) as scheduler:
        story(model, optimizer)
    (plain_story or story)(twin, plain)
    optimizer.zero_grad()
    plain.zero_grad()
    assert everything(model, optimizer) == everything(twin, plain)
    assert optimizer.last_outcome == plain.last_outcome
    return scheduler


@pytest.mark.parametrize("bucket_numel", [1, 100, 1_000_000])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
def test_wider_link_gives_the_same_bits(dtype: torch.dtype, bucket_numel: int, anywhere: Device) -> None:
    twins(
        lambda model, optimizer: train(model, optimizer, range(6)),
        make=lambda: mlp(dtype),
        scheduled={"device": anywhere, "link_dtype": torch.float32, "bucket_numel": bucket_numel},
    )


@pytest.mark.parametrize("link", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_narrow_link_is_a_step_with_rounded_gradients(dtype: torch.dtype, link: torch.dtype, anywhere: Device) -> None:
    norms: dict[bool, list[float]] = {False: [], True: []}

    def steps(model: nn.Module, optimizer: SpeculativeCPUAdam, *, rounds: bool) -> None:
        for seed in range(6):
            optimizer.zero_grad()
            loss_of(model, seed).backward()
            for parameter in model.parameters():
                if parameter.grad is not None and dtype != torch.float64:
                    parameter.grad = parameter.grad.to(link).to(dtype)
            optimizer.step()
            assert optimizer.last_outcome is not None
            norms[rounds].append(optimizer.last_outcome.grad_norm)

    twins(
        lambda model, optimizer: steps(model, optimizer, rounds=False),
        lambda model, optimizer: steps(model, optimizer, rounds=True),
        make=lambda: mlp(dtype),
        scheduled={"device": anywhere, "link_dtype": link},
    )
    assert norms[False] == norms[True]


def test_narrow_link_that_overflows_skips_the_step(anywhere: Device) -> None:
    model = mlp()
    optimizer = adam(model, max_grad_norm=math.inf)
    with eager(optimizer, model, device=anywhere, link_dtype=torch.float16), changes_nothing(model, optimizer):
        (1e6 * loss_of(model, 0)).backward()
        optimizer.step()
        assert optimizer.last_outcome is not None
        assert optimizer.last_outcome.kind is StepKind.SKIPPED
        assert optimizer.last_outcome.nonfinite > 0


# ---- parameters and gradients of every layout -----------------------------------------------------------------------


class Odd(nn.Module):
    """Parameters that are empty, of no dimension, not contiguous, not dense, and of several dtypes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.convolution = nn.Conv2d(3, 4, 3, padding=1).to(memory_format=torch.channels_last)
        self.transposed = nn.Parameter(torch.randn(6, 4).t())
        self.sliced = nn.Parameter(torch.randn(4, 12)[:, ::2])
        self.scalar = nn.Parameter(torch.tensor(1.5))
        self.empty = nn.Parameter(torch.zeros(0, 4))
        self.narrow = nn.Linear(6, 6).to(torch.bfloat16)
        self.norm = nn.LayerNorm(6)
        self.wide = nn.Parameter(torch.randn(6, dtype=torch.float64))

    def forward(self, seed: int) -> Tensor:
        images = batch(seed, width=3 * 5 * 5).reshape(4, 3, 5, 5)
        hidden = self.convolution(images.contiguous(memory_format=torch.channels_last)).mean((2, 3))
        hidden = hidden @ self.transposed + hidden @ self.sliced * self.scalar + self.empty.sum()
        hidden = self.norm(self.narrow(hidden.to(torch.bfloat16)).float())
        return 3 * (hidden * self.wide).square().mean()


@pytest.mark.parametrize("link", ["auto", torch.float32], ids=str)
@pytest.mark.parametrize("bucket_numel", [50, 1_000_000])
def test_parameters_of_every_layout_and_dtype(bucket_numel: int, link: Any, anywhere: Device) -> None:
    def steps(model: nn.Module, optimizer: SpeculativeCPUAdam) -> None:
        assert not model.transposed.is_contiguous()
        for seed in range(5):
            optimizer.zero_grad()
            model(seed).backward()
            optimizer.step()

    scheduler = twins(
        steps,
        make=Odd,
        scheduled={"device": anywhere, "bucket_numel": bucket_numel, "link_dtype": link, "overlap_forward": True},
        max_grad_norm=4.0,
    )
    counts = scheduler.optimizer.statistics
    assert counts.committed
    assert counts.clipped


@pytest.mark.filterwarnings("ignore:grad and param do not obey the gradient layout contract")
def test_gradients_in_another_layout_than_their_parameters(anywhere: Device) -> None:
    def steps(model: nn.Module, optimizer: SpeculativeCPUAdam) -> None:
        for seed in range(4):
            optimizer.zero_grad()
            for parameter in model.parameters():  # what autograd adds to keeps its layout
                if parameter.ndim == 2:
                    parameter.grad = torch.zeros(parameter.shape[::-1]).t()
            loss_of(model, seed).backward()
            optimizer.step()

    twins(steps, scheduled={"device": anywhere, "bucket_numel": 100})


def test_gradients_that_are_part_of_a_larger_buffer_are_copied(anywhere: Device) -> None:
    """As frameworks keep them, that fill the same buffer again in the next step."""

    def steps(model: nn.Module, optimizer: SpeculativeCPUAdam, *, spoils: bool) -> None:
        flat = torch.zeros(sum(parameter.numel() for parameter in model.parameters()))
        for seed in range(4):
            flat.zero_()
            parts = flat.split([parameter.numel() for parameter in model.parameters()])
            for parameter, part in zip(model.parameters(), parts, strict=True):
                parameter.grad = part.view(parameter.shape)
            loss_of(model, seed).backward()
            if spoils:
                optimizer.state_dict()  # everything is taken by now
                flat.fill_(math.nan)
            optimizer.step()
            if spoils:
                flat.fill_(math.nan)  # and before the commit

    twins(
        lambda model, optimizer: steps(model, optimizer, spoils=True),
        lambda model, optimizer: steps(model, optimizer, spoils=False),
        scheduled={"device": anywhere, "bucket_numel": 1},
    )


def test_sparse_gradient_is_refused_on_an_asynchronous_device(asynchronous: Device) -> None:
    model = nn.Sequential(nn.Embedding(8, 8, sparse=True), nn.Linear(8, 8))
    optimizer = adam(model)
    with eager(optimizer, model, device=asynchronous), changes_nothing(model, optimizer):
        with pytest.raises(TypeError, match="is sparse, expected a dense one"):
            one_step(optimizer, model(batch(0).argmax(-1)).sum())
        optimizer.zero_grad()


# ---- writes while a step is open ------------------------------------------------------------------------------------


def write(model: nn.Module, how: str) -> None:
    with torch.no_grad():
        match how:
            case "part":
                model[2].weight[1:3] = 0.5
            case "whole":
                model[0].bias.fill_(-1.0)
            case "product":
                model[4].weight.mul_(0.5)
            case "nothing":
                model[4].weight.copy_(model[4].weight.clone())
            case "everything":
                for parameter in model.parameters():
                    parameter.add_(0.25)


@pytest.mark.parametrize("how", ["part", "whole", "product", "nothing", "everything"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_parameters_written_between_backward_and_step(dtype: torch.dtype, how: str, anywhere: Device) -> None:
    """As between `speculate()` and `resolve()`: it counts for the written elements, on top of the step.

    Without idle cores parameters do not show the step yet, and it was written before the step.
    """
    limit, is_deferred = math.inf, isinstance(anywhere, DeferredDevice)
    model, twin = mlp(dtype), mlp(dtype)
    optimizer, plain = adam(model, max_grad_norm=limit), adam(twin, max_grad_norm=limit)
    with eager(optimizer, model, device=anywhere, bucket_numel=70) as scheduler:
        for seed in range(4):
            loss_of(model, seed).backward()
            loss_of(twin, seed).backward()
            scheduler.synchronize()
            if not is_deferred:
                plain.speculate()
            if seed % 2:
                write(model, how)
                write(twin, how)
            optimizer.step()
            plain.step()
            plain.zero_grad()
            for one, other in zip(model.parameters(), twin.parameters(), strict=True):
                assert torch.equal(one, other)
    assert everything(model, optimizer) == everything(twin, plain)


@pytest.mark.parametrize("ending", ["skipped", "zero_grad"])
def test_parameters_written_in_a_step_that_comes_to_nothing(ending: str, anywhere: Device) -> None:
    model, twin = mlp(torch.bfloat16), mlp(torch.bfloat16)
    optimizer, plain = adam(model, max_grad_norm=math.inf), adam(twin, max_grad_norm=math.inf)
    with eager(optimizer, model, device=anywhere) as scheduler:
        train(model, optimizer, range(1))
        train(twin, plain, range(1))
        for one in (model, twin):
            (loss_of(one, 1) * (math.nan if ending == "skipped" else 1.0)).backward()
        scheduler.synchronize()
        plain.speculate()
        for one, its in ((model, optimizer), (twin, plain)):
            write(one, "part")
            if ending == "skipped":
                its.resolve()
            its.zero_grad()
            train(one, its, range(2, 4))
    assert everything(model, optimizer) == everything(twin, plain)


# ---- reading what was speculated by hand ----------------------------------------------------------------------------


@pytest.mark.parametrize("make", [ImmediateDevice, ThreadDevice, *ASYNCHRONOUS])
def test_parameters_can_be_read_after_speculating_by_hand(make: Callable[[], Device]) -> None:
    model, twin = mlp(), mlp()
    optimizer, plain = adam(model, max_grad_norm=math.inf), adam(twin, max_grad_norm=math.inf)
    with eager(optimizer, model, device=make()) as scheduler:
        for seed in range(3):
            with scheduler.accumulate():
                loss_of(model[2:], seed).backward()
            loss_of(model, seed).backward()
            loss_of(twin[2:], seed).backward()
            loss_of(twin, seed).backward()
            optimizer.speculate()
            plain.speculate()
            assert shown(optimizer) == shown(plain)
            optimizer.resolve()
            plain.resolve()
    assert everything(model, optimizer) == everything(twin, plain)


def test_forward_cannot_overlap_without_hooks() -> None:
    model = mlp()
    told = "overlap_forward=True needs the hooks that overlap=False leaves out, .*; leave it False with overlap=False"
    with pytest.raises(ValueError, match=told):
        OffloadScheduler(adam(model), model, overlap=False, overlap_forward=True)


def test_overlap_off_on_an_asynchronous_device(asynchronous: Device) -> None:
    twins(
        lambda model, optimizer: train(model, optimizer, range(4)),
        scheduled={"device": asynchronous, "overlap": False},
    )


@pytest.mark.parametrize("overlap", [True, False])
def test_memory_for_staging_does_not_grow_with_the_model(
    overlap: bool, asynchronous: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does it in steps that are clipped or skipped, which write every parameter at once."""
    sizes: list[int] = []
    empty = asynchronous.empty

    def measured(numel: int, dtype: torch.dtype, stream: Stream) -> Tensor:
        sizes.append(numel)
        return empty(numel, dtype, stream)

    def steps(model: nn.Module, optimizer: SpeculativeCPUAdam) -> None:
        for seed in range(6):
            optimizer.zero_grad()
            (loss_of(model, seed) * (math.inf if seed == 4 else 1.0)).backward()
            optimizer.step()

    monkeypatch.setattr(superadam.table, "PARCEL_NUMEL", 200)
    monkeypatch.setattr(asynchronous, "empty", measured)
    scheduler = twins(
        steps,
        make=lambda: mlp(layers=12),
        scheduled={"device": asynchronous, "bucket_numel": 200, "overlap": overlap},
        max_grad_norm=0.1,
    )
    assert scheduler.optimizer.statistics.clipped
    assert scheduler.optimizer.statistics.skipped
    assert max(sizes) < 200 + 2 * 64 * 5 < 12 * 72
