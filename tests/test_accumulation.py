"""Micro-batches are added up in the order of their arrival; sums on the host wait for the step."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from contextlib import nullcontext, suppress
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
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
from torch import Tensor, nn
from visible import bits

from superadam import GradScaler, OffloadScheduler, SpeculativeCPUAdam, StepKind
from superadam.accumulation import Accumulation
from superadam.devices import Device
from superadam.devices.simulated import SimulatedDevice
from superadam.parameter import ParameterState
from superadam.transfers import Transfers

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


def state_of(tensor: Tensor) -> ParameterState:
    return ParameterState(nn.Parameter(tensor), 0, "weight")


# ---- sums by themselves ----------------------------------------------------------------------------------------------


def test_gradient_outside_a_block_is_passed_on_as_it_is() -> None:
    accumulation, gradient = Accumulation(), torch.ones(3)
    assert not accumulation.is_in_grad
    assert accumulation.add(state_of(torch.ones(3)), gradient) is gradient
    assert accumulation.take() == {}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_sum_is_one_of_the_dtype_of_the_master(dtype: torch.dtype) -> None:
    accumulation, state = Accumulation(), state_of(torch.zeros(70, dtype=dtype))
    gradients = [torch.randn(70, generator=torch.Generator().manual_seed(i)).to(dtype) for i in range(4)]
    with accumulation.during(torch.float32):
        assert all(accumulation.add(state, gradient) is None for gradient in gradients[:3])
    total = accumulation.add(state, gradients[3])
    assert total is not None
    expected = gradients[0].to(state.dtype)
    for gradient in gradients[1:]:
        expected = expected + gradient.to(state.dtype)
    assert bits(total) == bits(expected)
    assert accumulation.take() == {}


@given(st.lists(st.lists(st.floats(width=32), min_size=5, max_size=5), min_size=1, max_size=6))
def test_micro_batches_are_added_in_the_order_of_their_arrival(values: list[list[float]]) -> None:
    accumulation, state = Accumulation(), state_of(torch.zeros(5))
    gradients = [torch.tensor(row, dtype=torch.float32) for row in values]
    with accumulation.during(torch.float32):
        for gradient in gradients:
            accumulation.add(state, gradient)
    (total,) = accumulation.take().values()
    expected = gradients[0]
    for gradient in gradients[1:]:
        expected = expected + gradient
    assert bits(total) == bits(expected)


def test_sum_lies_as_the_state_does_and_shares_no_memory() -> None:
    accumulation = Accumulation()
    state = state_of(torch.randn(3, 4, 5, 6).contiguous(memory_format=torch.channels_last))
    gradient = torch.randn(3, 4, 5, 6)
    expected = 2 * gradient
    with accumulation.during(torch.float32):
        accumulation.add(state, gradient)
        accumulation.add(state, gradient)
        gradient.zero_()
    (total,) = accumulation.take().values()
    assert total.stride() == state.strides
    assert torch.equal(total, expected)


def test_gradient_that_carries_a_graph_is_added_without_it() -> None:
    accumulation, state = Accumulation(), state_of(torch.zeros(3))
    with accumulation.during(torch.float32):
        accumulation.add(state, torch.ones(3, requires_grad=True) * 2)
        accumulation.add(state, torch.ones(3, requires_grad=True) * 2)
    (total,) = accumulation.take().values()
    assert not total.requires_grad
    assert torch.equal(total, torch.full((3,), 4.0))


def test_gradient_that_does_not_fit_leaves_the_sum_alone() -> None:
    accumulation, state = Accumulation(), state_of(torch.zeros(3))
    with accumulation.during(torch.float32):
        accumulation.add(state, torch.ones(3))
        for gradient, error in [(torch.ones(3).to_sparse(), TypeError), (torch.ones(4), ValueError)]:
            with pytest.raises(error, match="the gradient of weight"):
                accumulation.add(state, gradient)
    with pytest.raises(TypeError, match="the gradient of weight is sparse, expected a dense one"):
        accumulation.add(state, torch.ones(3).to_sparse())
    (total,) = accumulation.take().values()
    assert torch.equal(total, torch.ones(3))


def test_blocks_nest_and_end_with_an_error() -> None:
    accumulation, state = Accumulation(), state_of(torch.zeros(3))
    with accumulation.during(None):
        assert accumulation.is_in_grad
        with suppress(PlantedError), accumulation.during(torch.float32):
            assert not accumulation.is_in_grad
            assert accumulation.add(state, torch.ones(3)) is None
            raise PlantedError
        assert accumulation.is_in_grad
    assert not accumulation.is_in_grad
    (total,) = accumulation.take().values()
    assert torch.equal(total, torch.ones(3))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, "float32"])
def test_other_dtypes_are_refused(dtype: Any) -> None:
    accumulation = Accumulation()
    told = r"accumulate\(\) got dtype .*, expected None \(that of .grad\) or torch.float32"
    with pytest.raises(ValueError, match=told), accumulation.during(dtype):
        pass
    assert not accumulation.is_in_grad


# ---- in training -----------------------------------------------------------------------------------------------------

Moment = Callable[[nn.Module, SpeculativeCPUAdam, OffloadScheduler | None], object]


def micro_batches(
    model: nn.Module,
    optimizer: SpeculativeCPUAdam,
    scheduler: OffloadScheduler | None,
    *,
    between: Moment = lambda *_: None,
    before_step: Moment = lambda *_: None,
    dtype: torch.dtype | None = torch.float32,
    last: Callable[[nn.Module], nn.Module] = lambda model: model,
) -> None:
    """Make steps of three micro-batches, of which the last one goes through `last(model)` only."""
    for step in range(4):
        optimizer.zero_grad()
        for micro in range(2):
            if scheduler is None:
                loss_of(model, 10 * step + micro).backward()
            else:
                with scheduler.accumulate(dtype):
                    loss_of(model, 10 * step + micro).backward()
            between(model, optimizer, scheduler)
        loss_of(last(model), 10 * step + 2).backward()
        before_step(model, optimizer, scheduler)
        optimizer.step()
    optimizer.zero_grad()


def both(
    story: Callable[[nn.Module, SpeculativeCPUAdam, OffloadScheduler | None], None],
    device: Device,
    make: Callable[[], nn.Module] = mlp,
    **options: Any,
) -> OffloadScheduler:
    """Run a story with fp32 gradients with and without a scheduler; the bits agree."""
    model, twin = make(), make()
    optimizer, plain = adam(model, **options), adam(twin, **options)
    with eager(optimizer, model, device=device) as scheduler:
        story(model, optimizer, scheduler)
    story(twin, plain, None)
    assert everything(model, optimizer) == everything(twin, plain)
    assert optimizer.statistics.steps == plain.statistics.steps
    assert optimizer.last_outcome == plain.last_outcome
    return scheduler


READERS: dict[str, Moment] = {
    "the model's state dict": lambda model, optimizer, scheduler: model.state_dict(),
    "the state dict": lambda model, optimizer, scheduler: optimizer.state_dict(),
    "the state": lambda model, optimizer, scheduler: optimizer.state,
    "commit": lambda model, optimizer, scheduler: optimizer.commit(),
    "rollback": lambda model, optimizer, scheduler: optimizer.rollback(),
    "reload": lambda model, optimizer, scheduler: optimizer.reload_masters(),
    "synchronize": lambda model, optimizer, scheduler: scheduler and scheduler.synchronize(),
    "an evaluation": lambda model, optimizer, scheduler: loss_of(model, 99),
    "a copy": lambda model, optimizer, scheduler: copy.deepcopy((model, optimizer)),
    "a rate that changes": lambda model, optimizer, scheduler: optimizer.param_groups[0].update(lr=0.03),
}


@pytest.mark.parametrize("reader", READERS)
def test_whoever_looks_between_micro_batches_changes_nothing(reader: str, device: Device) -> None:
    both(lambda *run: micro_batches(*run, between=READERS[reader]), device)


@pytest.mark.parametrize("last", [slice(2, None), slice(4, None), slice(0, 2)], ids=["2:", "4:", ":2"])
def test_parameters_without_a_gradient_in_the_last_backward_keep_their_sums(last: slice, device: Device) -> None:
    both(lambda *run: micro_batches(*run, last=lambda model: model[last]), device)


def test_step_directly_after_a_block(device: Device) -> None:
    def stories(model: nn.Module, optimizer: SpeculativeCPUAdam, scheduler: OffloadScheduler | None) -> None:
        for seed in range(4):
            optimizer.zero_grad()
            if scheduler is None:
                loss_of(model, seed).backward()
                loss_of(model[2:], seed).backward()
            else:
                with scheduler.accumulate(torch.float32):
                    loss_of(model, seed).backward()
                    assert all(parameter.grad is None for parameter in model.parameters())
                    loss_of(model[2:], seed).backward()
            optimizer.step()

    scheduler = both(stories, device, max_grad_norm=55.0)
    assert scheduler.optimizer.statistics.committed
    assert scheduler.optimizer.statistics.clipped


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
            assert optimizer.last_outcome is not None
            assert optimizer.last_outcome.grad_norm == float(norm) > 2.5
            assert optimizer.last_outcome.kind is StepKind.CLIPPED


def test_norm_sees_everything_and_limits_the_step(device: Device) -> None:
    norms: list[float] = []

    def clip(model: nn.Module, optimizer: SpeculativeCPUAdam, scheduler: OffloadScheduler | None) -> None:
        norms.append(float(optimizer.clip_grad_norm_(3.0)))

    both(lambda *run: micro_batches(*run, before_step=clip, last=lambda model: model[2:]), device)
    assert norms[:4] == norms[4:]


@pytest.mark.parametrize("bad", [math.inf, math.nan])
@pytest.mark.parametrize("at", [0, 1])
def test_bad_micro_batch_spoils_the_step_alone(bad: float, at: int, device: Device) -> None:
    def stories(model: nn.Module, optimizer: SpeculativeCPUAdam, scheduler: OffloadScheduler | None) -> None:
        for step in range(3):
            optimizer.zero_grad()
            for micro in range(2):
                loss = loss_of(model, micro) * (bad if (step, micro) == (1, at) else 1.0)
                if scheduler is None or micro:
                    loss.backward()
                else:
                    with scheduler.accumulate(torch.float32):
                        loss.backward()
            optimizer.step()
            assert optimizer.last_outcome is not None
            assert (optimizer.last_outcome.kind is StepKind.SKIPPED) == (step == 1)

    both(stories, device)


def fail(model: nn.Module) -> None:
    """Run a backward that fails when the layers from 2 on have their gradients."""
    x = RaiseInBackward.apply(model[:2](batch(9)), PlantedError("planted"))
    (30 * (model[2:](x) - 1) ** 2).mean().backward()


@pytest.mark.parametrize("then", ["zero_grad", "go on"])
@pytest.mark.parametrize("dtype", [None, torch.float32], ids=str)
def test_micro_batch_that_fails(dtype: torch.dtype | None, then: str, device: Device) -> None:
    """What it had added before stays, as in `.grad`, until `zero_grad()`; no step is dropped."""

    def stories(model: nn.Module, optimizer: SpeculativeCPUAdam, scheduler: OffloadScheduler | None) -> None:
        train(model, optimizer, range(2))
        with pytest.raises(PlantedError), nullcontext() if scheduler is None else scheduler.accumulate(dtype):
            fail(model)
        if then == "zero_grad":
            optimizer.zero_grad()
        loss_of(model, 3).backward()
        optimizer.step()
        train(model, optimizer, range(4, 6))

    both(stories, device)


def test_last_backward_that_fails_takes_the_sums_along(device: Device) -> None:
    model, twin = mlp(), mlp()
    optimizer, plain = adam(model), adam(twin)
    train(twin, plain, range(2))
    with eager(optimizer, model, device=device) as scheduler:
        train(model, optimizer, range(1))
        with scheduler.accumulate(torch.float32):
            loss_of(model, 7).backward()
        with pytest.raises(PlantedError):
            fail(model)
        loss_of(model, 1).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert everything(model, optimizer) == everything(twin, plain)


@pytest.mark.parametrize("dtype", [None, torch.float32], ids=str)
@pytest.mark.parametrize("ending", ["zero_grad", "close"])
def test_end_of_sums(ending: str, dtype: torch.dtype | None, device: Device) -> None:
    model, twin = mlp(), mlp()
    optimizer, plain = adam(model), adam(twin)
    train(twin, plain, range(2))
    scheduler = eager(optimizer, model, device=device)
    train(model, optimizer, range(1))
    with scheduler.accumulate(dtype):
        loss_of(model, 7).backward()
    if ending == "close":
        scheduler.close()
        assert (model[0].weight.grad is None) == (dtype is not None)
        scheduler = eager(optimizer, model, device=ImmediateDevice())
    optimizer.zero_grad()
    train(model, optimizer, range(1, 2))
    scheduler.close()
    assert everything(model, optimizer) == everything(twin, plain)


def test_sums_in_grad_flow_into_sums_on_the_host(device: Device) -> None:
    """Where nothing is added in `.grad`'s dtype that is narrower: with fp32 gradients."""

    def stories(model: nn.Module, optimizer: SpeculativeCPUAdam, scheduler: OffloadScheduler | None) -> None:
        for step in range(3):
            optimizer.zero_grad()
            for micro, dtype in enumerate([None, torch.float32, torch.float32]):
                if scheduler is None:
                    loss_of(model, 10 * step + micro).backward()
                else:
                    with scheduler.accumulate(dtype):
                        loss_of(model, 10 * step + micro).backward()
            loss_of(model[2:], 10 * step + 3).backward()
            optimizer.step()

    both(stories, device)


def test_fp64_parameters_lose_nothing_in_sums_on_the_host(device: Device) -> None:
    both(micro_batches, device, lambda: mlp(torch.float64))


def test_sums_need_a_scheduler_that_takes_gradients() -> None:
    model = mlp()
    with OffloadScheduler(adam(model), model, overlap=False) as scheduler:
        told = r"accumulate\(torch.float32\) needs a scheduler that takes gradients, but this one has overlap=False"
        with pytest.raises(RuntimeError, match=told):
            scheduler.accumulate(torch.float32)
        with scheduler.accumulate():
            loss_of(model, 0).backward()
        assert model[0].weight.grad is not None


def test_sums_of_a_sparse_gradient_are_refused(device: Device) -> None:
    model = nn.Sequential(nn.Embedding(8, 8, sparse=True), nn.Linear(8, 8))
    optimizer = adam(model)
    with eager(optimizer, model, device=device) as scheduler:
        with (
            pytest.raises(TypeError, match="is sparse, expected a dense one"),
            scheduler.accumulate(torch.float32),
        ):
            model(batch(0).argmax(-1)).sum().backward()
        optimizer.zero_grad()
        optimizer.step()
        assert not optimizer.state


def test_narrow_link_rounds_a_sum_once(device: Device) -> None:
    model, twin = mlp(), mlp()
    optimizer, plain = adam(model), adam(twin)
    with eager(optimizer, model, device=device, link_dtype=torch.bfloat16) as scheduler:
        for step in range(3):
            with scheduler.accumulate(torch.float32):
                loss_of(model, 10 * step).backward()
            loss_of(model, 10 * step + 1).backward()
            optimizer.step()
    for step in range(3):
        plain.zero_grad()
        loss_of(twin, 10 * step).backward()
        loss_of(twin, 10 * step + 1).backward()
        for parameter in twin.parameters():
            assert parameter.grad is not None
            parameter.grad = parameter.grad.bfloat16().float()
        plain.step()
    plain.zero_grad()
    assert everything(model, optimizer) == everything(twin, plain)


# ---- sums of parameters that are bound anew --------------------------------------------------------------------------


def add_group(model: nn.Module, optimizer: SpeculativeCPUAdam, scheduler: OffloadScheduler | None) -> None:
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]})


def load(model: nn.Module, optimizer: SpeculativeCPUAdam, scheduler: OffloadScheduler | None) -> None:
    optimizer.load_state_dict(optimizer.state_dict())


@pytest.mark.parametrize("when", ["between", "before_step"])
@pytest.mark.parametrize("how", [add_group, load])
def test_sums_outlive_the_states_of_their_parameters(how: Moment, when: str, device: Device) -> None:
    last = slice(2, None) if when == "between" else slice(6, None)

    def stories(*run: Any) -> None:
        micro_batches(*run, last=lambda model: model[last] if when == "between" else Untrained(), **{when: how})

    both(stories, device)


class Untrained(nn.Module):
    """Gives gradients to nothing that is optimized."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


def test_sum_of_a_parameter_that_is_no_longer_optimized_is_dropped() -> None:
    model, twin = mlp(), mlp()
    optimizer, plain = adam(model), adam(twin)
    with eager(optimizer, model) as scheduler:
        with scheduler.accumulate(torch.float32):
            loss_of(model, 0).backward()
        del optimizer.param_groups[0]["params"][0]
        optimizer.step()
    loss_of(twin, 0).backward()
    del plain.param_groups[0]["params"][0]
    plain.step()
    plain.zero_grad()
    assert everything(model, optimizer) == everything(twin, plain)
    assert torch.equal(model[0].weight, mlp()[0].weight)


def clip(model: nn.Module, optimizer: SpeculativeCPUAdam, scheduler: OffloadScheduler | None) -> None:
    optimizer.clip_grad_norm_(3.0)


def test_norm_between_micro_batches_hands_nothing_over(device: Device) -> None:
    both(lambda *run: micro_batches(*run, between=clip, last=lambda model: model[2:]), device)


def test_norm_between_micro_batches_is_that_of_the_sums(device: Device) -> None:
    norms: list[Tensor] = []

    def note(model: nn.Module, optimizer: SpeculativeCPUAdam, scheduler: OffloadScheduler | None) -> None:
        norms.append(optimizer.clip_grad_norm_(3.0))

    both(lambda *run: micro_batches(*run, between=note), device)
    assert norms[:8] == norms[8:]
    assert len(norms) == 16


@pytest.mark.parametrize("clips", [False, True])
def test_sum_on_the_host_takes_up_what_came_to_lie_in_grad_later(device: Device, clips: bool) -> None:
    def stories(model: nn.Module, optimizer: SpeculativeCPUAdam, scheduler: OffloadScheduler | None) -> None:
        for step in range(3):
            optimizer.zero_grad()
            for micro, dtype in enumerate([torch.float32, None]):
                if scheduler is None:
                    loss_of(model, 10 * step + micro).backward()
                else:
                    with scheduler.accumulate(dtype):
                        loss_of(model, 10 * step + micro).backward()
            norm = optimizer.clip_grad_norm_(3.0) if clips else None
            optimizer.step()
            assert optimizer.last_outcome is not None
            assert norm is None or float(norm) == optimizer.last_outcome.grad_norm

    both(stories, device)


def test_narrow_link_rounds_gradients_that_stay(device: Device) -> None:
    """In `.grad`, because no backward outside of `accumulate()` touched their parameters."""
    for overlap in (True, False):
        model, twin = mlp(), mlp()
        optimizer, plain = adam(model), adam(twin)
        with eager(optimizer, model, device=device, link_dtype=torch.bfloat16, overlap=overlap) as scheduler:
            for step in range(3):
                optimizer.zero_grad()
                with scheduler.accumulate():
                    loss_of(model, step).backward()
                norm = optimizer.clip_grad_norm_(5.0)
                optimizer.step()
                assert optimizer.last_outcome is not None
                assert optimizer.last_outcome.grad_norm == float(norm)
        optimizer.zero_grad()
        for step in range(3):
            plain.zero_grad()
            loss_of(twin, step).backward()
            for parameter in twin.parameters():
                assert parameter.grad is not None
                parameter.grad = parameter.grad.bfloat16().float()
            plain.clip_grad_norm_(5.0)
            plain.step()
        plain.zero_grad()
        assert everything(model, optimizer) == everything(twin, plain)


def test_worker_that_fails_on_sums_drops_the_step(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    model, twin = mlp(), mlp()
    optimizer, plain = adam(model), adam(twin)
    train(twin, plain, range(2))
    with eager(optimizer, model, device=device) as scheduler:
        train(model, optimizer, range(1))
        before = everything(model, optimizer)
        with scheduler.accumulate(torch.float32):
            loss_of(model, 7).backward()
        loss_of(model[2:], 7).backward()
        with monkeypatch.context() as patch:

            def stumble(*_: object, **__: object) -> None:
                raise PlantedError("planted")

            patch.setattr(Transfers, "download", stumble)
            with pytest.raises(PlantedError):
                optimizer.step()
        scheduler.synchronize()
        assert everything(model, optimizer) == before  # no zero_grad() was needed
        train(model, optimizer, range(1, 2))
    assert everything(model, optimizer) == everything(twin, plain)


# ---- sums and loss scaling -------------------------------------------------------------------------------------------


def test_torch_grad_scaler_is_refused_with_sums_on_the_host() -> None:
    model = mlp()
    optimizer = adam(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    with eager(optimizer, model) as scheduler, changes_nothing(model, optimizer):
        with scheduler.accumulate(torch.float32):
            scaler.scale(loss_of(model, 0)).backward()
        with pytest.raises(RuntimeError, match="cannot unscale gradients that speculate"):
            scaler.step(optimizer)


def test_grad_scaler_with_sums_on_the_host_alone(device: Device) -> None:
    results = []
    for overlaps in (False, True):
        model = mlp()
        optimizer = adam(model)
        scaler = GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
        scheduler = eager(optimizer, model, device=device, grad_scaler=scaler) if overlaps else None
        for seed in range(5):
            optimizer.zero_grad()
            loss = scaler.scale(loss_of(model, seed) * (math.inf if seed == 2 else 1.0))
            if scheduler is None:
                loss.backward()
            else:
                with scheduler.accumulate(torch.float32):
                    loss.backward()
            scaler.step(optimizer)
            scaler.update()
        optimizer.zero_grad()
        if scheduler is not None:
            scheduler.close()
        results.append((everything(model, optimizer), scaler.get_scale()))
    assert results[0] == results[1]


def test_cost_of_a_micro_batch_grows_with_the_number_of_parameters_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """The optimizer is asked for its parameters once in a backward, not for every gradient."""
    model = mlp(layers=10)
    optimizer = adam(model)
    with eager(optimizer, model) as scheduler:
        asked: list[int] = []
        bound = optimizer.bound_transaction
        monkeypatch.setattr(optimizer, "bound_transaction", lambda: (asked.append(1), bound())[1])
        for _ in range(2):
            asked.clear()
            with scheduler.accumulate(torch.float32):
                loss_of(model, 0).backward()
            assert len(asked) == 1
