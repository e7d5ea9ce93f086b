"""Transfers: what travels, in which dtype and buffer, and what waits for what."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from superadam.devices import Device, Event, PlainDevice, Stream
from superadam.devices.flat import ALIGNMENT, FlatLayout
from superadam.handles.taken_gradient import TakenGradient
from superadam.kernels import native
from superadam.offload.shadow import FlatShadow
from superadam.offload.statistics import OverlapStatistics
from superadam.offload.trace import Trace
from superadam.offload.transfers import Transfers, norm_in
from superadam.state.parameter import ParameterState, Slot
from superadam.testing.simulated import Operation, SimulatedDevice, SimulatedEvent

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


class LateModel(SimulatedDevice):
    """A simulated device whose model computes late, too: waiting holds up its stream, not the enqueuing thread."""

    def wait(self, stream: Stream, event: SimulatedEvent) -> None:  # type: ignore[override]
        if event.is_recorded:
            self._waits[stream].append(event)


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
    sent, arrived = transfers.download(states, taken, set(), **options)
    assert all(one.shadow is None for one in sent)
    assert all(one.in_use for one in taken)
    return [one.pending for one in taken], arrived


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


class Layouts(SimulatedDevice):
    """Remembers the layouts that were packed."""

    def __init__(self) -> None:
        super().__init__(0)
        self.packed: list[FlatLayout[Any]] = []

    def pack(self, gradients: Any, layout: FlatLayout[Any], *arguments: Any) -> Tensor:
        self.packed.append(layout)
        return super().pack(gradients, layout, *arguments)


def test_layout_of_a_bucket_is_made_once_until_other_parameters_are_followed() -> None:
    """What a device keeps for a layout then serves every step, and nothing keeps parameters of earlier ones."""
    device = Layouts()
    transfers, _ = transfers_of(device)
    states = states_of(random(5, 7), random(3), device=device)
    for chosen in (states, states, states[:1], states[::-1], states):
        download(transfers, chosen, [random(*one.shape) for one in chosen])
    first, second, shorter, reversed_, last = device.packed
    assert first is second is last
    assert [list(one.states) for one in (first, shorter, reversed_)] == [states, states[:1], states[::-1]]
    gone = weakref.ref(states[0])
    device.packed.clear()
    del states, chosen, first, second, shorter, reversed_, last  # type: ignore[name-defined]
    transfers.forget_layouts()
    gc.collect()
    assert gone() is None


# ---- downloads: what arrives -----------------------------------------------------------------------------------------


@pytest.fixture(params=[PlainDevice, lazy, lambda: SimulatedDevice(7, 0.9)], ids=["plain", "lazy", "hasty"])
def device(request: pytest.FixtureRequest) -> Device:
    one: Device = request.param()
    return one


def test_gradients_arrive_in_the_layout_of_the_states(device: Device) -> None:
    parameters = [
        random(5, 7),
        random(),
        random(0, 3),
        random(6, 4).t(),
        random(3, 4, 5, 6).contiguous(memory_format=torch.channels_last),
        random(8, 6)[:, ::2],
        random(9, dtype=torch.bfloat16),
        random(9, dtype=torch.float64),
    ]
    states = states_of(*parameters, device=device)
    gradients = [random(*state.shape, dtype=state.parameter_dtype, seed=9) for state in states]  # all contiguous
    transfers, _ = transfers_of(device)
    hosts, arrived = download(transfers, states, gradients)
    arrived.synchronize()
    for state, gradient, host in zip(states, gradients, hosts, strict=True):
        assert torch.equal(host, gradient)
        assert host.dtype == gradient.dtype
        assert host.stride() == state.strides
        assert not host.requires_grad


@pytest.mark.parametrize("link", [None, *DTYPES[:3]], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dtype_in_which_gradients_arrive(device: Device, dtype: torch.dtype, link: torch.dtype | None) -> None:
    states = states_of(random(70, dtype=dtype), device=device)
    gradient = random(70, dtype=dtype, seed=1)
    (host,), arrived = download(transfers_of(device, link)[0], states, [gradient])
    arrived.synchronize()
    stays = link is None or dtype == torch.float64 or (link == torch.float32 and not device.has_link)
    expected = gradient if stays else gradient.to(link)
    assert host.dtype == expected.dtype
    assert torch.equal(host, expected)
    if link == torch.float32:
        assert torch.equal(host.to(dtype), gradient)  # nothing is lost


# ---- downloads: whose memory -----------------------------------------------------------------------------------------


def test_host_memory_is_not_given_back_while_its_copy_is_under_way() -> None:
    """A step that is dropped, because the worker failed, drops gradients that are still on their way."""
    device = lazy()
    transfers, _ = transfers_of(device)
    hosts, arrived = download(transfers, states_of(random(5), device=device), [random(5)])
    memory = torch.empty(0, dtype=torch.float32).set_(hosts[0].untyped_storage())
    del hosts, arrived
    finish(device)
    assert memory.isnan().all()  # free, and nothing was written afterwards


# ---- downloads: what goes wrong --------------------------------------------------------------------------------------


@pytest.mark.parametrize("link", [None, torch.bfloat16], ids=str)
@pytest.mark.parametrize("fails", ["pack", "host_empty"])
@pytest.mark.parametrize("how", ["download", "hold"])
def test_gradients_stay_where_they_are_if_they_cannot_leave(
    how: str, fails: str, link: torch.dtype | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second of two groups fails, or the second buffer on the host."""
    device = lazy()
    dtypes = [torch.float32, torch.float64] if link else [torch.float32, torch.bfloat16]
    states = states_of(*[random(5, dtype=dtype) for dtype in dtypes], device=device)
    gradients = [random(5, dtype=dtype, seed=row) for row, dtype in enumerate(dtypes)]
    taken = [TakenGradient(gradient) for gradient in gradients]
    transfers, statistics = transfers_of(device, link)
    working, calls = getattr(device, fails), 0

    def failing(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise torch.OutOfMemoryError("planted")
        return working(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(device, fails, failing)
        with pytest.raises(torch.OutOfMemoryError):
            transfers.pack_resident(states, taken) if how == "hold" else transfers.download(states, taken, {*states})
    assert calls == 2
    assert all(one.pending is gradient for one, gradient in zip(taken, gradients, strict=True))
    assert statistics.downloaded_bytes == 0
    finish(device)
    assert not device._blocks


# ---- new values ------------------------------------------------------------------------------------------------------


def speculated(
    transfers: Transfers, states: list[ParameterState], taken: list[TakenGradient], *only: ParameterState
) -> tuple[dict[ParameterState, Slot], Event]:
    """Bring gradients down; return the slots of all new values, or of some."""
    chosen = {*(only or states)}
    every, arrived = transfers.download(states, taken, chosen)
    return {state: slot for one in every for state, slot in one.slots(chosen).items()}, arrived


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
        assert isinstance(shadow, FlatShadow)
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


@pytest.mark.parametrize("when", ["before the gradient", "before the values", "before they are published"])
def test_values_wait_on_the_host_where_the_device_has_no_room(when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    device = lazy()
    states = states_of(torch.zeros(4), torch.zeros(4, dtype=torch.float64), device=device)
    values = [torch.ones(4), torch.ones(4, dtype=torch.float64)]
    transfers, statistics = transfers_of(device, torch.bfloat16)  # so that the first needs memory of its own

    def full(*_: object) -> Tensor:
        raise torch.OutOfMemoryError("planted")

    with monkeypatch.context() as patch:
        if when != "before they are published":
            patch.setattr(device, "empty", full)
        places, _ = sent(transfers, states, [random(4), random(4, dtype=torch.float64)], values)
        if when == "before the values":  # there is room again
            patch.undo()
        patch.setattr(device, "empty", device.empty if when == "before the values" else full)
        transfers.publish(states, places)
        finish(device)
    assert all(map(torch.equal, (state.parameter for state in states), values))
    uploaded = statistics.uploaded_bytes
    assert uploaded == ALIGNMENT * (8 if when == "before the gradient" else 8 + 4)


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
    shadow = FlatShadow(transfers, layout, memory)
    shadow.values[0].fill_(1.0)
    shadow.send()
    finish(device)
    device._enqueue(Stream.CURRENT, Operation(lambda: None))  # the model's
    patch = shadow.patch([0], [1])
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
            transfers.download(states, [TakenGradient(random(5, dtype=one.dtype)) for one in states], chosen)
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


# ---- gradients that stay ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("link", [None, torch.bfloat16], ids=str)
def test_norm_of_gradients_that_stay_comes_in_their_order(link: torch.dtype | None) -> None:
    device = lazy()
    states, gradients, _ = every_kind(device)
    gradients[0][0, 0] = float("nan")
    transfers, statistics = transfers_of(device, link)
    taken = [TakenGradient(gradient) for gradient in gradients]
    sent, arrived, norms = transfers.pack_resident(states, taken)
    arrived.synchronize()
    norm = norm_in(norms)
    ordered = [
        (state, reference()) for group in sent for state, reference in zip(group.pieces, group.taken, strict=True)
    ]
    assert dict(ordered) == dict(zip(states, taken, strict=True))
    begin = 0
    for state, one in ordered:
        assert one is not None
        gradient = gradients[state.row]
        expected = gradient if link is None or gradient.dtype == torch.float64 else gradient.to(link)
        assert torch.equal(one.pending, expected) or state.row == 0
        assert one.pending.stride() == state.strides
        chunks = native.chunk_count(gradient.numel())
        assert norm.nonfinite[begin : begin + chunks].sum() == (state.row == 0)
        if state.row:
            assert norm.sums[begin : begin + chunks].sum() == pytest.approx(expected.double().square().sum().item())
        begin += chunks
    assert begin == len(norm.sums)
    assert statistics.downloaded_bytes == 16 * begin


# ---- gradients that do not travel ------------------------------------------------------------------------------------


@pytest.mark.parametrize("travels", [False, True])
def test_event_passes_behind_copies_to_the_host_that_were_begun_before(travels: bool) -> None:
    """Also where other gradients of the bucket travel."""
    for seed in range(20):
        device = lazy(seed)
        states = states_of(random(70), random(70), device=device)
        device.switch(1)
        for _ in range(10):
            device.late(random(1))  # before it, on its stream
        taken = [TakenGradient(device.late(random(70), on_host=True)), TakenGradient(random(70))]
        taken[0].arrived = device.mark_ready(states[0].parameter)
        device.switch(0)
        _, arrived = transfers_of(device)[0].download(states[: 1 + travels], taken[: 1 + travels], set())
        assert not arrived.query()
        arrived.synchronize()
        assert arrived.query()
        assert all(torch.equal(one.pending, random(70)) for one in taken)


def test_upload_is_told_of_once_it_was_seen_to_arrive() -> None:
    device, trace = lazy(), Trace()
    transfers = Transfers(device, OverlapStatistics(), trace)
    states = states_of(torch.zeros(5), torch.zeros(3), device=device)

    def told() -> list[int]:
        return [span.details["elements"] for span in trace.spans if span.track == "upload"]

    for some in ([states[0]], states):
        assert told() == []
        sent(transfers, some, [random(state.shape.numel()) for state in some], [torch.ones(s.shape) for s in some])
    finish(device)
    transfers.settle()
    assert told() == [ALIGNMENT, 2 * ALIGNMENT]
    assert all(span.end >= span.begin for span in trace.spans)


def test_values_come_up_while_backward_goes_on() -> None:
    device = LateModel(0, 0.0)
    states = states_of(torch.zeros(4), device=device)
    transfers, _ = transfers_of(device)
    taken = [TakenGradient(random(4))]
    places, arrived = speculated(transfers, states, taken)
    arrived.synchronize()
    goes_on: list[Any] = []
    device._waits[Stream.CURRENT].append(SimulatedEvent(device))  # never passes
    device._enqueue(Stream.CURRENT, Operation(lambda: goes_on.append(1)))
    places[states[0]].value.fill_(1.0)
    shadow = places[states[0]].shadow
    assert isinstance(shadow, FlatShadow)
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
