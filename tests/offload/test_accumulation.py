"""Micro-batches: how many make a step is learned; sums are autograd's, or in fp32 on the host."""

import math
from collections.abc import Callable
from contextlib import nullcontext, suppress
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from support import overlap
from support.overlap import adam, devices_in_turn, eager, everything, loss_of, mlp, overlapped
from support.programs import both
from support.reference import Synchronous, flat, same_bits
from support.visible import bits
from torch import nn

from superadam import OffloadScheduler, SpeculativeCPUAdam
from superadam.devices import Device
from superadam.kernels.hyperparameters import Hyperparameters
from superadam.offload.buckets import Accumulation
from superadam.offload.transfers import Transfers

pytestmark = pytest.mark.timeout(240)

device = devices_in_turn("device", overlap.ImmediateDevice, overlap.ThreadDevice, overlap.DeferredDevice)


# ---- counts by themselves --------------------------------------------------------------------------------------------


def test_blocks_nest_and_end_with_an_error() -> None:
    micro_batches = Accumulation()
    with micro_batches.accumulate(None):
        assert micro_batches.sum_dtype is None
        with suppress(overlap.PlantedError), micro_batches.accumulate(torch.float32):
            assert micro_batches.sum_dtype is torch.float32
            raise overlap.PlantedError
        assert micro_batches.sum_dtype is None
        assert not micro_batches.is_last(1, is_first=True)
    assert micro_batches.is_last(1, is_first=False)


def test_a_step_that_is_not_announced_counts_after_one_that_was() -> None:
    micro_batches = Accumulation()
    with micro_batches.accumulate(None):
        micro_batches.is_last(1, is_first=True)
    micro_batches.end_step(is_edited=False)
    for expected in ([True, True], [False, True]):
        assert [micro_batches.is_last(1, is_first=first) for first in (True, False)] == expected
        micro_batches.end_step(is_edited=False)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, "float32"])
def test_other_dtypes_are_refused(dtype: Any) -> None:
    told = r"accumulate\(\) got dtype .*, expected None \(that of .grad\) or torch.float32"
    with overlapped() as (_, _, scheduler):
        with pytest.raises(ValueError, match=told), scheduler.accumulate(dtype):
            pass
        assert scheduler._bucketer.accumulation.sum_dtype is None


# ---- in training -----------------------------------------------------------------------------------------------------


def announced(scheduler: OffloadScheduler | None, dtype: torch.dtype | None = torch.float32) -> Any:
    return nullcontext() if scheduler is None else scheduler.accumulate(dtype)


@pytest.mark.parametrize("dtypes", [[None, torch.float32, torch.float32], [torch.float32, None]], ids=str)
def test_sums_in_grad_and_on_the_host_flow_together(dtypes: list[torch.dtype | None], device: Device) -> None:
    def story(model: nn.Module, optimizer: SpeculativeCPUAdam, scheduler: OffloadScheduler | None) -> None:
        for number in range(4):
            optimizer.zero_grad()
            for micro, dtype in enumerate(dtypes):
                with announced(scheduler, dtype):
                    loss_of(model, 10 * number + micro).backward()
            loss_of(model[2:], 10 * number + 3).backward()
            norm = optimizer.clip_grad_norm_(3.0) if number % 2 else None
            optimizer.step()
            assert norm is None or float(norm) == optimizer.last_outcome.grad_norm

    both(story, {"device": device})


@pytest.mark.parametrize("bucket_numel", [1, 10**6])
def test_number_of_micro_batches_is_learned_and_forgotten(bucket_numel: int) -> None:
    """One step wastes speculation, the next ones do not; also where buckets are still being filled."""
    how = {"steps": 2, "max_grad_norm": math.inf, "bucket_numel": bucket_numel}
    with overlapped(torch.bfloat16, **how) as (model, optimizer, scheduler):
        statistics = scheduler.statistics
        for number, count in enumerate([3, 3, 3, 1, 1, 1]):
            before = optimizer.statistics.accepted, statistics.given_back_gradients
            for micro in range(count):
                loss_of(model, micro).backward()
            optimizer.step()
            optimizer.zero_grad()
            accepted = optimizer.statistics.accepted - before[0]
            given_back = statistics.given_back_gradients - before[1]
            if number == 0:
                assert given_back >= 6
            elif number == 3:  # the last one is never seen
                assert (accepted, given_back) == (0, 0)
            else:
                assert (accepted, given_back) == (6, 0)


@pytest.mark.parametrize("dtype", [None, torch.float32], ids=str)
def test_announced_micro_batches_waste_nothing(dtype: torch.dtype | None) -> None:
    with overlapped(torch.bfloat16, steps=2, max_grad_norm=math.inf) as (model, optimizer, scheduler):
        before = scheduler.statistics.buckets
        for _ in range(3):
            for micro in range(3):
                with scheduler.accumulate(dtype) if micro < 2 else nullcontext():
                    loss_of(model, micro).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert scheduler.statistics.buckets - before == 3 * 6
        assert scheduler.statistics.given_back_gradients == scheduler.optimizer.statistics.dropped == 0


# ---- sums on the host ------------------------------------------------------------------------------------------------


@pytest.mark.covering(1)
@pytest.mark.parametrize("retries", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("bucket_numel", [1, 1_000_000])
def test_sums_in_fp32_equal_the_oracle(dtype: torch.dtype, bucket_numel: int, retries: bool, device: Device) -> None:
    """A micro-batch whose backward failed is made again, and what it had added in its first layers counts twice."""
    model, twin = mlp(dtype), mlp(dtype)
    optimizer = adam(model, max_grad_norm=30.0)
    parameters = list(model.parameters())
    reference = Synchronous(parameters)
    hyper = [Hyperparameters.of_group(optimizer.param_groups[0])] * len(parameters)
    with eager(optimizer, model, bucket_numel=bucket_numel, device=device) as scheduler:
        for number in range(4):
            twin.load_state_dict(model.state_dict())
            sums: dict[int, np.ndarray[Any, Any]] = {}
            for micro in range(3):
                for begin in (2, 2 * (micro % 2)) if retries else (2 * (micro % 2),):
                    used = slice(2 if micro == 2 else begin, None)  # the sum of the first layer is left for the step
                    twin.zero_grad()
                    loss_of(twin[used], 10 * number + micro).backward()
                    for i, parameter in enumerate(twin.parameters()):
                        if parameter.grad is not None:
                            one = flat(parameter.grad, parameter)
                            sums[i] = sums[i] + one if i in sums else one
                    with announced(scheduler) if micro < 2 else nullcontext():
                        loss_of(model[used], 10 * number + micro).backward()
                    for one in scheduler._bucketer._filling.values():
                        assert one.numel == sum(piece.shape.numel() for piece in one.gradients)
                for i, parameter in enumerate(parameters):
                    assert parameter.grad is not None
                    assert bits(parameter.grad) == bits(torch.from_numpy(sums[i]).to(dtype).reshape(parameter.shape))
            optimizer.step()
            optimizer.zero_grad()
            optimizer.load_state_dict(optimizer.state_dict())  # after which nothing is bound
            kind, norm = reference.step(sums, hyper, 30.0)
            assert (optimizer.last_outcome.kind, optimizer.last_outcome.grad_norm) == (kind, norm)
            for parameter, one in zip(parameters, reference.parameters, strict=True):
                assert same_bits(flat(parameter, parameter), one.shown)


def test_sums_that_are_kept_over_the_end_of_a_scheduler_are_added_to() -> None:
    class LinkedDevice(overlap.ThreadDevice):
        has_link = True

        def is_host(self, tensor: torch.Tensor) -> bool:
            return tensor.dtype == torch.float32

    with overlapped(torch.bfloat16, device=LinkedDevice()) as (model, optimizer, scheduler):
        with scheduler.accumulate(torch.float32):
            loss_of(model, 0).backward()
        kept = [parameter.grad for parameter in model.parameters()]
        optimizer.zero_grad()
    for parameter, gradient in zip(model.parameters(), kept, strict=True):
        parameter.grad = gradient
    loss_of(model, 1).backward()
    assert optimizer.step() is None
    assert optimizer.last_outcome.grad_norm > 0


def test_adding_to_sums_after_a_step_leaves_what_is_to_be_committed() -> None:
    ends = []
    for commits in (False, True):
        with overlapped(torch.bfloat16, max_grad_norm=None) as (model, optimizer, scheduler):
            for number in range(3):
                with announced(scheduler):
                    loss_of(model, number).backward()
                loss_of(model, 9).backward()
                optimizer.step()
                if commits:
                    optimizer.commit()
            ends.append(everything(model, optimizer))
    assert ends[0] == ends[1]


@pytest.mark.covering(1)
@pytest.mark.parametrize("is_announced", [False, True])
@pytest.mark.parametrize("make", [overlap.ImmediateDevice, overlap.ThreadDevice, overlap.DeferredDevice])
def test_narrow_link_leaves_sums_on_the_host_as_they_are(make: Callable[[], Device], is_announced: bool) -> None:
    """They do not travel; sums in `.grad` are rounded once, also those that no later backward touched."""

    def story(model: nn.Module, optimizer: SpeculativeCPUAdam, scheduler: OffloadScheduler | None) -> None:
        for number in range(3):
            optimizer.zero_grad()
            with announced(scheduler, torch.float32 if is_announced else None):
                loss_of(model, 10 * number).backward()
            loss_of(model[2:], 10 * number + 1).backward()
            if scheduler is None and not is_announced:
                for parameter in model.parameters():
                    parameter.grad = parameter.grad.bfloat16().float()
            norm = optimizer.clip_grad_norm_(5.0)
            optimizer.step()
            assert optimizer.last_outcome.grad_norm == float(norm)

    both(story, {"device": make(), "transfer_dtype": torch.bfloat16})


@pytest.mark.parametrize("error", [MemoryError("planted"), torch.OutOfMemoryError("planted"), ValueError("planted")])
def test_sums_that_cannot_be_sent_are_left_to_the_step(error, device, monkeypatch):
    monkeypatch.setattr(Transfers, "download", Mock(side_effect=error))

    def story(model: nn.Module, optimizer: SpeculativeCPUAdam, scheduler: OffloadScheduler | None) -> None:
        with announced(scheduler):
            loss_of(model, 0).backward()
            loss_of(model, 1).backward()
        loss_of(model, 2).backward()
        optimizer.step()

    scheduler = both(story, {"device": device})
    assert scheduler.statistics.buckets == 0


@pytest.mark.parametrize("is_first", [True, False])
def test_a_micro_batch_that_cannot_be_added_leaves_the_gradient_as_it_was(is_first, monkeypatch):
    """The program goes on with what it has: one that was to begin a sum, or a sum that was scaled and sent already."""

    def story(model: nn.Module, optimizer: SpeculativeCPUAdam, scheduler: OffloadScheduler | None) -> Any:
        def backward(number: int, *, is_last: bool, fails: bool = False) -> None:
            with monkeypatch.context() as patch, nullcontext() if is_last else announced(scheduler):
                if fails and scheduler is not None:
                    patch.setattr(scheduler, "_adds", Mock(side_effect=MemoryError("planted")))
                with pytest.raises(MemoryError) if fails and scheduler is not None else nullcontext():
                    loss_of(model, number).backward()

        seen = []
        for number in range(3):
            optimizer.zero_grad()
            backward(number, is_last=False, fails=is_first)
            if not is_first:
                backward(number + 10, is_last=True)
            model.weight.grad.mul_(0.3)
            if not is_first and scheduler is not None:
                backward(number + 20, is_last=True, fails=True)
            seen.append(model.weight.grad.clone())
            optimizer.step()
        return seen

    def make() -> nn.Module:
        model = mlp(layers=1)[0]
        model.bias.requires_grad_(False)
        return model

    both(story, {"device": overlap.ImmediateDevice()}, make, max_grad_norm=None)
