"""Transfers: what travels, in which dtype and buffer, and what waits for what."""

from __future__ import annotations

import gc
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from superadam.devices import Device, Event, PlainDevice, Stream
from superadam.devices.flat import FlatLayout
from superadam.handles.taken_gradient import TakenGradient
from superadam.kernels.hyperparameters import Hyperparameters
from superadam.offload.statistics import OverlapStatistics
from superadam.offload.trace import Trace
from superadam.offload.transfers import Transfers
from superadam.state.new_values import Patch
from superadam.state.parameter import ParameterState, Slot
from superadam.testing.simulated import Operation, SimulatedDevice, SimulatedEvent

HYPER = [Hyperparameters.of_group(torch.optim.AdamW([torch.zeros(1)]).param_groups[0])] * 8


class LateModel(SimulatedDevice):
    """A simulated device whose model computes late, too: waiting holds up its stream, not the enqueuing thread."""

    def wait(self, stream: Stream, event: SimulatedEvent) -> None:  # type: ignore[override]
        if event.is_recorded:
            self._enqueue(stream, Operation(lambda: None, (event,)))


def lazy(seed: int = 0) -> SimulatedDevice:
    """Return a device that does nothing before it is waited for."""
    return SimulatedDevice(seed, eagerness=0.0)


def finish(device: SimulatedDevice) -> None:
    for stream in Stream:
        device.record(stream).synchronize()


def states_of(*tensors: Tensor, device: Device | None = None) -> list[ParameterState]:
    return [
        ParameterState(nn.Parameter(t), row, f"p{row}", is_on_host=None if device is None else device.is_host(t))
        for row, t in enumerate(tensors)
    ]


def transfers_of(device: Device, transfer_dtype: torch.dtype | None = None) -> tuple[Transfers, OverlapStatistics]:
    statistics = OverlapStatistics()
    return Transfers(device, statistics, Trace(), transfer_dtype), statistics


def download(
    transfers: Transfers, states: list[ParameterState], gradients: list[Tensor], **options: Any
) -> tuple[list[Tensor], Event]:
    """Return the gradients on the host, and the event after which they are there."""
    taken = [TakenGradient(gradient) for gradient in gradients]
    records, arrived = transfers.download(dict(zip(states, taken, strict=True)), HYPER, set(), **options)
    assert all(one.slot is None for one in records.values())
    assert all(one.in_use for one in taken)
    return [one.pending for one in taken], arrived


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.fixture(params=[PlainDevice, lazy, lambda: SimulatedDevice(7, 0.9)], ids=["plain", "lazy", "hasty"])
def device(request: pytest.FixtureRequest) -> Device:
    one: Device = request.param()
    return one


def test_host_memory_is_not_given_back_while_its_copy_is_under_way() -> None:
    """A step that is dropped, because the worker failed, drops gradients that are still on their way."""
    device = lazy()
    transfers, _ = transfers_of(device)
    hosts, arrived = download(transfers, states_of(random(5), device=device), [random(5)])
    memory = torch.empty(0, dtype=torch.float32).set_(hosts[0].untyped_storage())
    del hosts, arrived
    finish(device)
    assert memory.isnan().all()  # free, and nothing was written afterwards


# ---- new values ------------------------------------------------------------------------------------------------------


def speculated(
    transfers: Transfers, states: list[ParameterState], taken: list[TakenGradient], *only: ParameterState
) -> tuple[dict[ParameterState, Slot], Event]:
    """Bring gradients down; return the slots of all new values, or of some."""
    chosen = {*(only or states)}
    records, arrived = transfers.download(dict(zip(states, taken, strict=True)), HYPER, chosen)
    return {state: records[state].slot for state in chosen}, arrived


def sent(
    transfers: Transfers, states: list[ParameterState], gradients: list[Tensor], values: list[Tensor]
) -> tuple[list[Any], list[TakenGradient]]:
    """Bring gradients down, and send new values up as a worker does."""
    taken = [TakenGradient(gradient) for gradient in gradients]
    places, arrived = speculated(transfers, states, taken)
    arrived.synchronize()
    for state, value in zip(states, values, strict=True):
        target = places[state].value
        assert (target.dtype, target.stride()) == (state.parameter_dtype, state.strides)
        target.copy_(value)
    for shadow in {id(place.shadow): place.shadow for place in places.values()}.values():
        shadow.send()
    return [places[state] for state in states], taken


def every_kind(device: Device) -> tuple[list[ParameterState], list[Tensor], list[Tensor]]:
    """Return states of all dtypes and layouts, gradients and new values."""
    states = states_of(
        random(5, 7),
        random(6, 4, dtype=torch.bfloat16).t(),
        random(3, 4, 5, 6).contiguous(memory_format=torch.channels_last),
        random(8, 6)[:, ::2],
        random(dtype=torch.float16),
        random(9, dtype=torch.bfloat16),
        random(0, 2),
        random(9, dtype=torch.float64),
        device=device,
    )
    gradients = [random(*state.shape, dtype=state.parameter_dtype, seed=7) for state in states]
    return states, gradients, [random(*state.shape, dtype=state.parameter_dtype, seed=5) for state in states]


@pytest.mark.parametrize("by", ["worker", "step"])
@pytest.mark.parametrize("link", [None, torch.float32, torch.float16], ids=str)
def test_values_of_all_dtypes_and_layouts_reach_their_parameters(
    device: Device, link: torch.dtype | None, by: str
) -> None:
    """When they are published, and not before; where the gradient is narrower, in memory of their own."""
    states, gradients, values = every_kind(device)
    before = [state.parameter.detach().clone() for state in states]
    versions = [state.parameter._version for state in states]
    transfers, statistics = transfers_of(device, link)
    if by == "worker":
        places, _ = sent(transfers, states, gradients, values)
    else:
        places = transfers.shadows(states)
        for place, value in zip(places, values, strict=True):
            place.value.copy_(value)
    if isinstance(device, SimulatedDevice):
        finish(device)
    assert all(map(torch.equal, before, (state.parameter for state in states)))
    transfers.publish(states, places)
    for state, value in zip(states, values, strict=True):
        assert torch.equal(state.parameter, value)
    assert [state.parameter._version for state in states] == versions
    by_dtype = [[s for s in states if s.parameter_dtype == dtype] for dtype in {s.parameter_dtype for s in states}]
    expected = sum(FlatLayout(group).numel * group[0].parameter_dtype.itemsize for group in by_dtype)
    assert statistics.uploaded_bytes == (expected if device.has_link else 0)


@pytest.mark.parametrize("seed", range(5))
def test_values_come_up_after_gradients_have_gone_down(seed: int) -> None:
    """They share memory."""
    device = LateModel(seed, 0.5)
    states = states_of(torch.zeros(4), device=device)
    transfers, _ = transfers_of(device)
    places, (taken,) = sent(transfers, states, [random(4)], [torch.ones(4)])
    finish(device)
    assert torch.equal(taken.pending, random(4))
    transfers.publish(states, places)
    assert torch.equal(states[0].parameter, torch.ones(4))


class WatchingDevice(LateModel):
    """Notes which streams could go on when values are scattered or put; copies of the model's stream are late."""

    def __init__(self) -> None:
        super().__init__(0, 0.0)
        self.runnable: list[Stream] = []

    def scatter(self, sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
        self.runnable = self._runnable()
        super().scatter(sources, targets)

    def put(self, buffer: Tensor, index: Tensor, values: Tensor) -> None:
        self.runnable = self._runnable()
        super().put(buffer, index, values)


def test_upload_for_publication_waits_for_what_may_use_its_memory() -> None:
    """The allocator hands out what the model's stream has still to finish with."""
    device = WatchingDevice()
    (state,) = states = states_of(torch.zeros(4), device=device)
    transfers, _ = transfers_of(device)
    places = transfers.shadows(states)
    places[0].value.fill_(1.0)
    device._enqueue(Stream.CURRENT, Operation(lambda: None))  # the model's
    transfers.publish(states, places)
    assert device.runnable == [Stream.CURRENT]
    finish(device)
    assert torch.equal(state.parameter, torch.ones(4))


def test_upload_of_a_patch_waits_for_what_may_use_its_memory() -> None:
    device = WatchingDevice()
    states = states_of(torch.zeros(4, dtype=torch.bfloat16), device=device)
    transfers, _ = transfers_of(device)
    layout = FlatLayout(states)
    memory = device.empty(layout.numel, torch.bfloat16, Stream.UPLOAD)
    shadow = transfers.shadow(layout, memory)
    shadow.values[0].fill_(1.0)
    shadow.send()
    finish(device)
    device._enqueue(Stream.CURRENT, Operation(lambda: None))  # the model's
    patch = Patch(shadow, [0], [1])
    patch.values[0].fill_(2.0)
    patch.send([np.array([3], np.uint32)])
    assert device.runnable == [Stream.CURRENT]
    finish(device)
    assert memory[:4].tolist() == [1.0, 1.0, 1.0, 2.0]


def test_parts_of_a_step_do_not_pile_up() -> None:
    """Each takes host memory until it has travelled, and two were reserved."""
    device = LateModel(0, 0.0)
    device.scatter = lambda sources, targets: None  # type: ignore[method-assign]  # nor does it wait
    states = states_of(torch.zeros(4), device=device)
    transfers, _ = transfers_of(device)
    stage = transfers.stage([states] * 5)
    for part, places in enumerate(stage):
        places[0].value.fill_(1.0)
        transfers.publish(states, places)
        under_way = sum(not arrived.query() for arrived, _, _ in transfers._untold)
        assert under_way == min(part + 1, 2)
    transfers.stage([states])  # of the next step
    assert all(arrived.query() for arrived, _, _ in transfers._untold)


def test_nothing_is_counted_of_a_bucket_that_does_not_travel() -> None:
    """Else the device would seem to hold more packed gradients with each, and in the end be short of memory."""

    class Full(SimulatedDevice):
        def host_empty(self, numel: int, dtype: torch.dtype) -> Tensor:
            raise MemoryError

    device = Full(0)
    states = states_of(random(5), random(5, dtype=torch.bfloat16), device=device)
    transfers, _ = transfers_of(device)
    for chosen in (set(), {states[0]}, {*states}):
        with pytest.raises(MemoryError):
            transfers.download({s: TakenGradient(random(5, dtype=s.dtype)) for s in states}, HYPER, chosen)
        gc.collect()
        assert transfers._reused.size == transfers._leaving.size == transfers._shadows.size == 0
    assert transfers._most_packed == 0


def test_settling_waits_for_what_was_published_on_another_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread has a current stream of its own, on which nothing is under way."""
    device = lazy()
    states = states_of(torch.zeros(4), device=device)
    transfers, _ = transfers_of(device)
    places, _ = sent(transfers, states, [random(4)], [torch.ones(4)])
    recorded, record = [], device.record
    monkeypatch.setattr(device, "record", lambda stream: [recorded.append(record(stream)), recorded[-1]][1])
    transfers.publish(states, places)
    assert not recorded[-1].has_passed
    monkeypatch.setattr(device, "record", lambda stream: SimulatedEvent(device))  # of another stream
    transfers.settle()
    assert recorded[-1].has_passed


def test_settling_waits_for_steps_that_were_made_on_the_device() -> None:
    """Nothing is published of them."""
    device = lazy()
    transfers, _ = transfers_of(device)
    parameter = torch.zeros(3)
    device.copy(parameter, torch.ones(3), Stream.CURRENT)
    assert not parameter.any()
    transfers.settle()
    assert parameter.all()


def test_values_come_up_while_backward_goes_on() -> None:
    device = LateModel(0, 0.0)
    states = states_of(torch.zeros(4), device=device)
    transfers, _ = transfers_of(device)
    taken = [TakenGradient(random(4))]
    places, arrived = speculated(transfers, states, taken)
    arrived.synchronize()
    goes_on: list[Any] = []
    device._enqueue(Stream.CURRENT, Operation(lambda: None, (SimulatedEvent(device),)))  # never passes
    device._enqueue(Stream.CURRENT, Operation(lambda: goes_on.append(1)))
    places[states[0]].value.fill_(1.0)
    shadow = places[states[0]].shadow
    shadow.send()
    device.record(Stream.UPLOAD).synchronize()
    assert shadow._arrived is not None
    assert shadow._arrived.query()
    assert not goes_on


class MeetingStatistics(OverlapStatistics):
    """Lets threads that add to `uploaded_bytes` at once all read it before any writes."""

    _bytes = 0
    _meeting = threading.Barrier(2)

    @property
    def uploaded_bytes(self) -> int:
        value = self._bytes
        with suppress(threading.BrokenBarrierError):  # the other one cannot come while this one has a lock
            self._meeting.wait(0.2)
        return value

    @uploaded_bytes.setter
    def uploaded_bytes(self, value: int) -> None:
        self._bytes = value


def test_uploads_of_two_threads_at_once_are_both_counted() -> None:
    """The worker uploads while the training thread publishes."""
    statistics = MeetingStatistics()
    transfers = Transfers(PlainDevice(), statistics, Trace())
    with ThreadPoolExecutor(2) as threads:
        for upload in [threads.submit(transfers.upload, torch.ones(3), torch.zeros(3)) for _ in range(2)]:
            upload.result()
    assert statistics._bytes == 2 * 3 * 4
