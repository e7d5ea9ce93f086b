"""Devices: the plain one does everything at once; the simulated one as late, and as badly, as a real one may."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from measures.paced_device import PRESETS, PacedDevice
from support.optimizers import DTYPES
from torch import Tensor, nn

from superadam.devices import PlainDevice, Stream
from superadam.devices.flat import FlatLayout
from superadam.devices.interface import ChunkSums
from superadam.host.memory import HostNeeds
from superadam.state.parameter import ParameterState
from superadam.testing.simulated import Operation, SeededWorker, SimulatedDevice, SimulatedEvent


def lazy(seed: int = 0) -> SimulatedDevice:
    """Return a device that does nothing before it is waited for."""
    return SimulatedDevice(seed, eagerness=0.0)


def layout_of(*tensors: Tensor) -> FlatLayout:
    return FlatLayout([ParameterState(nn.Parameter(tensor), row, f"p{row}") for row, tensor in enumerate(tensors)])


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
def test_more_than_this_machine_has_is_refused_by_every_device(device, part):
    with pytest.raises(MemoryError, match=r"^training .* needs about [\d,]+\.\d\d GB of host memory, but this process"):
        device.reserve(HostNeeds(**{part: 1 << 60}))


# ---- order on the simulated device -----------------------------------------------------------------------------------


@pytest.mark.parametrize("on_host", [False, True])
def test_late_values_come_when_their_own_stream_has_passed(on_host):
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


def test_scatter_does_not_wait_for_other_streams_by_itself():
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


def test_scatter_reads_what_was_freed_as_nan():
    device, layout = lazy(), layout_of(torch.zeros(3))
    there = device.empty(layout.numel, torch.float32, Stream.UPLOAD)
    there.fill_(2.0)
    sources = [memory_of(there).view(torch.float32)[:3]]
    del there
    device.scatter(sources, [layout.states[0].parameter.data])
    assert layout.states[0].parameter.isnan().all()


Enqueue = Callable[[Stream, str], None]
ORDERS: dict[str, tuple[Callable[[SimulatedDevice, Enqueue], object], set[str]]] = {
    "streams by themselves": (
        lambda device, enqueue: [enqueue(stream, name) for stream, name in zip(Stream, "abc", strict=True)],
        set(map("".join, itertools.permutations("abc"))),
    ),
    "one that waits for another": (
        lambda device, enqueue: [
            enqueue(Stream.CURRENT, "a"),
            device.wait(Stream.DOWNLOAD, device.record(Stream.CURRENT)),
            enqueue(Stream.DOWNLOAD, "b"),
        ],
        {"ab"},
    ),
    "one that waits for an event that was never recorded": (
        lambda device, enqueue: [
            enqueue(Stream.UPLOAD, "a"),
            device.wait(Stream.DOWNLOAD, SimulatedEvent(device)),
            enqueue(Stream.DOWNLOAD, "b"),
        ],
        {"ab", "ba"},
    ),
}


@pytest.mark.parametrize("eagerness", [0.0, 0.5])
@pytest.mark.parametrize("name", ORDERS)
def test_every_order_that_events_allow_comes_with_some_seed_and_the_same_with_one_seed(name, eagerness):
    program, expected = ORDERS[name]

    def run(seed):
        device, order = SimulatedDevice(seed, eagerness), []
        program(device, lambda stream, name: device._enqueue(stream, Operation(lambda: order.append(name))))
        device.finish()
        return "".join(order)

    runs = [run(seed) for seed in range(60)]
    assert set(runs) == expected
    assert runs == [run(seed) for seed in range(60)]


@pytest.mark.parametrize("is_recorded", [False, True])
def test_an_event_waits_for_what_was_enqueued_before_it_only(is_recorded):
    device, order = lazy(), []
    device._enqueue(Stream.UPLOAD, Operation(lambda: order.append("before")))
    event = device.record(Stream.UPLOAD) if is_recorded else SimulatedEvent(device)
    device._enqueue(Stream.UPLOAD, Operation(lambda: order.append("after")))
    event.synchronize()
    assert order == ["before"] * is_recorded


def test_streams_that_wait_in_a_circle_are_told():
    device = lazy()
    first, second = SimulatedEvent(device), SimulatedEvent(device)
    first.is_recorded = second.is_recorded = True
    device._enqueue(Stream.UPLOAD, Operation(lambda: None, (second,), first))
    device._enqueue(Stream.DOWNLOAD, Operation(lambda: None, (first,), second))
    with pytest.raises(RuntimeError, match="wait for one another in a circle"):
        first.synchronize()


# ---- memory of the simulated device ----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_fresh_memory_holds_nan(dtype):
    device = lazy()
    assert device.empty(9, dtype, Stream.UPLOAD).isnan().all()
    assert device.host_empty(9, dtype).isnan().all()
    packed = device.pack([torch.ones(3, dtype=dtype)], layout_of(torch.ones(3, dtype=dtype)), dtype)
    assert packed.isnan().all()  # not packed yet
    device.record(Stream.CURRENT).synchronize()
    assert packed[3:].isnan().all()  # the gap


@pytest.mark.parametrize("streams", [[], [Stream.UPLOAD], [Stream.DOWNLOAD, Stream.UPLOAD]], ids=len)
@pytest.mark.parametrize("on_host", [False, True])
def test_freed_memory_is_poisoned_once_the_streams_that_it_was_recorded_on_have_passed(streams, on_host):
    for seed in range(20):
        device, seen = lazy(seed), []
        buffer = device.host_empty(16, torch.float32) if on_host else device.empty(16, torch.float32, Stream.UPLOAD)
        buffer.zero_()
        memory = memory_of(buffer)
        for stream in streams:
            device._enqueue(stream, Operation(lambda seen=seen, memory=memory: seen.append(is_poisoned(memory))))
            device.record_stream(buffer, stream)
        assert not is_poisoned(memory)
        del buffer
        assert is_poisoned(memory) is not bool(streams)
        device.finish()
        assert seen == [False] * len(streams)
        assert is_poisoned(memory)


def test_empty_buffers_are_freed_like_others():
    device = lazy()
    first, second = device.host_empty(0, torch.float32), device.host_empty(0, torch.float32)
    assert device.is_host(first)
    assert not device.is_host(torch.ones(0))
    device.record_stream(second, Stream.UPLOAD)
    del first, second
    device.finish()
    assert not device._blocks


def test_views_keep_a_flat_buffer_alive():
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


def test_storages_that_others_drop_before_a_copy_runs_are_kept():
    device, parameter = lazy(), nn.Parameter(torch.zeros(4))
    source, before = device.host_empty(4, torch.float32), parameter.data
    source.fill_(1.0)
    device.copy(parameter.data, source, Stream.UPLOAD)
    parameter.data = torch.zeros(4)
    device.finish()
    assert torch.equal(before, torch.ones(4))
    assert torch.equal(parameter, torch.zeros(4))


@pytest.mark.parametrize("back", [False, True])
@pytest.mark.parametrize("which", ["source", "target"])
def test_storages_that_others_resize_before_a_copy_runs_crash_nothing(which, back):
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
    device.finish()
    if which == "source":
        assert torch.allclose(target, torch.full((numel,), 2.0 if back else torch.nan), equal_nan=True)
    elif back:
        assert torch.equal(target, torch.full((numel,), 2.0))
    assert device.is_host(source)
    del source, storage
    assert not device._blocks
    assert not device._host_blocks


@pytest.mark.parametrize("which", ["packed", "sums"])
def test_storages_that_others_resize_before_packing_crash_nothing(which):
    device, layout = lazy(), layout_of(torch.zeros(9000))
    room = torch.full((6,), -1.0, dtype=torch.float64)
    packed = device.pack([torch.ones(9000)], layout, torch.float32, ChunkSums.over(room))
    (packed if which == "packed" else room).untyped_storage().resize_(0)
    device.finish()
    if which == "packed":
        assert (room == -1.0).all()
    else:
        assert torch.equal(layout.views(packed)[0], torch.ones(9000))


# ---- its worker ------------------------------------------------------------------------------------------------------


def test_seeded_worker_runs_every_job_in_order():
    lags = set()
    for seed in range(30):
        done = []
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


def test_seeded_worker_does_idle_work_as_long_as_there_is_some():
    amounts = set()
    for seed in range(60):
        left = [3]

        def work(left=left):
            left[0] -= 1
            return left[0] > 0

        SimulatedDevice(seed).start_worker(work).wake()
        amounts.add(left[0])
    assert amounts == {3, 2, 1, 0}
