"""Devices: the plain one does everything at once; the simulated one as late, and as badly, as a real one may."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from measures.paced_device import PRESETS, PacedDevice
from support.optimizers import DTYPES
from torch import Tensor, nn

from superadam.devices import Device, PlainDevice, Stream
from superadam.devices.flat import FlatLayout
from superadam.devices.interface import ChunkSums
from superadam.devices.worker import ThreadWorker, WorkerError
from superadam.host.memory import HostNeeds
from superadam.state.parameter import ParameterState
from superadam.testing.simulated import Operation, SeededWorker, SimulatedDevice, SimulatedEvent


def lazy(seed: int = 0) -> SimulatedDevice:
    """Return a device that does nothing before it is waited for."""
    return SimulatedDevice(seed, eagerness=0.0)


def layout_of(*tensors: Tensor) -> FlatLayout:
    return FlatLayout([ParameterState(nn.Parameter(tensor), row, f"p{row}") for row, tensor in enumerate(tensors)])


def finish(device: Device) -> None:
    for stream in Stream:
        device.record(stream).synchronize()


def memory_of(tensor: Tensor) -> Tensor:
    """Return the bytes behind a tensor, which do not keep its owner from thinking that it is gone."""
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())


def is_poisoned(memory: Tensor) -> bool:
    return bool((memory == 0xFF).all())


# ---- plain -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "device", [PlainDevice(), lazy(), PacedDevice(PRESETS["h200"])], ids=["plain", "lazy", "paced"]
)
@pytest.mark.parametrize("part", ["state", "gradients", "pending", "shadows", "largest"])
def test_more_than_this_machine_has_is_refused_by_every_device(device: Device, part: str) -> None:
    with pytest.raises(MemoryError, match=r"^training .* needs about [\d,]+\.\d\d GB of host memory, but this process"):
        device.reserve(HostNeeds(**{part: 1 << 60}))


def test_plain_device_is_the_host() -> None:
    device = PlainDevice()
    assert device.is_host(torch.ones(2))
    assert not device.is_host(torch.ones(2, device="meta"))
    worker = device.start_worker(lambda: False)
    assert isinstance(worker, ThreadWorker)
    worker.close()


# ---- order on the simulated device -----------------------------------------------------------------------------------


def test_nothing_has_happened_before_somebody_waits() -> None:
    device, layout = lazy(), layout_of(torch.zeros(3))
    there = device.empty(layout.numel, torch.float32, Stream.UPLOAD)
    host = device.host_empty(layout.numel, torch.float32)
    host.fill_(2.0)
    device.copy(there, host, Stream.UPLOAD)
    event = device.record(Stream.UPLOAD)
    assert there.isnan().all()
    device.wait(Stream.CURRENT, event)
    assert torch.equal(layout.views(there)[0], torch.full((3,), 2.0))


@pytest.mark.parametrize("on_host", [False, True])
def test_late_values_come_when_their_own_stream_has_passed(on_host: bool) -> None:
    device, values = lazy(), torch.arange(12.0, dtype=torch.bfloat16).view(3, 4).t()
    device.switch(2)
    late = device.late(values, on_host=on_host)
    parameter = nn.Parameter(torch.zeros(4, 3, dtype=torch.bfloat16))
    mark = device.mark_ready(parameter)
    device.switch(0)
    assert late.isnan().all()
    assert late.stride() == values.stride()
    assert device.is_host(late) is on_host
    device.wait(Stream.CURRENT, mark)
    assert torch.equal(late, values)
    del late
    assert not device._host_blocks


def test_late_values_that_were_dropped_go_nowhere() -> None:
    device = lazy()
    for numel in (0, 3):
        late = device.late(torch.ones(numel), on_host=True)
        assert late.shape == (numel,)
        del late
        assert not device._host_blocks
    device.finish()
    assert not any(device._streams.values())


def test_scatter_comes_at_once_but_after_what_is_under_way_on_the_current_stream() -> None:
    device, layout = lazy(), layout_of(torch.zeros(3))
    packed = device.pack([torch.ones(3)], layout, torch.float32)
    parameter = layout.states[0].parameter
    assert packed.isnan().all()
    device.scatter(layout.views(packed), [parameter.data])
    assert torch.equal(parameter, torch.ones(3))


def test_scatter_does_not_wait_for_other_streams_by_itself() -> None:
    seen = set()
    for seed in range(20):
        for waits in (False, True):
            device, layout = lazy(seed), layout_of(torch.zeros(3))
            there, host = device.empty(layout.numel, torch.float32, Stream.UPLOAD), device.host_empty(64, torch.float32)
            host.fill_(2.0)
            device.copy(there, host, Stream.UPLOAD)
            if waits:
                device.wait(Stream.CURRENT, device.record(Stream.UPLOAD))
            device.scatter(layout.views(there), [layout.states[0].parameter.data])
            seen.add((waits, bool(layout.states[0].parameter.isnan().all())))
    assert seen == {(False, True), (False, False), (True, False)}


def test_scatter_reads_what_was_freed_as_nan() -> None:
    device, layout = lazy(), layout_of(torch.zeros(3))
    there = device.empty(layout.numel, torch.float32, Stream.UPLOAD)
    there.fill_(2.0)
    sources = [memory_of(there).view(torch.float32)[:3]]
    del there
    device.scatter(sources, [layout.states[0].parameter.data])
    assert layout.states[0].parameter.isnan().all()


def test_event_waits_for_what_was_enqueued_before_it_only() -> None:
    device, order = lazy(), []
    device._enqueue(Stream.UPLOAD, Operation(lambda: order.append("before")))
    event = device.record(Stream.UPLOAD)
    device._enqueue(Stream.UPLOAD, Operation(lambda: order.append("after")))
    event.synchronize()
    assert order == ["before"]
    assert event.has_passed


def test_stream_that_waits_for_an_event_of_another() -> None:
    for seed in range(20):
        device, order = SimulatedDevice(seed, 0.5), []
        device._enqueue(Stream.CURRENT, Operation(lambda order=order: order.append("packed")))
        device.wait(Stream.DOWNLOAD, device.record(Stream.CURRENT))
        device._enqueue(Stream.DOWNLOAD, Operation(lambda order=order: order.append("downloaded")))
        device.record(Stream.DOWNLOAD).synchronize()
        assert order == ["packed", "downloaded"]


def test_streams_are_not_ordered_by_themselves() -> None:
    orders = set()
    for seed in range(40):
        device, order = lazy(seed), []
        for stream in Stream:
            device._enqueue(stream, Operation(lambda order=order, stream=stream: order.append(stream)))
        finish(device)
        orders.add(tuple(order))
    assert len(orders) == 6


def test_waiting_for_an_event_that_was_never_recorded_orders_nothing() -> None:
    orders = set()
    for seed in range(20):
        device, order = lazy(seed), []
        device._enqueue(Stream.UPLOAD, Operation(lambda order=order: order.append("upload")))
        forgotten = SimulatedEvent(device)
        device.wait(Stream.DOWNLOAD, forgotten)
        device.wait(Stream.CURRENT, forgotten)
        forgotten.synchronize()
        assert order == []
        device._enqueue(Stream.DOWNLOAD, Operation(lambda order=order: order.append("download")))
        finish(device)
        orders.add(tuple(order))
    assert len(orders) == 2


def test_streams_that_wait_in_a_circle_are_told() -> None:
    device = lazy()
    first, second = SimulatedEvent(device), SimulatedEvent(device)
    first.is_recorded = second.is_recorded = True
    device._enqueue(Stream.UPLOAD, Operation(lambda: None, (second,), first))
    device._enqueue(Stream.DOWNLOAD, Operation(lambda: None, (first,), second))
    with pytest.raises(RuntimeError, match="wait for one another in a circle"):
        first.synchronize()


@given(st.integers(0, 2**32), st.sampled_from([0.0, 0.3, 0.9]))
def test_one_seed_gives_one_run(seed: int, eagerness: float) -> None:
    def run() -> list[Any]:
        device, order = SimulatedDevice(seed, eagerness), []
        for i in range(6):
            stream = list(Stream)[i % 3]
            device._enqueue(stream, Operation(lambda i=i: order.append(i)))
            device.record(stream)
        finish(device)
        return order

    assert run() == run()


# ---- memory of the simulated device ----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_fresh_memory_holds_nan(dtype: torch.dtype) -> None:
    device = lazy()
    assert device.empty(9, dtype, Stream.UPLOAD).isnan().all()
    assert device.host_empty(9, dtype).isnan().all()
    packed = device.pack([torch.ones(3, dtype=dtype)], layout_of(torch.ones(3, dtype=dtype)), dtype)
    assert packed.isnan().all()  # not packed yet
    device.record(Stream.CURRENT).synchronize()
    assert packed[3:].isnan().all()  # the gap


def test_only_its_own_host_memory_is_on_the_host() -> None:
    device = lazy()
    host = device.host_empty(128, torch.float32)
    assert device.is_host(host)
    assert device.is_host(host[64:])
    assert not device.is_host(torch.ones(2))
    assert not device.is_host(device.empty(3, torch.float32, Stream.UPLOAD))


def test_freed_memory_is_poisoned_at_once() -> None:
    device = lazy()
    buffer = device.empty(16, torch.float32, Stream.UPLOAD)
    buffer.zero_()
    memory = memory_of(buffer)
    assert not is_poisoned(memory)
    del buffer
    assert is_poisoned(memory)


def test_kept_memory_is_poisoned_when_its_stream_has_passed() -> None:
    device = lazy()
    buffer = device.empty(16, torch.float32, Stream.UPLOAD)
    buffer.zero_()
    seen = []
    memory = memory_of(buffer)
    device._enqueue(Stream.UPLOAD, Operation(lambda: seen.append(is_poisoned(memory))))
    device.record_stream(buffer, Stream.UPLOAD)
    del buffer
    assert not is_poisoned(memory)
    finish(device)
    assert seen == [False]
    assert is_poisoned(memory)


def test_memory_kept_for_two_streams_waits_for_both() -> None:
    for seed in range(20):
        device, seen = lazy(seed), []
        buffer = device.host_empty(16, torch.float32)
        buffer.zero_()
        memory = memory_of(buffer)
        for stream in (Stream.DOWNLOAD, Stream.UPLOAD):
            device._enqueue(stream, Operation(lambda seen=seen, memory=memory: seen.append(is_poisoned(memory))))
            device.record_stream(buffer, stream)
        del buffer
        finish(device)
        assert seen == [False, False]
        assert is_poisoned(memory)


def test_views_keep_a_flat_buffer_alive() -> None:
    device = lazy()
    layout = layout_of(torch.ones(3), torch.ones(2, 2))
    host = device.host_empty(layout.numel, torch.float32)
    host.zero_()
    memory = memory_of(host)
    first, second = layout.views(host)
    del host
    assert device.is_host(second)
    assert not is_poisoned(memory)
    del first
    assert torch.equal(second, torch.zeros(2, 2))
    del second
    assert is_poisoned(memory)
    assert not device._blocks


def test_source_that_is_dropped_before_its_copy_runs_shows_in_the_copy() -> None:
    device = lazy()
    source, target = device.host_empty(4, torch.float32), torch.zeros(4)
    source.fill_(1.0)
    device.copy(target, source, Stream.UPLOAD)
    del source
    finish(device)
    assert target.isnan().all()


def test_storages_that_others_drop_before_a_copy_runs_are_kept() -> None:
    device, parameter = lazy(), nn.Parameter(torch.zeros(4))
    source, before = device.host_empty(4, torch.float32), parameter.data
    source.fill_(1.0)
    device.copy(parameter.data, source, Stream.UPLOAD)
    parameter.data = torch.zeros(4)
    finish(device)
    assert torch.equal(before, torch.ones(4))
    assert torch.equal(parameter, torch.zeros(4))


@pytest.mark.parametrize("back", [False, True])
@pytest.mark.parametrize("which", ["source", "target"])
def test_storages_that_others_resize_before_a_copy_runs_crash_nothing(which: str, back: bool) -> None:
    device, numel = lazy(), 1 << 20
    source, target = device.host_empty(numel, torch.float32), torch.zeros(numel)
    source.fill_(1.0)
    device.copy(target, source, Stream.UPLOAD)
    device.record_stream(source, Stream.UPLOAD)
    storage = (source if which == "source" else target).untyped_storage()
    storage.resize_(0)
    if back:
        storage.resize_(4 * numel)
        source.fill_(2.0)
    finish(device)
    if which == "source":
        assert torch.allclose(target, torch.full((numel,), 2.0 if back else torch.nan), equal_nan=True)
    elif back:
        assert torch.equal(target, torch.full((numel,), 2.0))
    assert device.is_host(source)
    del source, storage
    assert not device._blocks
    assert not device._host_blocks


@pytest.mark.parametrize("which", ["packed", "sums"])
def test_storages_that_others_resize_before_packing_crash_nothing(which: str) -> None:
    device, layout = lazy(), layout_of(torch.zeros(9000))
    room = torch.full((6,), -1.0, dtype=torch.float64)
    packed = device.pack([torch.ones(9000)], layout, torch.float32, ChunkSums.over(room))
    (packed if which == "packed" else room).untyped_storage().resize_(0)
    finish(device)
    if which == "packed":
        assert (room == -1.0).all()
    else:
        assert torch.equal(layout.views(packed)[0], torch.ones(9000))


# ---- its worker ------------------------------------------------------------------------------------------------------


def test_seeded_worker_runs_every_job_in_order() -> None:
    lags = set()
    for seed in range(30):
        done: list[int] = []
        worker = SimulatedDevice(seed).start_worker(lambda: False)
        assert isinstance(worker, SeededWorker)
        for i in range(5):
            worker.submit(lambda _, i=i, done=done: done.append(i))
        lags.add(5 - len(done))
        assert worker.is_idle == (len(done) == 5)
        worker.drain()
        assert done == list(range(5))
        assert worker.is_idle
    assert lags >= {0, 1, 2}


def test_seeded_worker_that_fails_tells_once_and_forgets_what_was_behind() -> None:
    worker = SimulatedDevice(4).start_worker(lambda: False)
    done: list[str] = []

    def fail(is_awaited: Callable[[], bool]) -> None:
        raise KeyError("planted")

    worker._jobs.extend([fail, lambda _: done.append("behind")])
    with pytest.raises(WorkerError, match="KeyError"):
        worker.drain()
    assert done == []
    worker.drain()
    worker.submit(lambda _: done.append("next"))
    worker.close()
    assert done == ["next"]


def test_seeded_worker_does_idle_work_as_long_as_there_is_some() -> None:
    amounts = set()
    for seed in range(60):
        left = [3]

        def work(left: list[int] = left) -> bool:
            left[0] -= 1
            return left[0] > 0

        SimulatedDevice(seed).start_worker(work).wake()
        amounts.add(left[0])
    assert amounts == {3, 2, 1, 0}


def test_empty_buffers_are_freed_like_others() -> None:
    device = lazy()
    layout = layout_of(torch.ones(0))
    for _ in range(3):
        first, second = device.host_empty(0, torch.float32), device.host_empty(0, torch.float32)
        assert device.is_host(first)
        assert not device.is_host(torch.ones(0))
        packed = device.pack([torch.ones(0)], layout, torch.float32)
        device.copy(first, packed, Stream.DOWNLOAD)
        device.record_stream(packed, Stream.DOWNLOAD)
        device.record_stream(second, Stream.UPLOAD)
        del first, second, packed
        finish(device)
    assert not device._blocks


def test_host_memory_keeps_no_state() -> None:
    assert not PlainDevice().can_update
    assert lazy().can_update
