"""Transfers: what travels, in which dtype and buffer, and what waits for what."""

import gc
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from support.overlap import EagerSimulatedDevice, loss_of, overlapped
from torch import Tensor, nn

from superadam.devices import Device, PlainDevice, Stream
from superadam.devices.flat import FlatLayout
from superadam.handles.taken_gradient import TakenGradient
from superadam.host.memory import HostNeeds
from superadam.kernels.hyperparameters import Hyperparameters
from superadam.offload.statistics import OverlapStatistics
from superadam.offload.trace import Trace
from superadam.offload.transfers import Transfers
from superadam.state.new_values import Patch
from superadam.state.parameter import ParameterState
from superadam.testing import SimulatedDevice
from superadam.testing.accelerator import SimulatedEvent

HYPER = [Hyperparameters.of_group(torch.optim.AdamW([torch.zeros(1)]).param_groups[0])] * 8


def states_of(*tensors: Tensor) -> list[ParameterState]:
    return [ParameterState(nn.Parameter(one), row, f"p{row}", is_on_host=False) for row, one in enumerate(tensors)]


def transfers_of(device: Device) -> Transfers:
    return Transfers(device, OverlapStatistics(), Trace(), None)


def test_host_memory_is_not_given_back_while_its_copy_is_under_way() -> None:
    """A step that is dropped, because the worker failed, drops gradients that are still on their way."""
    device = SimulatedDevice(0, 0.0)
    transfers = transfers_of(device)
    taken = {one: TakenGradient(torch.ones(5)) for one in states_of(torch.ones(5))}
    records, arrived = transfers.download(taken, HYPER, set())
    (host,) = [one.pending for one in taken.values()]
    address, numel = host.data_ptr(), len(host.untyped_storage()) // 4
    del taken, records, host, arrived
    assert device.host_empty(numel, torch.float32).data_ptr() != address
    device.finish()
    assert device.host_empty(numel, torch.float32).data_ptr() == address


def test_gradients_from_the_device_wait_for_those_that_were_sent_to_the_host_before() -> None:
    for seed in range(16):  # some of which run the other stream first, and copy what is in another layout
        device = SimulatedDevice(seed, 0.0)
        device.switch(1)
        late = device.late(torch.ones(5, 2), on_host=True)
        sent = TakenGradient(late.t() if seed % 2 else late)
        sent.arrived = device.record(Stream.CURRENT)
        device.switch(0)
        states = states_of(torch.ones(sent.shape), torch.ones(5))
        taken = dict(zip(states, (sent, TakenGradient(torch.ones(5))), strict=True))
        _, arrived = transfers_of(device).download(taken, HYPER, set())
        arrived.synchronize()
        assert sent.pending.eq(1.0).all()


class WatchingDevice(SimulatedDevice):
    """Notes which streams could go on when values are scattered or put."""

    def __init__(self) -> None:
        super().__init__(0, 0.0)
        self.runnable: list[Stream] = []

    def _look(self) -> None:
        first = {stream: next(iter(self._stream(stream).operations), None) for stream in Stream}
        self.runnable = [stream for stream, one in first.items() if one and all(event.has_passed for event in one[1])]

    def scatter(self, sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
        self._look()
        super().scatter(sources, targets)

    def put(self, buffer: Tensor, index: Tensor, values: Tensor) -> None:
        self._look()
        super().put(buffer, index, values)


@pytest.mark.parametrize("has_memory", [True, False])
def test_gradients_of_another_stream_are_rounded_once_they_are_there(has_memory: bool, monkeypatch: Any) -> None:
    device, values = SimulatedDevice(0, 0.0), torch.arange(5.0)
    transfers = Transfers(device, OverlapStatistics(), Trace(), torch.bfloat16)
    device.switch(1)
    taken, made = TakenGradient(device.late(values)), device.record(Stream.CURRENT)
    device.switch(0)
    if not has_memory:  # then they are rounded on the host
        monkeypatch.setattr(device, "pack", Mock(side_effect=torch.OutOfMemoryError))
    made = transfers.round_taken(states_of(values)[0], taken, made)
    assert (made is not None) is has_memory
    assert torch.equal(taken.ready(), values.bfloat16())


def test_gradients_that_are_packed_together_have_one_dtype() -> None:
    """Also where they travel in one, and belong to parameters of one: torch may be asked for gradients of any dtype."""
    device = SimulatedDevice(0)
    packed = list[set[torch.dtype]]()
    pack = device.pack
    device.pack = lambda gradients, *more: (packed.append({one.dtype for one in gradients}), pack(gradients, *more))[1]
    transfers = Transfers(device, OverlapStatistics(), Trace(), torch.float32)
    states = states_of(*torch.zeros(3, 5, dtype=torch.bfloat16))
    dtypes = torch.bfloat16, torch.float32, torch.bfloat16
    values = [torch.full((5,), float(number), dtype=dtype) for number, dtype in enumerate(dtypes)]
    taken = dict(zip(states, map(TakenGradient, values), strict=True))
    records, arrived = transfers.download(taken, HYPER, set())
    arrived.synchronize()
    assert packed == [{torch.bfloat16}, {torch.float32}]
    for number, state in enumerate(states):
        assert records[state].gradient.tolist() == [number] * 5
        assert records[state].gradient.dtype == torch.float32


def test_upload_for_publication_waits_for_what_may_use_its_memory() -> None:
    """The allocator hands out what the model's stream has still to finish with."""
    device = WatchingDevice()
    (state,) = states = states_of(torch.zeros(4))
    transfers = transfers_of(device)
    places = transfers.shadows(states)
    places[states[0]].value.fill_(1.0)
    device._stream(Stream.CURRENT).enqueue(bool)  # the model's
    transfers.publish(places)
    assert device.runnable == [Stream.CURRENT]
    device.finish()
    assert torch.equal(state.parameter, torch.ones(4))


def test_upload_of_a_patch_waits_for_what_may_use_its_memory() -> None:
    device = WatchingDevice()
    states = states_of(torch.zeros(4, dtype=torch.bfloat16))
    transfers = transfers_of(device)
    layout = FlatLayout(states)
    memory = device.empty(layout.numel, torch.bfloat16, Stream.UPLOAD)
    shadow = transfers.shadow(layout, memory)
    shadow.values[0].fill_(1.0)
    shadow.send()
    device.finish()
    device._stream(Stream.CURRENT).enqueue(bool)  # the model's
    patch = Patch(shadow, [0], [1])
    patch.values[0].fill_(2.0)
    patch.places[0].fill_(3)
    patch.send()
    assert device.runnable == [Stream.CURRENT]
    assert device.accelerator.current_stream() in device.accelerator.block_of(memory).used_by  # if values are dropped
    device.finish()
    assert memory[:4].tolist() == [1.0, 1.0, 1.0, 2.0]


def test_room_for_new_values_is_that_of_one_backward_and_what_is_there_is_not_asked_for_again() -> None:
    found = []
    for backwards in (1, 3):
        asked = list[HostNeeds]()
        device = EagerSimulatedDevice(1, 1.0)
        device.free_bytes, device.reserve = lambda: 0, asked.append
        with overlapped(torch.bfloat16, bucket_numel=70, gpu_buckets=0, device=device) as (model, optimizer, scheduler):
            for _ in range(backwards):  # not announced
                loss_of(model, 0).backward()
            optimizer.step()
            values = sum(parameter.nbytes for parameter in model.parameters())
            found.append(asked[-1].shadows)
            assert asked[-1].missing == asked[-1].total - scheduler._needs.total <= 2 * values
    assert found[0] == found[1] >= values


def test_parts_of_a_step_do_not_pile_up() -> None:
    """Each takes host memory until it has travelled, and two were reserved."""
    device = SimulatedDevice(0, 0.0)
    device.scatter = lambda sources, targets: None  # nor does it wait
    states = states_of(torch.zeros(4))
    transfers = transfers_of(device)
    for part, places in enumerate(transfers.stage([states] * 5)):
        places[states[0]].value.fill_(1.0)
        transfers.publish(places)
        assert sum(not arrived.query() for arrived, _, _ in transfers._untold) == min(part + 1, 2)
    transfers.stage([states])  # of the next step
    assert all(arrived.query() for arrived, _, _ in transfers._untold)


def test_nothing_is_counted_of_a_bucket_that_does_not_travel() -> None:
    """Else the device would seem to hold more packed gradients with each, and in the end be short of memory."""
    device = SimulatedDevice(0)
    device.host_empty = Mock(side_effect=MemoryError)
    states = states_of(torch.ones(5), torch.ones(5, dtype=torch.bfloat16))
    transfers = transfers_of(device)
    for chosen in (set(), {states[0]}, {*states}):
        with pytest.raises(MemoryError):
            transfers.download({s: TakenGradient(torch.ones(5, dtype=s.dtype)) for s in states}, HYPER, chosen)
        gc.collect()
        assert transfers._reused.size == transfers._leaving.size == transfers._shadows.size == 0
    assert transfers._most_packed == 0


def test_settling_waits_for_steps_that_were_made_on_the_device() -> None:
    """Nothing is published of them."""
    device = SimulatedDevice(0, 0.0)
    transfers = transfers_of(device)
    parameter = torch.zeros(3)
    device.copy(parameter, torch.ones(3), Stream.CURRENT)
    assert not parameter.any()
    transfers.settle()
    assert parameter.all()


def test_values_come_up_while_backward_goes_on() -> None:
    device = SimulatedDevice(0, 0.0)
    states = states_of(torch.zeros(4))
    transfers = transfers_of(device)
    records, arrived = transfers.download({states[0]: TakenGradient(torch.ones(4))}, HYPER, {*states})
    arrived.synchronize()
    goes_on: list[Any] = []
    device._stream(Stream.CURRENT).wait_event(SimulatedEvent(device.accelerator, is_recorded=True))  # never passes
    device._stream(Stream.CURRENT).enqueue(lambda: goes_on.append(1))
    slot = records[states[0]].slot
    slot.value.fill_(1.0)
    slot.shadow.send()
    device.record(Stream.UPLOAD).synchronize()
    assert slot.shadow.sent[1].query()
    assert not goes_on
    assert transfers._most_packed == transfers._reused.size > 0


class MeetingStatistics(OverlapStatistics):
    """Lets threads that add to `uploaded_bytes` at once all read it before any writes."""

    meeting = threading.Barrier(2)

    def __getattribute__(self, name: str) -> Any:
        value = super().__getattribute__(name)
        if name == "uploaded_bytes":
            with suppress(threading.BrokenBarrierError):  # the other one cannot come while this one has a lock
                self.meeting.wait(0.2)
        return value


def test_uploads_of_two_threads_at_once_are_both_counted() -> None:
    """The worker uploads while the training thread publishes."""
    statistics = MeetingStatistics()
    transfers = Transfers(PlainDevice(), statistics, Trace())
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(lambda _: transfers.upload(torch.ones(3), torch.zeros(3)), range(2)))
    assert statistics.uploaded_bytes == 2 * 3 * 4
