"""Buckets that stay on the device: the bits of the synchronous run, whatever stays, and whatever users do meanwhile."""

import math
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from support.overlap import (
    ImmediateWorker,
    PlantedError,
    ThreadDevice,
    adam,
    eager,
    everything,
    fail_at,
    loss_of,
    mlp,
    train,
    twins,
)
from support.programs import Story, both
from support.visible import bits, shown
from torch import Tensor, nn

from superadam import OffloadScheduler, SpeculativeCPUAdam
from superadam.devices import Device
from superadam.devices.flat import FlatLayout
from superadam.devices.interface import ChunkSums
from superadam.devices.worker import WorkerError
from superadam.handles.taken_gradient import TakenGradient
from superadam.offload.pipeline import Pipeline
from superadam.state.parameter import ParameterState
from superadam.state.resident import ResidentStates
from superadam.step.transaction import Transaction
from superadam.testing import SimulatedDevice, stand_in

pytestmark = pytest.mark.timeout(240)  # a hang fails with the stack of every thread

ALL = 10**9
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


# ---- a device whose host sums are the host's -------------------------------------------------------------------------


class HostSums(SimulatedDevice):
    """A device that knows sums of gradients on the host for what they are, and has cores to spare."""

    on_host: frozenset[int] | set[int] = frozenset()

    def idle_cores(self) -> int:
        return 2

    def is_host(self, tensor: Tensor) -> bool:
        return super().is_host(tensor) or tensor.untyped_storage().data_ptr() in self.on_host


@pytest.fixture(autouse=True)
def host_copies_are_on_the_host(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Note where `host_copy` puts what it returns, and where sums are."""
    addresses: set[int] = set()
    host_copy, become_sum = ParameterState.host_copy, TakenGradient.become_sum

    def noted(tensor: Tensor) -> Tensor:
        address = tensor.untyped_storage().data_ptr()
        if address:  # memory without elements has none
            addresses.add(address)
            weakref.finalize(tensor, addresses.discard, address)
        return tensor

    monkeypatch.setattr(ParameterState, "host_copy", lambda *arguments: noted(host_copy(*arguments)))
    monkeypatch.setattr(TakenGradient, "become_sum", lambda taken, total: become_sum(taken, noted(total)))
    monkeypatch.setattr(HostSums, "on_host", addresses)
    return iter(())


# ---- one story at a time ---------------------------------------------------------------------------------------------


class AtOnce(HostSums):
    """Its worker runs every job in the middle of backward."""

    def start_worker(self, idle: Any) -> ImmediateWorker:
        return ImmediateWorker(idle)


class Threaded(ThreadDevice):
    """Does everything when it is asked, with memory other than the host's, and with a real thread."""

    has_link = can_update = True
    update = staticmethod(stand_in.update)

    def is_host(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in HostSums.on_host

    def pack(
        self, gradients: Sequence[Tensor], layout: FlatLayout, dtype: torch.dtype, norm: ChunkSums | None = None
    ) -> Tensor:
        packed = super().pack(gradients, layout, dtype)
        if norm is not None:
            stand_in.take_norm(layout.views(packed), norm)
        return packed


DEVICES: dict[str, Callable[[], Device]] = {
    "at once": lambda: AtOnce(1, 1.0),
    "lazy": lambda: HostSums(2, 0.0),
    "hasty": lambda: HostSums(3, 0.8),
    "thread": Threaded,
}


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> Device:
    """Return devices on which things happen at different times."""
    return DEVICES[request.param]()


def has_memory_in_use(device: Device) -> bool:
    """Whether anything is alive on a simulated device; others do not know."""
    return isinstance(device, SimulatedDevice) and device.has_memory_in_use


def kept(
    optimizer: SpeculativeCPUAdam, model: nn.Module, device: Device | None = None, **options: Any
) -> OffloadScheduler:
    """Return a scheduler that keeps everything, from the second step on."""
    everywhere = {"bucket_numel": 70, "gpu_buckets": ALL, "device": device or HostSums(5)}
    return OffloadScheduler(optimizer, model, **{**everywhere, **options})


def pair(
    story: Story,
    device: Device,
    make: Callable[[], nn.Module] = mlp,
    scheduled: dict[str, Any] | None = None,
) -> OffloadScheduler:
    """Tell a story with kept buckets and without a scheduler; check that bits and outcomes agree."""
    scheduler = both(story, {"bucket_numel": 70, "gpu_buckets": ALL, "device": device, **(scheduled or {})}, make)
    assert scheduler.statistics.resident_buckets > 0
    assert not has_memory_in_use(device)
    return scheduler


def resident(scheduler: OffloadScheduler) -> int:
    """Return how many parameters have their state on the device."""
    assert isinstance(scheduler._resident, ResidentStates)
    return len(scheduler._resident._held)


@pytest.mark.covering(1)
@pytest.mark.parametrize("gpu_buckets", [1, 2, 3, ALL])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_buckets_on_the_device_have_the_bits_of_none(dtype: torch.dtype, gpu_buckets: int, device: Device) -> None:
    scheduler = pair(
        lambda model, optimizer, _: train(model, optimizer, range(6)),
        device,
        lambda: mlp(dtype),
        {"gpu_buckets": gpu_buckets},
    )
    counts = scheduler.optimizer.statistics
    assert counts.committed
    assert counts.clipped
    assert scheduler.statistics.resident_buckets == 5 * min(gpu_buckets, 3)


def test_reading_state_brings_it_home_and_the_next_step_takes_it_back(device: Device) -> None:
    def reading(model: nn.Module, optimizer: SpeculativeCPUAdam, scheduler: OffloadScheduler | None) -> list[Any]:
        seen = []
        for seed in range(5):
            optimizer.zero_grad()
            loss_of(model, seed).backward()
            if scheduler is not None and seed > 1:
                assert resident(scheduler) == (6 if seed in (2, 4) else 0)
            seen.append([bits(optimizer.state[p]["exp_avg"]) for p in model.parameters()] if seed > 1 else [])
            optimizer.step()
            if seed % 2 == 0:
                seen.append([bits(optimizer.state[p]["exp_avg_sq"]) for p in model.parameters()])
        return seen

    pair(reading, device)


def test_state_that_was_replaced_in_inference_mode_comes_home(device: Device) -> None:
    def replacing(model: nn.Module, optimizer: SpeculativeCPUAdam, scheduler: OffloadScheduler | None) -> list[Any]:
        train(model, optimizer, range(2))
        with torch.inference_mode():
            for parameter in model.parameters():
                optimizer.state[parameter]["exp_avg"] = optimizer.state[parameter]["exp_avg"] * 0.5
        train(model, optimizer, range(2, 5))
        return [bits(optimizer.state[parameter]["exp_avg"]) for parameter in model.parameters()]

    pair(replacing, device)


def test_first_kept_step_that_is_dropped_leaves_no_state(device: Device) -> None:
    model = mlp(torch.bfloat16)
    optimizer = adam(model)
    with kept(optimizer, model, device) as scheduler:
        (loss_of(model, 0) * math.nan).backward()
        optimizer.step()
        for ending in ("nan", "zero_grad", "rollback"):
            (loss_of(model, 1) * (math.nan if ending == "nan" else 1.0)).backward()
            getattr(optimizer, "step" if ending == "nan" else ending)()
            optimizer.zero_grad()
            optimizer.step()  # without any gradient
            assert not optimizer.state
            assert not has_memory_in_use(device)
        assert scheduler.statistics.resident_buckets == 9


@pytest.mark.covering(1)
@pytest.mark.parametrize("link", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_kept_gradients_are_rounded_as_those_that_travel(dtype: torch.dtype, link: torch.dtype) -> None:
    def rounding(model: nn.Module, optimizer: SpeculativeCPUAdam, scheduler: OffloadScheduler | None) -> None:
        for seed in range(4):
            optimizer.zero_grad()
            loss_of(model, seed).backward()
            for parameter in model.parameters() if scheduler is None and dtype != torch.float64 else ():
                parameter.grad = parameter.grad.to(link).to(dtype)
            optimizer.step()

    pair(rounding, HostSums(7), lambda: mlp(dtype), {"transfer_dtype": link, "gpu_buckets": 2})


@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_sums_on_the_host_bring_kept_state_home(dtype: torch.dtype, device: Device) -> None:
    """They are there already, so the step is made there; the next one may be made on the device again."""
    model, optimizer, twin, other = twins(lambda: mlp(dtype), max_grad_norm=30.0)
    with kept(optimizer, model, device) as keeping, eager(other, twin) as sums:
        for step in range(6):
            for one, its, scheduler in ((model, optimizer, keeping), (twin, other, sums)):
                with scheduler.accumulate(torch.float32) if step % 2 else nullcontext():
                    loss_of(one, 10 * step).backward()
                if step % 2:
                    loss_of(one[2:], 10 * step + 1).backward()  # the sum of the first layer is left for the step
                its.step()
                its.zero_grad()
            assert optimizer.last_outcome == other.last_outcome
            assert resident(keeping) == (6 if step in (2, 4) else 0)
    assert everything(model, optimizer) == everything(twin, other)


# ---- failures --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gpu_buckets", [1, ALL])
@pytest.mark.parametrize("first", [False, True])
def test_device_without_any_memory(first, gpu_buckets, monkeypatch, caplog):
    """The host makes the step, and values go straight into the parameters; then there is memory again."""
    device = HostSums(6)

    def full(*_: object) -> Tensor:
        raise torch.OutOfMemoryError("planted")

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
            optimizer.step()
        if scheduler is not None:
            assert resident(scheduler) == 0
            assert scheduler.placement.gpu_buckets == gpu_buckets // 2
        train(model, optimizer, range(6, 8))

    pair(story, device, lambda: mlp(torch.bfloat16), {"gpu_buckets": gpu_buckets})
    assert "no memory left for the state" in caplog.text


@pytest.mark.covering(1)
@pytest.mark.parametrize("at", [1, 2, 3])
@pytest.mark.parametrize("what", ["_add_resident", "speculate"])
def test_worker_that_fails_with_a_kept_bucket(what, at, device, monkeypatch):
    owner: type = Pipeline if what == "_add_resident" else Transaction

    def story(model: nn.Module, optimizer: SpeculativeCPUAdam, scheduler: OffloadScheduler | None) -> None:
        train(model, optimizer, range(3))
        before = shown(optimizer)
        with monkeypatch.context() as patch:
            if scheduler is not None:
                fail_at(patch, owner, what, at, PlantedError("the worker stumbled"), after=True)
            loss_of(model, 3).backward()
            if scheduler is not None:
                with pytest.raises(WorkerError, match="the worker stumbled"):
                    optimizer.step()
        assert shown(optimizer) == before
        optimizer.step()  # without the worker
        train(model, optimizer, range(4, 5))

    pair(story, device)


# ---- choosing --------------------------------------------------------------------------------------------------------


class Roomy(ThreadDevice):
    """Says that it can keep everything, and cannot: only for what is chosen."""

    can_update = True
    update = staticmethod(stand_in.update)

    def free_bytes(self) -> int:
        return 10**12


def test_a_worker_that_is_far_behind_backward_leaves_all_to_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    speculate = Transaction.speculate

    def slow(*arguments: Any, **options: Any) -> None:
        time.sleep(0.01)
        speculate(*arguments, **options)

    monkeypatch.setattr(Transaction, "speculate", slow)
    model = nn.Sequential(*[nn.Linear(8, 8, bias=False) for _ in range(6)]).to(torch.bfloat16)
    model[2].weight.register_hook(lambda gradient: time.sleep(0.01))  # so that the worker begins during backward
    optimizer = adam(model, max_grad_norm=math.inf)
    with OffloadScheduler(optimizer, model, device=Roomy(), bucket_numel=64) as scheduler:
        for seed in range(200):  # many more than a machine needs on which nothing else runs
            loss_of(model, seed).backward()
            optimizer.step()
            optimizer.zero_grad()
            if scheduler.placement.gpu_buckets == 6:
                break
        assert scheduler.placement.gpu_buckets == 6


def test_gradients_of_a_group_that_joined_are_narrowed() -> None:
    models = [mlp(), mlp()]
    optimizers = [adam(model, max_grad_norm=math.inf) for model in models]
    with OffloadScheduler(optimizers[0], models[0], device=SimulatedDevice(1), transfer_dtype=torch.bfloat16):
        for optimizer in optimizers:
            extra = nn.Parameter(torch.linspace(-1, 1, 30))
            optimizer.add_param_group({"params": [extra]})
            (extra * torch.linspace(1, 2, 30)).sin().sum().backward()
            if optimizer is optimizers[1]:
                extra.grad = extra.grad.to(torch.bfloat16).float()
            optimizer.step()
    assert optimizers[0].last_outcome == optimizers[1].last_outcome
