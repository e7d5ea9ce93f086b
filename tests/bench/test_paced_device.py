"""The paced device: its clocks, by a clock that only waiting moves, and that time changes no bit."""

import functools
import itertools
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from measures import pacing
from measures.paced_device import H200, PacedDevice, Rates, constant
from measures.timed_model import Gradients, TimedModel, without_samples
from support.actions_on_a_clock import Clock
from support.overlap import layout_of
from support.visible import bits, state_bits

from superadam import OffloadScheduler, StepKind
from superadam.cli.bench.arrays import HYPERPARAMETERS
from superadam.devices import Device, Stream
from superadam.host.memory import HostNeeds
from superadam.kernels.hyperparameters import Coefficients
from superadam.kernels.resident_step import ResidentStep

RATES = Rates(download=64.0, upload=128.0, memory=1024.0)
"""Bytes per second: powers of two, so that times are exact."""


class NotingDevice(PacedDevice):
    """Keeps what work took, in the order in which it was enqueued."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.durations: list[float] = []

    def spend(self, stream: Stream, seconds: float) -> None:
        self.durations.append(seconds)
        super().spend(stream, seconds)


def clocked(**options: Any) -> tuple[NotingDevice, Clock]:
    clock = Clock()
    return NotingDevice(RATES, now=clock, sleep=clock.sleep, **options), clock


def test_own_time_is_that_of_the_main_thread_in_methods_and_counted_once(monkeypatch):
    monkeypatch.setattr(time, "thread_time", map(float, itertools.count()).__next__)
    device, _ = clocked()
    device.record(Stream.CURRENT)
    assert device.own_seconds == 1.0
    device.record_stream(device.host_empty(3, torch.float32), Stream.CURRENT)  # each calls another one of them
    assert device.own_seconds == 3.0
    with pytest.raises(AssertionError):
        device.wait(Stream.CURRENT, None)
    assert device.own_seconds == 4.0
    with ThreadPoolExecutor(1) as threads:
        threads.submit(device.record, Stream.CURRENT).result()
    assert device.own_seconds == 4.0


def test_work_returns_at_once_and_an_event_passes_with_what_was_before_it():
    device, clock = clocked()
    device.spend(Stream.CURRENT, 2.0)
    event = device.record(Stream.CURRENT)
    device.spend(Stream.CURRENT, 3.0)
    assert (clock.now, event.passed_at(), event.query()) == (100.0, 102.0, False)
    event.synchronize()
    assert (clock.now, event.query()) == (102.0, True)
    event.synchronize()
    assert clock.slept == [2.0]


ACTIONS = st.one_of(
    st.tuples(st.just("spend"), st.sampled_from(Stream), st.integers(0, 9)),
    st.tuples(st.just("wait"), st.sampled_from(Stream), st.sampled_from(Stream)),
    st.tuples(st.just("pass"), st.integers(0, 9), st.none()),
)


@given(st.lists(ACTIONS, max_size=30))
def test_every_stream_is_a_queue_and_waits_order_streams(actions):
    device, clock = clocked()
    begun = dict.fromkeys(Stream, 0.0)  # before which nothing of a stream may begin
    for what, one, other in actions:
        if what == "pass":
            clock.now += one
        elif what == "wait":
            event = device.record(other)
            device.wait(one, event)
            begun[one] = max(begun[one], event.passed_at())
        else:
            device.spend(one, other)
            end = device.record(one).passed_at()
            assert end - other == max(clock.now, begun[one])  # as early as it may
            begun[one] = end
    assert clock.slept == []


def test_everything_takes_its_bytes_at_its_rate():
    device, _ = clocked()
    gradients = [torch.ones(64, dtype=torch.bfloat16)]
    packed = device.pack(gradients, layout_of(torch.zeros(64, dtype=torch.bfloat16)), torch.float32)
    host = device.host_empty(64, torch.float32)
    device.copy(host, packed, Stream.DOWNLOAD)
    device.copy(packed, host, Stream.UPLOAD)
    device.copy(packed, host, Stream.CURRENT)
    device.scatter([packed], [torch.zeros(64)])
    device.reserve(HostNeeds(largest=4096))
    source, target = device.host_empty(64, torch.float32).fill_(3.0), torch.zeros(64)
    device.scatter([source], [target])  # crosses the link
    assert torch.equal(target, source)
    down, up, packing = 256 / 64.0, 256 / 128.0, (128 + 256) / 1024.0
    assert device.durations == [packing, down, up, down, 2 * 256 / 1024.0, 256 / 1024.0 + up]


def test_a_step_on_the_device_moves_its_state_twice():
    """Smaller state: 5 bytes for each element, and two exponents; what it stores is the CPU's step."""
    device, _ = clocked()
    high, low, exp_avg, exp_avg_sq = (torch.zeros(64, dtype=dtype) for dtype in (torch.int16, *3 * [torch.uint8]))
    exponents = [torch.zeros(1, dtype=torch.uint8) for _ in range(2)]
    gradient, parameter = torch.ones(64, dtype=torch.bfloat16), torch.zeros(64, dtype=torch.bfloat16)
    step = ResidentStep(high, exp_avg, exp_avg_sq, None, gradient, parameter, 0, *exponents, low)
    device.update([step], [Coefficients.at_step(HYPERPARAMETERS, 1)])
    assert device.durations[-1] == (64 * (2 * 5 + 2 + 2) + 2 * 2) / 1024.0
    master = (high.int() << 16 | low.int() << 8).view(torch.float32)
    assert torch.equal(master.bfloat16(), parameter)
    assert all(bool(tensor.all()) for tensor in (master, exp_avg, exp_avg_sq, *exponents))
    step = ResidentStep(*torch.zeros(3, 64), None, gradient, parameter, 0)
    device.update([step], [Coefficients.at_step(HYPERPARAMETERS, 1)])
    assert device.durations[-1] == 64 * (6 * 4 + 2 + 2) / 1024.0


def test_kept_host_memory_is_not_handed_out_before_its_stream_has_passed():
    device, clock = clocked()
    device.reserve(HostNeeds(largest=1024))
    held = [device.host_empty(1024, torch.float32)]  # all of the slab
    address = held[0].data_ptr()
    device.spend(Stream.UPLOAD, 5.0)
    device.record_stream(held.pop(), Stream.UPLOAD)
    assert device.host_empty(1024, torch.float32).data_ptr() != address
    clock.now += 5.0
    assert device.host_empty(1024, torch.float32).data_ptr() == address


def test_it_knows_its_free_memory_and_has_every_core():
    device = PacedDevice(H200, free_bytes=1000)
    memory = device.empty(100, torch.float32, Stream.CURRENT)
    other, view = device.empty(7, torch.bfloat16, Stream.UPLOAD), memory[50:]
    assert device.free_bytes() == 1000 - 400 - 14
    del memory
    assert device.free_bytes() == 1000 - 400 - 14
    del view, other
    assert device.free_bytes() == 1000
    assert device.empty(0, torch.float32, Stream.CURRENT).shape == (0,)
    assert PacedDevice(RATES).free_bytes() is None
    assert device.idle_cores() == Device.idle_cores(device) > 0


SWIFT = Rates(1e15, 1e15, 1e15)


def test_gradients_that_lie_otherwise_are_copied():
    memory = torch.randn(192).to(torch.bfloat16)
    device, _ = clocked(constants=[memory])
    layout = layout_of(*[torch.zeros(64, dtype=torch.bfloat16)] * 2)
    for gradients in (
        [constant(memory, 64, 64), constant(memory, 0, 64)],  # in another order
        [constant(memory, 0, 64), constant(memory, 128, 64)],  # apart
        [constant(memory, 0, 64), constant(memory, 64, 64).clone()],  # not constant
        [constant(memory, 0, 64), memory[64:192:2]],  # not dense
    ):
        packed = device.pack(gradients, layout, torch.bfloat16)
        assert not memory.data_ptr() <= packed.data_ptr() < memory.data_ptr() + memory.nbytes
        assert all(map(torch.equal, layout.views(packed), gradients))
    wide = device.pack([constant(memory, 0, 64), constant(memory, 64, 64)], layout, torch.float32)
    assert torch.equal(wide, memory[:128].float())
    wide = device.pack([constant(memory, 0, 64)], layout_of(torch.zeros(64)), torch.float32)
    assert torch.equal(wide, memory[:64].float())


@pytest.mark.parametrize("kept", [0, 2])
def test_constants_give_the_state_of_plain_steps(kept):
    gradients, norms = Gradients([4160] * 6, 3), [0.9, 0.5, 30.0]
    gradients.scale_to(norms)
    model, plain = TimedModel(gradients), TimedModel(gradients)
    optimizer, twin = pacing._optimizer(model, 1e-5, [norms]), pacing._optimizer(plain, 1e-5, [norms])
    model.device = plain.device = PacedDevice(SWIFT, constants=gradients.sets, norms=gradients.sums)
    used = [[one.clone() for one in gradients.sets]]
    options = {"bucket_numel": 5000, "gpu_buckets": kept, "num_threads": 2, "device": model.device}
    with without_samples(), OffloadScheduler(optimizer, model, **options) as scheduler:
        side = pacing.Side("", model, functools.partial(pacing._step, model, optimizer), scheduler)
        clipped = [side.iterate() for _ in range(13)]
        scheduler.synchronize()
        model.device.run_deferred()
        gradients.scale_to(norms[::-1])
        used.append([one.clone() for one in gradients.sets])
        clipped += [side.iterate() for _ in range(10)]
        shown = [bits(weight) for weight in model.weights]
        clipped.append(side.iterate())
        assert shown == [bits(weight) for weight in model.weights]  # nothing arrives but in a first step
        model.device.constants.clear()
        clipped.append(side.iterate())
        assert (scheduler.statistics.resident_buckets > 0) == (kept > 0)
        assert scheduler.optimizer.statistics.accepted > 10
    assert optimizer.statistics.clipped == sum(clipped) == 8  # every third of 25
    assert all(map(torch.equal, used[1], gradients.sets))
    for step, is_clipped in enumerate(clipped):
        for one, values in zip(gradients.sets, used[step >= 13], strict=True):
            one.copy_(values)
        plain().backward()
        for parameter in plain.weights:  # the host's own step, of gradients in memory of their own
            parameter.grad = parameter.grad.clone()
        twin.step()
        twin.zero_grad()
        assert (twin.last_outcome.kind is StepKind.CLIPPED) == is_clipped
    assert state_bits(optimizer) == state_bits(twin)


def test_a_turn_times_iterations_by_the_device_and_leaves_nothing_under_way(monkeypatch):
    ended = []
    synchronize = OffloadScheduler.synchronize
    monkeypatch.setattr(OffloadScheduler, "synchronize", lambda self: ended.append(model.step) or synchronize(self))
    gradients = Gradients([640] * 4, 5)
    gradients.scale_to([0.9, 0.9, 0.9, 1.1, 0.9])
    model = TimedModel(gradients)
    optimizer = pacing._optimizer(model, 1e-5, [gradients.norms])
    model.device = PacedDevice(SWIFT, constants=gradients.sets, norms=gradients.sums)
    model.forward_seconds, model.backward_seconds = 0.002, 0.004
    options = {"bucket_numel": 1280, "num_threads": 1, "device": model.device}
    with without_samples(), OffloadScheduler(optimizer, model, **options) as scheduler:
        side = pacing.Side("auto", model, functools.partial(pacing._step, model, optimizer), scheduler)
        for _ in range(2):
            side.turn(5)
        assert len(side.seconds[False]) + len(side.seconds[True]) == 10
        assert len(side.seconds[True]) == 2  # in each turn the second that is timed
        assert side.accepted >= 2 * 4 * 4
        assert side.accepted + side.redone <= 2 * 5 * 4
        assert all(seconds >= 0.006 for seconds in itertools.chain(*side.seconds.values()))
        assert ended == [7, 7]
        side.settle()
        assert ended == [7, 7, 6]
        assert len(side.seconds[False]) + len(side.seconds[True]) == 10
