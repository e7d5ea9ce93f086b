"""The simulated device does all as late, and as badly, as a real one may; events of accelerators are torch's own."""

import functools
import gc
import itertools
import sys
from collections.abc import Callable
from unittest import mock

import pytest
import torch
from measures.paced_device import H200, PacedDevice
from support.optimizers import DTYPES
from support.overlap import PlantedError, layout_of
from torch import Tensor, nn

from superadam.devices import Device, PlainDevice, Stream
from superadam.devices.interface import AllEvents
from superadam.devices.worker import WorkerError
from superadam.host.memory import HostNeeds
from superadam.testing.accelerator import SimulatedEvent
from superadam.testing.simulated import SimulatedDevice


def lazy(seed: int = 0) -> SimulatedDevice:
    """Return a device that does nothing before it is waited for."""
    return SimulatedDevice(seed, eagerness=0.0)


@pytest.mark.parametrize("device", [PlainDevice(), lazy(), PacedDevice(H200)], ids=["plain", "lazy", "paced"])
@pytest.mark.parametrize("part", ["state", "gradients", "pending", "shadows", "largest"])
def test_more_than_this_machine_has_is_refused_by_every_device(device: Device, part: str) -> None:
    with pytest.raises(MemoryError, match=r"^training .* needs about [\d,]+\.\d\d GB of host memory, but this process"):
        device.reserve(HostNeeds(**{part: 1 << 60}))


# ---- order -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("on_host", [False, True])
def test_late_values_come_when_their_own_stream_has_passed(on_host: bool) -> None:
    device, values = lazy(), torch.arange(12.0, dtype=torch.bfloat16).view(3, 4).t()
    device.switch(2)
    late = device.late(values, on_host=on_host)
    mark = device.mark_ready(nn.Parameter(torch.zeros(4, 3, dtype=torch.bfloat16)))
    device.switch(0)
    assert late.isnan().all()
    assert late.stride() == values.stride()
    assert device.is_host(late) is on_host
    device.wait(Stream.CURRENT, mark)
    device.record(Stream.CURRENT).synchronize()
    assert torch.equal(late, values)
    with pytest.raises(ValueError, match="negated lazily"):  # whose memory does not hold its values
        device.accelerator.alias(torch._neg_view(late))


def test_scatter_comes_at_once_and_waits_for_other_streams_only_where_it_was_told_to() -> None:
    seen = set()
    for seed, waits in itertools.product(range(20), (False, True)):
        device, layout = lazy(seed), layout_of(torch.zeros(3))
        there, host = device.empty(layout.numel, torch.float32, Stream.UPLOAD), device.host_empty(64, torch.float32)
        host.fill_(2.0)
        device.copy(there, host, Stream.UPLOAD)
        if waits:
            device.wait(Stream.CURRENT, device.record(Stream.UPLOAD))
        device.scatter(layout.views(there), [layout.states[0].parameter.data])
        seen.add((waits, bool(layout.states[0].parameter.isnan().all())))
    assert seen == {(False, True), (False, False), (True, False)}


@pytest.mark.parametrize("is_registered", [False, True])
def test_copies_from_memory_that_is_not_pinned_wait(is_registered: bool) -> None:
    device = lazy()
    if not is_registered:
        device.pinned.close()
    host, there = device.host_empty(4, torch.float32), device.empty(4, torch.float32, Stream.UPLOAD)
    device.copy(there, host.fill_(1.0), Stream.UPLOAD)
    assert torch.equal(there, host) is not is_registered


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
            device.wait(Stream.DOWNLOAD, SimulatedEvent(device.accelerator)),
            enqueue(Stream.DOWNLOAD, "b"),
        ],
        {"ab", "ba"},
    ),
}


@pytest.mark.parametrize("eagerness", [0.0, 0.5])
@pytest.mark.parametrize("name", ORDERS)
def test_every_order_that_events_allow_comes_with_some_seed_and_the_same_with_one_seed(name, eagerness):
    program, expected = ORDERS[name]

    def run(seed: int) -> str:
        device, order = SimulatedDevice(seed, eagerness), []
        program(device, lambda stream, name: device._stream(stream).enqueue(lambda: order.append(name)))
        device.finish()
        return "".join(order)

    runs = [run(seed) for seed in range(100)]
    assert set(runs) == expected
    assert runs == [run(seed) for seed in range(100)]


def test_streams_that_wait_in_a_circle_are_told() -> None:
    accelerator = lazy().accelerator
    streams = accelerator.Stream(), accelerator.Stream()
    events = [SimulatedEvent(accelerator, is_recorded=True) for _ in streams]
    for stream, event, other in zip(streams, events, reversed(events), strict=True):
        stream.wait_event(other)
        event.record(stream)
    with pytest.raises(RuntimeError, match="wait for one another in a circle"):
        events[0].synchronize()


# ---- memory ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_fresh_memory_holds_nan(dtype: torch.dtype) -> None:
    device = lazy()
    assert device.empty(9, dtype, Stream.UPLOAD).isnan().all()
    assert device.host_empty(9, dtype).isnan().all()
    packed = device.pack([torch.ones(3, dtype=dtype)], layout_of(torch.ones(3, dtype=dtype)), dtype)
    assert packed.isnan().all()  # not packed yet
    device.record(Stream.CURRENT).synchronize()
    assert packed[3:].isnan().all()  # the gap


@pytest.mark.parametrize("is_recorded", [False, True])
@pytest.mark.parametrize("on_host", [False, True])
def test_what_is_dropped_before_a_stream_has_read_it_is_nan_to_that_unless_it_was_recorded(on_host, is_recorded):
    seen = set()
    for seed in range(20):
        device, target = lazy(seed), torch.zeros(4)
        source = device.host_empty(4, torch.float32) if on_host else device.empty(4, torch.float32, Stream.CURRENT)
        device.copy(target, source.fill_(1.0), Stream.UPLOAD)
        if is_recorded:
            device.record_stream(source, Stream.UPLOAD)
        del source
        device.host_empty(4, torch.float32)
        device.finish()
        seen.add(bool(target.isnan().all()))
        assert not device.has_memory_in_use
    assert seen == {False} if is_recorded else True in seen


def test_more_tensors_are_dropped_at_once_than_calls_may_be_nested() -> None:
    device = lazy(0)
    held = [device.host_empty(4, torch.float32) for _ in range(sys.getrecursionlimit())]
    held.clear()
    device.finish()
    assert not device.has_memory_in_use


def test_memory_of_the_model_that_others_drop_before_a_copy_runs_is_kept() -> None:
    device, parameter = lazy(), nn.Parameter(torch.zeros(4))
    source, before = device.host_empty(4, torch.float32), parameter.data
    device.copy(parameter.data, source.fill_(1.0), Stream.UPLOAD)
    parameter.data = torch.zeros(4)
    device.finish()
    assert torch.equal(before, torch.ones(4))
    assert torch.equal(parameter, torch.zeros(4))


# ---- a model that computes late --------------------------------------------------------------------------------------


def test_a_model_that_computes_late_computes_the_same() -> None:
    def run(there: Callable[[Tensor], Tensor]) -> list[Tensor]:
        torch.default_generator.manual_seed(1)
        parameters = [there(torch.randn(4, 4)).requires_grad_() for _ in range(3)]
        found = there(torch.randn(3, 4))
        for one in parameters:
            found = nn.functional.layer_norm(found @ one, (4,)).relu()
        chosen = found[found > 0.5]  # whose number depends on values
        loss = chosen.square().sum() + nn.functional.dropout(found, 0.5).sum()
        loss.backward()
        with torch.no_grad():
            parameters[0].mul_(loss.item())
        return [loss.detach(), *(one.grad for one in parameters), *parameters]

    expected = run(Tensor.clone)
    for seed in range(5):
        device = SimulatedDevice(seed, 0.3)
        with device.computing():
            found = run(device.there)
        device.finish()
        assert all(map(torch.equal, found, expected))


def test_nothing_of_a_late_model_is_there_before_somebody_waits() -> None:
    device = lazy()
    with device.computing():
        doubled = device.there(torch.ones(3)) * 2
    assert doubled.isnan().all()
    with device.computing():
        assert doubled.sum().item() == 6.0


# ---- its worker ------------------------------------------------------------------------------------------------------


def test_seeded_worker_does_any_number_of_its_jobs_and_of_its_idle_work_before_it_is_waited_for() -> None:
    lags, amounts = set(), set()
    for seed in range(60):
        done, left = list[int](), [3]

        def work(left: list[int] = left) -> bool:
            left[0] -= 1
            return left[0] > 0

        worker = SimulatedDevice(seed).start_worker(work)
        worker.wake()
        amounts.add(left[0])
        for i in range(5):
            worker.submit(lambda _, i=i, done=done: done.append(i))
        lags.add(5 - len(done))
        assert worker.is_idle == (len(done) == 5)
        worker.drain()
        assert done == list(range(5))
        assert worker.is_idle
    assert lags >= {0, 1, 2}
    assert amounts == {3, 2, 1, 0}


def test_idle_work_that_fails_is_told_by_the_next_call_and_not_by_what_woke_the_worker() -> None:
    """As a thread does: what wakes it is no call of the program's."""
    idle = mock.Mock(side_effect=PlantedError("planted"))
    worker = lazy().start_worker(idle)
    for _ in range(9):
        worker.wake()
    assert idle.call_count == 1  # nothing runs behind an error
    with pytest.raises(WorkerError, match="planted"):
        worker.drain()


def test_memory_of_a_device_that_is_gone_is_no_longer_pinned(caplog: pytest.LogCaptureFixture) -> None:
    accelerator = SimulatedDevice(0).accelerator
    gc.collect()
    assert (accelerator.registered, caplog.messages) == ({}, [])


def test_what_is_written_to_memory_that_was_freed_is_told() -> None:
    device = lazy()
    tensor = device.empty(3, torch.float32, Stream.UPLOAD)
    late = device.accelerator.alias(tensor)
    del tensor
    device.finish()
    late.zero_()
    with pytest.raises(RuntimeError, match="written to after it was free"):
        device.finish()


# ---- an accelerator beside a model in host memory --------------------------------------------------------------------

PARAMETER = nn.Parameter(torch.zeros(3))


def test_nothing_is_recorded_where_torch_was_built_without_one(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: None)
    assert PlainDevice().mark_ready(PARAMETER) is None


@pytest.mark.parametrize(("kind", "options"), [("cuda", {"blocking": True}), ("xpu", {})])
def test_events_are_torch_s_own_and_belong_to_the_device_of_the_thread_that_records_them(kind, options, monkeypatch):
    module, entered = mock.MagicMock(**{"is_initialized.return_value": False, "current_device.return_value": 3}), []
    module.device.side_effect = lambda index: mock.patch.object(module, "entered", index)
    for name in ("record", "query", "synchronize"):
        getattr(module.Event.return_value, name).side_effect = lambda name=name: entered.append((name, module.entered))
    module.entered = 3
    monkeypatch.setattr(torch.accelerator, "current_accelerator", functools.partial(torch.device, kind))
    monkeypatch.setattr(torch, "get_device_module", lambda kind: module)
    device = PlainDevice()
    assert device.mark_ready(PARAMETER) is None  # recording would make a context
    module.is_initialized.return_value = True
    event = device.mark_ready(PARAMETER)
    module.Event.assert_called_once_with(**options)
    module.entered = 0  # of the worker's thread
    assert event.query() is False
    event.synchronize()
    assert entered == [("record", 3), ("query", 3), ("synchronize", 3)]
    assert module.entered == 0


def test_several_events_pass_with_the_last():
    device = SimulatedDevice(0, 0.0)
    events = AllEvents((device.record(Stream.UPLOAD), device.record(Stream.DOWNLOAD)))
    assert not events.query()
    events.events[0].synchronize()
    assert events.query() is events.events[1].query()
    events.synchronize()
    assert events.query()
    assert all(event.query() for event in events.events)
    assert AllEvents().query()


def test_what_was_enqueued_is_done_where_the_driver_has_no_memory_for_an_event(monkeypatch):
    device, values = lazy(), torch.arange(3.0)
    late = device.late(values)
    monkeypatch.setattr(device.accelerator, "Event", mock.Mock(side_effect=torch.OutOfMemoryError))
    assert device.record(Stream.CURRENT).query()
    assert torch.equal(late, values)


def test_a_stream_waits_for_several_events():
    device, values = lazy(), torch.arange(3.0)
    copies = [device.empty(3, torch.float32, stream) for stream in (Stream.UPLOAD, Stream.DOWNLOAD)]
    for copy, stream in zip(copies, (Stream.UPLOAD, Stream.DOWNLOAD), strict=True):
        device.copy(copy, values, stream)
    device.wait(Stream.CURRENT, AllEvents((device.record(Stream.UPLOAD), device.record(Stream.DOWNLOAD))))
    device.record(Stream.CURRENT).synchronize()
    assert all(torch.equal(copy, values) for copy in copies)
