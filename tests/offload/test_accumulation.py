"""Micro-batches: how many make a step is learned; sums are autograd's, or in fp32 on the host."""

import copy
import math
from collections.abc import Callable
from contextlib import nullcontext, suppress
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from support.overlap import (
    DeferredDevice,
    ImmediateDevice,
    PlantedError,
    RaiseInBackward,
    ThreadDevice,
    adam,
    batch,
    eager,
    loss_of,
    mlp,
    train,
)
from support.programs import Story, both
from support.reference import Synchronous, flat, same_bits
from support.visible import bits
from torch import Tensor, nn

from superadam import OffloadScheduler, SpeculativeCPUAdam, StepKind
from superadam.devices import Device
from superadam.kernels.hyperparameters import Hyperparameters
from superadam.offload.buckets import Accumulation
from superadam.offload.transfers import Transfers
from superadam.testing import SimulatedDevice

pytestmark = pytest.mark.timeout(240)

OTHERS: list[Callable[[], Device]] = [
    ThreadDevice,
    DeferredDevice,
    lambda: SimulatedDevice(3, 0.0),
    lambda: SimulatedDevice(5, 0.7),
]


@pytest.fixture(params=[ImmediateDevice, *OTHERS], ids=["immediate", "thread", "deferred", "lazy", "hasty"])
def device(request: pytest.FixtureRequest) -> Device:
    return request.param()


# ---- counts by themselves --------------------------------------------------------------------------------------------


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


def announced(scheduler: OffloadScheduler | None, dtype: torch.dtype | None = torch.float32) -> Any:
    return nullcontext() if scheduler is None else scheduler.accumulate(dtype)


STORIES: dict[str, tuple[Story, dict[str, Any]]] = {}


def tell(name: str, story: Story, **options: Any) -> None:
    """Add a story, and options of `both`."""
    STORIES[name] = story, options


def micro_batches(
    model: Any,
    optimizer: SpeculativeCPUAdam,
    scheduler: OffloadScheduler | None,
    *,
    between: Story = lambda *_: None,
    before_step: Story = lambda *_: None,
    dtype: torch.dtype | None = torch.float32,
    last: slice = slice(None),
) -> list[Any]:
    """Make steps of three micro-batches, of which the last one goes through the layers `last` only."""
    seen = []
    for number in range(3):
        optimizer.zero_grad()
        for micro in range(2):
            with announced(scheduler, dtype):
                loss_of(model, 10 * number + micro).backward()
            between(model, optimizer, scheduler)
        loss_of(model[last], 10 * number + 2).backward()
        seen.append(before_step(model, optimizer, scheduler))
        optimizer.step()
        seen.append(optimizer.last_outcome.kind.value)
    return seen


tell("no gradient but in the first layer at last", partial(micro_batches, last=slice(2)))
tell("fp64", micro_batches, make=lambda: mlp(torch.float64))
for _foreach, _dtype in ((None, torch.float32), (False, torch.float32), (False, None)):

    def _clipped(model, optimizer, scheduler, foreach=_foreach):
        return torch.nn.utils.clip_grad_norm_(model.parameters(), 2.0, foreach=foreach)

    _story = partial(micro_batches, before_step=_clipped, last=slice(2, None), dtype=_dtype)
    tell(f"torch's clipping, {_foreach}, {_dtype}", _story, max_grad_norm=math.inf)


def spoiled(model, optimizer, scheduler):
    for number in range(5):
        optimizer.zero_grad()
        for micro in range(2):
            loss = loss_of(model, micro) * {(1, 0): math.inf, (3, 1): math.nan}.get((number, micro), 1.0)
            with nullcontext() if micro else announced(scheduler):
                loss.backward()
        optimizer.step()
        assert (optimizer.last_outcome.kind is StepKind.SKIPPED) == (number % 2)


def directly_after_a_block(model, optimizer, scheduler):
    kinds = []
    for seed in range(4):
        optimizer.zero_grad()
        with announced(scheduler):
            loss_of(model, seed).backward()
            loss_of(model[2:], seed).backward()
        optimizer.step()
        kinds.append(optimizer.last_outcome.kind.value)
    assert {"committed", "clipped"} == set(kinds)
    return kinds


def added_after_the_sum_was_sent(model, optimizer, scheduler):
    """Also if the worker reads the sum only later."""
    for seed in range(4):
        optimizer.zero_grad()
        with announced(scheduler):
            loss_of(model, seed).backward()
        loss_of(model, seed + 10).backward()
        with announced(scheduler):
            loss_of(model, seed + 20).backward()
        optimizer.step()


def fail(model: nn.Module) -> None:
    x = RaiseInBackward.apply(model[:2](batch(9)), PlantedError("planted"))
    (30 * (model[2:](x) - 1) ** 2).mean().backward()


def failing(model, optimizer, scheduler, *, which):
    """A micro-batch fails when the layers from 2 on have their gradients, which stay until `zero_grad()`."""
    train(model, optimizer, range(2))
    for seed in range(3, 7):
        if which == "last":
            with announced(scheduler):
                loss_of(model, seed).backward()
        with pytest.raises(PlantedError), announced(scheduler) if which == "first" else nullcontext():
            fail(model)
        if seed % 2:
            optimizer.zero_grad()
        loss_of(model, seed + 10).backward()
        optimizer.step()
        optimizer.zero_grad()


def closed(model, optimizer, scheduler, *, dtype):
    """Sums of a scheduler that is closed are in `.grad`."""
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


def mixed(model, optimizer, scheduler, *, dtypes):
    """Sums in `.grad` and on the host flow together."""
    for number in range(4):
        optimizer.zero_grad()
        for micro, dtype in enumerate(dtypes):
            with announced(scheduler, dtype):
                loss_of(model, 10 * number + micro).backward()
        loss_of(model[2:], 10 * number + 3).backward()
        norm = optimizer.clip_grad_norm_(3.0) if number % 2 else None
        optimizer.step()
        assert norm is None or float(norm) == optimizer.last_outcome.grad_norm


def forgotten(model, optimizer, scheduler):
    """`zero_grad()` forgets what was accumulated, within the block and after it."""
    for seed, dtype in enumerate((None, torch.float32)):
        for inside in (False, True):
            with announced(scheduler, dtype):
                loss_of(model, 7).backward()
                if inside:
                    optimizer.zero_grad()
            train(model, optimizer, range(seed, seed + 1))


def scaled(model, optimizer, scheduler, *, unscales):
    """A GradScaler over sums, in one step of which a loss overflows."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    scales = []
    for seed in range(8):
        optimizer.zero_grad()
        with announced(scheduler):
            scaler.scale(loss_of(model, seed) * (math.inf if seed in (2, 5) else 1.0)).backward()
        if seed > 3:
            scaler.scale(loss_of(model[2:], seed)).backward()
        if unscales:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return scales


for _which in ("first", "last"):
    tell(f"{_which} micro-batch fails", partial(failing, which=_which))
for _dtype in (None, torch.float32):
    tell(f"closed, {_dtype}", partial(closed, dtype=_dtype))
tell("in .grad, then on the host", partial(mixed, dtypes=[None, torch.float32, torch.float32]))
tell("on the host, then in .grad", partial(mixed, dtypes=[torch.float32, None]))
for _unscales in (False, True):
    tell(f"GradScaler, unscales {_unscales}", partial(scaled, unscales=_unscales))


def without_a_parameter(model, optimizer, scheduler):
    """The sum of a parameter that is no longer optimized takes no part."""
    with announced(scheduler):
        loss_of(model, 0).backward()
    del optimizer.param_groups[0]["params"][0]
    loss_of(model, 1).backward()
    optimizer.step()
    assert torch.equal(model[0].weight, mlp()[0].weight)
    gradient = model[0].weight.grad
    model.zero_grad()
    return gradient


for _story in (spoiled, directly_after_a_block, added_after_the_sum_was_sent, forgotten, without_a_parameter):
    tell(_story.__name__, _story, max_grad_norm=55.0)


@pytest.mark.parametrize("number", range(len(STORIES)), ids=[*STORIES])
def test_sums_on_the_host_are_those_of_autograd(number: int) -> None:
    story, options = [*STORIES.values()][number]
    for make in (ImmediateDevice, OTHERS[number % len(OTHERS)]):
        both(story, {"device": make()}, **options)


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


READERS: dict[str, Story] = {
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


@pytest.mark.covering(1)
@pytest.mark.parametrize("reader", READERS)
def test_reading_gradients_does_not_change_training(reader: str, device: Device) -> None:
    look = READERS[reader]
    for moment in ("between", "before_step"):

        def silent(*run: Any) -> None:
            look(*run)

        both(partial(micro_batches, **{moment: silent}, last=slice(2, None)), {"device": device})


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
                for i, parameter in enumerate(parameters):
                    assert parameter.grad is not None
                    rounded = torch.from_numpy(sums[i]).to(dtype).reshape(parameter.shape)
                    assert bits(parameter.grad) == bits(rounded)
            optimizer.step()
            optimizer.zero_grad()
            kind, norm = reference.step(sums, hyper, 30.0)
            assert (optimizer.last_outcome.kind, optimizer.last_outcome.grad_norm) == (kind, norm)
            for parameter, one in zip(parameters, reference.parameters, strict=True):
                assert same_bits(flat(parameter, parameter), one.shown)


@pytest.mark.covering(1)
@pytest.mark.parametrize("is_announced", [False, True])
@pytest.mark.parametrize("make", [ImmediateDevice, ThreadDevice, DeferredDevice])
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


@pytest.mark.covering(1)
@pytest.mark.parametrize("error", [MemoryError("planted"), torch.OutOfMemoryError("planted"), ValueError("planted")])
def test_sums_that_cannot_be_sent_are_left_to_the_step(error, device, monkeypatch):
    def cannot(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(Transfers, "download", cannot)
    scheduler = both(micro_batches, {"device": device})
    assert scheduler.statistics.buckets == 0
