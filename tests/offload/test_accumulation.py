"""Micro-batches: how many make a step is learned; sums are autograd's, or in fp32 on the host."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from contextlib import nullcontext, suppress
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.overlap import (
    DeferredDevice,
    ImmediateDevice,
    PlantedError,
    RaiseInBackward,
    ThreadDevice,
    adam,
    batch,
    eager,
    everything,
    loss_of,
    mlp,
    train,
)
from support.reference import Synchronous, flat, same_bits
from support.visible import bits
from torch import Tensor, nn

from superadam import OffloadScheduler, SpeculativeCPUAdam, StepKind
from superadam.devices import Device
from superadam.devices.worker import WorkerError
from superadam.handles.gradient_handle import taken_of
from superadam.kernels.hyperparameters import Hyperparameters
from superadam.offload.accumulation import PAUSE_STEPS, Accumulation
from superadam.offload.transfers import Transfers
from superadam.testing import SimulatedDevice

pytestmark = pytest.mark.timeout(240)

DEVICES = [
    ImmediateDevice,
    ThreadDevice,
    DeferredDevice,
    pytest.param(lambda: SimulatedDevice(3, 0.0), id="lazy device"),
    pytest.param(lambda: SimulatedDevice(5, 0.7), id="hasty device"),
]


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> Device:
    one: Device = request.param()
    return one


# ---- counts by themselves --------------------------------------------------------------------------------------------


def step(micro_batches: Accumulation, count: int, parameter: int = 1, *, is_edited: bool = False) -> list[bool]:
    said = [micro_batches.is_last(parameter, is_first=micro == 0) for micro in range(count)]
    micro_batches.end_step(is_edited=is_edited)
    return said


@given(st.lists(st.integers(1, 5), min_size=1, max_size=6))
def test_each_step_is_expected_to_be_as_the_one_before(counts: list[int]) -> None:
    micro_batches = Accumulation()
    expected = 1
    for count in counts:
        assert step(micro_batches, count) == [micro + 1 >= expected for micro in range(count)]
        expected = count


def test_parameters_are_counted_one_by_one() -> None:
    micro_batches = Accumulation()
    for _ in range(2):
        said = [micro_batches.is_last(key, is_first=micro == 0) for micro in range(3) for key in (1, 2) if micro < key]
        micro_batches.end_step(is_edited=False)
    assert said == [True, False, True]


def test_what_is_announced_is_not_learned() -> None:
    micro_batches = Accumulation()
    for _ in range(3):
        with micro_batches.accumulate(None):
            said = [micro_batches.is_last(1, is_first=micro == 0) for micro in range(2)]
        assert said == [False, False]
        assert micro_batches.is_last(1, is_first=False)
        micro_batches.end_step(is_edited=False)
    assert step(micro_batches, 1) == [True]


def test_announcement_ends_with_the_step() -> None:
    micro_batches = Accumulation()
    assert step(micro_batches, 3) == [True] * 3
    with micro_batches.accumulate(None):
        assert not micro_batches.is_last(1, is_first=True)
    assert micro_batches.is_last(1, is_first=False)  # although three were expected
    micro_batches.end_step(is_edited=False)
    assert step(micro_batches, 2) == [True, True]
    assert step(micro_batches, 2) == [False, True]


def test_gradient_that_was_added_to_one_of_before_counts_as_one() -> None:
    """As after a backward before the hooks were there, which nobody has counted."""
    micro_batches = Accumulation()
    for micro in range(2):
        micro_batches.is_last(1, is_first=micro == 0)
    micro_batches.end_step(is_edited=False)
    assert [micro_batches.is_last(1, is_first=False) for _ in range(2)] == [False, True]


def test_edits_pause_and_end() -> None:
    micro_batches = Accumulation()
    assert step(micro_batches, 1, is_edited=True) == [True]
    for _ in range(PAUSE_STEPS):
        assert step(micro_batches, 2) == [False, False]
    assert step(micro_batches, 2) == [False, True]  # what was learned meanwhile


def test_blocks_nest_and_end_with_an_error() -> None:
    micro_batches = Accumulation()
    with micro_batches.accumulate(None):
        assert micro_batches.sum_dtype is None
        with suppress(PlantedError), micro_batches.accumulate(torch.float32):
            assert micro_batches.sum_dtype is torch.float32
            raise PlantedError
        assert micro_batches.sum_dtype is None
        assert not micro_batches.is_last(1, is_first=True)
    assert micro_batches.is_last(1, is_first=False)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, "float32"])
def test_other_dtypes_are_refused(dtype: Any) -> None:
    model = mlp()
    told = r"accumulate\(\) got dtype .*, expected None \(that of .grad\) or torch.float32"
    with eager(adam(model), model) as scheduler:
        with pytest.raises(ValueError, match=told), scheduler.accumulate(dtype):
            pass
        assert scheduler._bucketer.accumulation.sum_dtype is None


# ---- in training -----------------------------------------------------------------------------------------------------

Moment = Callable[[nn.Module, SpeculativeCPUAdam, OffloadScheduler | None], object]


def announced(scheduler: OffloadScheduler | None, dtype: torch.dtype | None) -> Any:
    return nullcontext() if scheduler is None else scheduler.accumulate(dtype)


def micro_batches(
    model: nn.Module,
    optimizer: SpeculativeCPUAdam,
    scheduler: OffloadScheduler | None,
    *,
    between: Moment = lambda *_: None,
    before_step: Moment = lambda *_: None,
    announces: bool = True,
    dtype: torch.dtype | None = torch.float32,
    last: Callable[[nn.Module], nn.Module] = lambda model: model,
) -> None:
    """Make steps of three micro-batches, of which the last one goes through `last(model)` only."""
    for number in range(4):
        optimizer.zero_grad()
        for micro in range(2):
            with announced(scheduler, dtype) if announces else nullcontext():
                loss_of(model, 10 * number + micro).backward()
            between(model, optimizer, scheduler)
        loss_of(last(model), 10 * number + 2).backward()
        before_step(model, optimizer, scheduler)
        optimizer.step()
    optimizer.zero_grad()


def both(
    story: Callable[[nn.Module, SpeculativeCPUAdam, OffloadScheduler | None], None],
    device: Device,
    make: Callable[[], nn.Module] = mlp,
    bucket_numel: int = 1,
    **options: Any,
) -> OffloadScheduler:
    """Run a story with and without a scheduler; the bits agree."""
    model, twin = make(), make()
    optimizer, plain = adam(model, **options), adam(twin, **options)
    with eager(optimizer, model, device=device, bucket_numel=bucket_numel) as scheduler:
        story(model, optimizer, scheduler)
    story(twin, plain, None)
    assert everything(model, optimizer) == everything(twin, plain)
    assert optimizer.statistics.steps == plain.statistics.steps
    assert repr(optimizer.last_outcome) == repr(plain.last_outcome)  # NaN equals nothing
    return scheduler


@pytest.mark.parametrize("announces", [False, True])
@pytest.mark.parametrize("bucket_numel", [1, 70, 10**6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_accumulated_gradients_are_those_of_autograd(
    dtype: torch.dtype, bucket_numel: int, announces: bool, device: Device
) -> None:
    both(
        lambda *run: micro_batches(*run, announces=announces, dtype=None),
        device,
        lambda: mlp(dtype),
        bucket_numel,
    )


@pytest.mark.parametrize("bucket_numel", [1, 10**6])
@pytest.mark.parametrize("counts", [[3] * 6, [1, 4, 1, 4, 4, 1], [2, 2, 1, 1, 3, 3], [3, 0, 3, 3, 0, 3]], ids=str)
def test_any_numbers_of_micro_batches(counts: list[int], bucket_numel: int, device: Device) -> None:
    def stories(model: nn.Module, optimizer: SpeculativeCPUAdam, scheduler: OffloadScheduler | None) -> None:
        for number, count in enumerate(counts):
            for micro in range(count):
                loss_of(model[2 * (micro % 2) :], 10 * number + micro).backward()
            optimizer.step()
            optimizer.zero_grad()

    both(stories, device, lambda: mlp(torch.bfloat16), bucket_numel)


@pytest.mark.parametrize("bucket_numel", [1, 10**6])
def test_number_of_micro_batches_is_learned_and_forgotten(bucket_numel: int) -> None:
    """One step wastes speculation, the next ones do not; also where buckets are still being filled."""
    model = mlp(torch.bfloat16)
    optimizer = adam(model, max_grad_norm=math.inf)
    with eager(optimizer, model, bucket_numel=bucket_numel) as scheduler:
        train(model, optimizer, range(2))
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
    model = mlp(torch.bfloat16)
    optimizer = adam(model, max_grad_norm=math.inf)
    with eager(optimizer, model) as scheduler:
        train(model, optimizer, range(2))
        before = scheduler.statistics.buckets
        for _ in range(3):
            for micro in range(3):
                with scheduler.accumulate(dtype) if micro < 2 else nullcontext():
                    loss_of(model, micro).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert scheduler.statistics.buckets - before == 3 * 6
        assert scheduler.statistics.given_back_gradients == scheduler.optimizer.statistics.dropped == 0


READERS: dict[str, Moment] = {
    "the model's state dict": lambda model, optimizer, scheduler: model.state_dict(),
    "the state dict": lambda model, optimizer, scheduler: optimizer.state_dict(),
    "the state": lambda model, optimizer, scheduler: optimizer.state,
    "the gradients": lambda model, optimizer, scheduler: [p.grad.sum().item() for p in model.parameters()],
    "commit": lambda model, optimizer, scheduler: optimizer.commit(),
    "rollback": lambda model, optimizer, scheduler: optimizer.rollback(),
    "reload": lambda model, optimizer, scheduler: optimizer.reload_masters(),
    "synchronize": lambda model, optimizer, scheduler: scheduler and scheduler.synchronize(),
    "place": lambda model, optimizer, one: one and one.placement.num_threads and one.place(num_threads=1),
    "an evaluation": lambda model, optimizer, scheduler: loss_of(model, 99),
    "a copy": lambda model, optimizer, scheduler: copy.deepcopy((model, optimizer)),
    "a rate that changes": lambda model, optimizer, scheduler: optimizer.param_groups[0].update(lr=0.03),
    "a norm": lambda model, optimizer, scheduler: optimizer.clip_grad_norm_(3.0),
    "a norm of torch": lambda model, optimizer, scheduler: torch.nn.utils.get_total_norm(
        [p.grad for p in model.parameters()]
    ),
    "a group": lambda model, optimizer, scheduler: optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]}),
    "a checkpoint": lambda model, optimizer, scheduler: optimizer.load_state_dict(optimizer.state_dict()),
}


@pytest.mark.parametrize(("announces", "when"), [(True, "between"), (False, "between"), (True, "before_step")])
@pytest.mark.parametrize("reader", READERS)
def test_reading_gradients_does_not_change_training(reader: str, announces: bool, when: str, device: Device) -> None:
    """With fp32 gradients, of which sums on the host have the bits of autograd's."""
    both(
        lambda *run: micro_batches(*run, announces=announces, last=lambda model: model[2:], **{when: READERS[reader]}),
        device,
    )


@pytest.mark.parametrize("last", [slice(2, None), slice(4, None), slice(0, 2)], ids=["2:", "4:", ":2"])
def test_parameters_without_a_gradient_in_the_last_backward_keep_their_sums(last: slice, device: Device) -> None:
    both(lambda *run: micro_batches(*run, last=lambda model: model[last]), device)


# ---- sums on the host ------------------------------------------------------------------------------------------------


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
                for used in (
                    (slice(2, None), slice(2 * (micro % 2), None)) if retries else (slice(2 * (micro % 2), None),)
                ):
                    if micro == 2:
                        used = slice(2, None)  # the sum of the first layer is left for the step
                    twin.zero_grad()
                    loss_of(twin[used], 10 * number + micro).backward()
                    for i, parameter in enumerate(twin.parameters()):
                        if parameter.grad is not None:
                            one = flat(parameter.grad, parameter)
                            sums[i] = sums[i] + one if i in sums else one
                    with announced(scheduler, torch.float32) if micro < 2 else nullcontext():
                        loss_of(model[used], 10 * number + micro).backward()
                for i, parameter in enumerate(parameters):
                    assert parameter.grad is not None
                    rounded = torch.from_numpy(sums[i]).to(dtype).reshape(parameter.shape)
                    assert bits(parameter.grad) == bits(rounded)
            optimizer.step()
            optimizer.zero_grad()
            kind, norm = reference.step(sums, hyper, 30.0)
            assert optimizer.last_outcome is not None
            assert (optimizer.last_outcome.kind, optimizer.last_outcome.grad_norm) == (kind, norm)
            for parameter, one in zip(parameters, reference.parameters, strict=True):
                assert same_bits(flat(parameter, parameter), one.shown)


def test_sums_take_no_memory_of_the_device(device: Device) -> None:
    """They are handles over fp32 on the host."""
    model = mlp(torch.bfloat16)
    optimizer = adam(model)
    with eager(optimizer, model, device=device) as scheduler:
        with scheduler.accumulate(torch.float32):
            loss_of(model, 0).backward()
        taken = [taken_of(parameter.grad) for parameter in model.parameters()]
        assert all(one is not None and one.is_unrounded and one.pending.dtype == torch.float32 for one in taken)
        if isinstance(device, SimulatedDevice):
            assert not device._blocks


def test_step_directly_after_a_block(device: Device) -> None:
    def stories(model: nn.Module, optimizer: SpeculativeCPUAdam, scheduler: OffloadScheduler | None) -> None:
        for seed in range(4):
            optimizer.zero_grad()
            with announced(scheduler, torch.float32):
                loss_of(model, seed).backward()
                loss_of(model[2:], seed).backward()
            optimizer.step()

    scheduler = both(stories, device, max_grad_norm=55.0)
    assert scheduler.optimizer.statistics.committed
    assert scheduler.optimizer.statistics.clipped


def test_what_is_added_after_a_sum_was_sent_counts(device: Device) -> None:
    """Also if the worker reads the sum only later."""

    def stories(model: nn.Module, optimizer: SpeculativeCPUAdam, scheduler: OffloadScheduler | None) -> None:
        for seed in range(4):
            optimizer.zero_grad()
            with announced(scheduler, torch.float32):
                loss_of(model, seed).backward()
            loss_of(model, seed + 10).backward()
            with announced(scheduler, torch.float32):
                loss_of(model, seed + 20).backward()
            optimizer.step()

    both(stories, device, max_grad_norm=55.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_norm_between_last_backward_and_step_is_that_of_the_step(dtype: torch.dtype, device: Device) -> None:
    model = mlp(dtype)
    optimizer = adam(model)
    with eager(optimizer, model, device=device) as scheduler:
        for seed in range(3):
            with scheduler.accumulate(torch.float32):
                loss_of(model, seed).backward()
            with scheduler.accumulate():
                loss_of(model[4:], seed).backward()
            loss_of(model[2:], seed + 10).backward()
            norm = optimizer.clip_grad_norm_(2.5)
            optimizer.step()
            optimizer.zero_grad()
            assert optimizer.last_outcome is not None
            assert optimizer.last_outcome.grad_norm == float(norm) > 2.5
            assert optimizer.last_outcome.kind is StepKind.CLIPPED


def test_norm_sees_everything_and_limits_the_step(device: Device) -> None:
    norms: list[float] = []

    def clip(model: nn.Module, optimizer: SpeculativeCPUAdam, scheduler: OffloadScheduler | None) -> None:
        norms.append(float(optimizer.clip_grad_norm_(3.0)))

    both(lambda *run: micro_batches(*run, before_step=clip, last=lambda model: model[2:]), device)
    assert norms[:4] == norms[4:]


@pytest.mark.parametrize("dtype", [None, torch.float32], ids=str)
@pytest.mark.parametrize("foreach", [None, False])
def test_clipping_by_torch_over_sums(foreach: bool | None, dtype: torch.dtype | None, device: Device) -> None:
    model, twin = mlp(), mlp()
    optimizer, plain = adam(model, max_grad_norm=math.inf), adam(twin, max_grad_norm=math.inf)

    def clip(model: nn.Module, optimizer: SpeculativeCPUAdam, scheduler: OffloadScheduler | None) -> None:
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 2.0, foreach=foreach))

    norms: list[Tensor] = []
    with eager(optimizer, model, device=device) as scheduler:
        micro_batches(model, optimizer, scheduler, before_step=clip, last=lambda model: model[2:], dtype=dtype)
    micro_batches(twin, plain, None, before_step=clip, last=lambda model: model[2:])
    assert everything(model, optimizer) == everything(twin, plain)
    assert bits(torch.stack(norms[:4])) == bits(torch.stack(norms[4:]))


@pytest.mark.parametrize("bad", [math.inf, math.nan])
@pytest.mark.parametrize("at", [0, 1])
def test_bad_micro_batch_spoils_the_step_alone(bad: float, at: int, device: Device) -> None:
    def stories(model: nn.Module, optimizer: SpeculativeCPUAdam, scheduler: OffloadScheduler | None) -> None:
        for number in range(3):
            optimizer.zero_grad()
            for micro in range(2):
                loss = loss_of(model, micro) * (bad if (number, micro) == (1, at) else 1.0)
                with nullcontext() if micro else announced(scheduler, torch.float32):
                    loss.backward()
            optimizer.step()
            assert optimizer.last_outcome is not None
            assert (optimizer.last_outcome.kind is StepKind.SKIPPED) == (number == 1)

    both(stories, device)


def fail(model: nn.Module) -> None:
    """Run a backward that fails when the layers from 2 on have their gradients."""
    x = RaiseInBackward.apply(model[:2](batch(9)), PlantedError("planted"))
    (30 * (model[2:](x) - 1) ** 2).mean().backward()


@pytest.mark.covering(3)
@pytest.mark.parametrize("then", ["zero_grad", "go on"])
@pytest.mark.parametrize("which", ["first", "last"])
@pytest.mark.parametrize("dtype", [None, torch.float32], ids=str)
def test_micro_batch_that_fails(dtype: torch.dtype | None, which: str, then: str, device: Device) -> None:
    """What was added before stays, as in `.grad`, until `zero_grad()`; no step is dropped."""

    def stories(model: nn.Module, optimizer: SpeculativeCPUAdam, scheduler: OffloadScheduler | None) -> None:
        train(model, optimizer, range(2))
        for seed in range(3, 6):
            if which == "last":
                with announced(scheduler, dtype):
                    loss_of(model, seed).backward()
            with (
                pytest.raises(PlantedError),
                announced(scheduler, dtype) if which == "first" else nullcontext(),
            ):
                fail(model)
            if then == "zero_grad":
                optimizer.zero_grad()
            loss_of(model, seed + 10).backward()
            optimizer.step()
            optimizer.zero_grad()
        train(model, optimizer, range(4, 6))

    both(stories, device)


@pytest.mark.parametrize("dtype", [None, torch.float32], ids=str)
@pytest.mark.parametrize("inside", [False, True])
def test_zero_grad_forgets_what_was_accumulated(dtype: torch.dtype | None, inside: bool, device: Device) -> None:
    model, expected = mlp(), mlp()
    optimizer, twin = adam(model), adam(expected)
    train(expected, twin, range(1))
    with eager(optimizer, model, device=device) as scheduler:
        with scheduler.accumulate(dtype):
            loss_of(model, 7).backward()
            if inside:
                optimizer.zero_grad()
        train(model, optimizer, range(1))
    assert everything(model, optimizer) == everything(expected, twin)


@pytest.mark.parametrize("dtype", [None, torch.float32], ids=str)
def test_sums_of_a_scheduler_that_is_closed_are_in_grad(dtype: torch.dtype | None, device: Device) -> None:
    def stories(model: nn.Module, optimizer: SpeculativeCPUAdam, scheduler: OffloadScheduler | None) -> None:
        train(model, optimizer, range(1))
        with announced(scheduler, dtype):
            loss_of(model, 7).backward()
            loss_of(model, 8).backward()
        if scheduler is not None:
            scheduler.close()
            assert all(type(parameter.grad) is Tensor for parameter in model.parameters())
            scheduler = eager(optimizer, model, device=ImmediateDevice())
        loss_of(model, 9).backward()
        optimizer.step()
        optimizer.zero_grad()
        train(model, optimizer, range(1, 2))
        if scheduler is not None:
            scheduler.close()

    both(stories, device)


@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize("dtypes", [[None, torch.float32, torch.float32], [torch.float32, None]], ids=str)
def test_sums_in_grad_and_on_the_host_flow_together(
    dtypes: list[torch.dtype | None], clips: bool, device: Device
) -> None:
    def stories(model: nn.Module, optimizer: SpeculativeCPUAdam, scheduler: OffloadScheduler | None) -> None:
        for number in range(3):
            optimizer.zero_grad()
            for micro, dtype in enumerate(dtypes):
                with announced(scheduler, dtype):
                    loss_of(model, 10 * number + micro).backward()
            loss_of(model[2:], 10 * number + 3).backward()
            norm = optimizer.clip_grad_norm_(3.0) if clips else None
            optimizer.step()
            assert optimizer.last_outcome is not None
            assert norm is None or float(norm) == optimizer.last_outcome.grad_norm

    both(stories, device)


def test_fp64_parameters_lose_nothing_in_sums_on_the_host(device: Device) -> None:
    both(micro_batches, device, lambda: mlp(torch.float64))


def test_sparse_gradients_are_left_to_the_step(device: Device) -> None:
    model = nn.Sequential(nn.Embedding(8, 8, sparse=True), nn.Linear(8, 8))
    optimizer = adam(model)
    with eager(optimizer, model, device=device) as scheduler:
        for _ in range(2):
            with scheduler.accumulate(torch.float32):
                model(batch(0).argmax(-1)).sum().backward()
        with pytest.raises(TypeError, match="is sparse, expected a dense one"):
            optimizer.step()
        optimizer.zero_grad()
        optimizer.step()
        assert not optimizer.state


@pytest.mark.parametrize("is_announced", [False, True])
@pytest.mark.parametrize("make", [ImmediateDevice, ThreadDevice, DeferredDevice])
def test_narrow_link_leaves_sums_on_the_host_as_they_are(make: Callable[[], Device], is_announced: bool) -> None:
    """They do not travel; sums in `.grad` are rounded once, also those that no later backward touched."""
    model, twin = mlp(), mlp()
    optimizer, plain = adam(model), adam(twin)
    with eager(optimizer, model, device=make(), transfer_dtype=torch.bfloat16) as scheduler:
        for number in range(3):
            optimizer.zero_grad()
            with scheduler.accumulate(torch.float32 if is_announced else None):
                loss_of(model, 10 * number).backward()
            loss_of(model[2:], 10 * number + 1).backward()
            norm = optimizer.clip_grad_norm_(5.0)
            optimizer.step()
            assert optimizer.last_outcome is not None
            assert optimizer.last_outcome.grad_norm == float(norm)
    optimizer.zero_grad()
    for number in range(3):
        plain.zero_grad()
        loss_of(twin, 10 * number).backward()
        loss_of(twin[2:], 10 * number + 1).backward()
        for parameter in twin.parameters():
            assert parameter.grad is not None
            if not is_announced:
                parameter.grad = parameter.grad.bfloat16().float()
        plain.clip_grad_norm_(5.0)
        plain.step()
    plain.zero_grad()
    assert everything(model, optimizer) == everything(twin, plain)


@pytest.mark.parametrize("then", ["step", "zero_grad"])
def test_worker_that_fails_on_sums(then: str, device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    def stories(model: nn.Module, optimizer: SpeculativeCPUAdam, scheduler: OffloadScheduler | None) -> None:
        train(model, optimizer, range(1))
        with announced(scheduler, torch.float32):
            loss_of(model, 7).backward()
        with monkeypatch.context() as patch:
            if scheduler is not None and scheduler._pipeline is not None:
                patch.setattr(scheduler._pipeline, "_speculate", stumble)
            loss_of(model[2:], 7).backward()
            if scheduler is not None and scheduler.placement.num_threads:
                with pytest.raises(WorkerError, match="planted"):
                    optimizer.step()
        if then == "zero_grad":
            optimizer.zero_grad()
        optimizer.step()
        optimizer.zero_grad()
        train(model, optimizer, range(1, 3))

    both(stories, device)


@pytest.mark.covering(1)
@pytest.mark.parametrize("error", [MemoryError("planted"), torch.OutOfMemoryError("planted"), ValueError("planted")])
def test_sums_that_cannot_be_sent_are_left_to_the_step(
    error: Exception, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cannot(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(Transfers, "download", cannot)
    scheduler = both(micro_batches, device)
    assert scheduler.statistics.buckets == 0


def stumble(*_: object, **__: object) -> None:
    raise PlantedError("planted")


# ---- sums of parameters that are bound again -------------------------------------------------------------------------


def test_sum_of_a_parameter_that_is_no_longer_optimized_takes_no_part(device: Device) -> None:
    def stories(model: nn.Module, optimizer: SpeculativeCPUAdam, scheduler: OffloadScheduler | None) -> None:
        with announced(scheduler, torch.float32):
            loss_of(model, 0).backward()
        del optimizer.param_groups[0]["params"][0]
        loss_of(model, 1).backward()
        optimizer.step()
        assert torch.equal(model[0].weight, mlp()[0].weight)
        assert model[0].weight.grad is not None
        grads.append(bits(model[0].weight.grad))
        model.zero_grad()

    grads: list[Any] = []
    both(stories, device)
    assert grads[0] == grads[1]


# ---- sums and loss scaling -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("unscales", [False, True])
@pytest.mark.parametrize("rest", [False, True])
def test_grad_scaler_of_torch_over_sums(rest: bool, unscales: bool, device: Device) -> None:
    scales: list[list[float]] = []

    def stories(model: nn.Module, optimizer: SpeculativeCPUAdam, scheduler: OffloadScheduler | None) -> None:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
        scales.append([])
        for seed in range(5):
            optimizer.zero_grad()
            with announced(scheduler, torch.float32):
                scaler.scale(loss_of(model, seed) * (math.inf if seed == 2 else 1.0)).backward()
            if rest:
                scaler.scale(loss_of(model[2:], seed)).backward()
            if unscales:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            scales[-1].append(scaler.get_scale())
        optimizer.zero_grad()

    both(stories, device)
    assert scales[0] == scales[1]


def test_cost_of_a_micro_batch_does_not_grow_with_the_optimizer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its parameters are looked through in step(), not for every gradient."""
    model = mlp(layers=10)
    optimizer = adam(model)
    with eager(optimizer, model) as scheduler:
        train(model, optimizer, range(1))
        asked: list[int] = []
        bound = optimizer._binding.bound
        monkeypatch.setattr(optimizer._binding, "bound", lambda groups: (asked.append(1), bound(groups))[1])
        for dtype in (None, torch.float32):
            with scheduler.accumulate(dtype):
                loss_of(model, 0).backward()
        loss_of(model, 0).backward()
        assert not asked
