"""Transfers: what travels, in which dtype and buffer, and what waits for what."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from superadam.devices import Device, PlainDevice, Stream
from superadam.devices.simulated import Operation, SimulatedDevice, SimulatedEvent
from superadam.flat import ALIGNMENT, FlatLayout
from superadam.journal import Journal
from superadam.overlap_statistics import OverlapStatistics
from superadam.parameter import ParameterState
from superadam.transfers import Transfers

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


class LateModel(SimulatedDevice):
    """A simulated device whose model computes late, too: waiting holds up its stream, not whoever enqueues to it."""

    def wait(self, stream: Stream, event: SimulatedEvent) -> None:  # type: ignore[override]
        if event.is_recorded:
            self._waits[stream].append(event)


class CountingDevice(SimulatedDevice):
    """Remembers what was copied: elements and stream."""

    def __init__(self) -> None:
        super().__init__(0, 0.0)
        self.copies: list[tuple[int, torch.dtype, Stream]] = []

    def copy(self, destination: Tensor, source: Tensor, stream: Stream) -> None:
        assert destination.dtype == source.dtype
        self.copies.append((source.numel(), source.dtype, stream))
        super().copy(destination, source, stream)


def lazy(seed: int = 0) -> SimulatedDevice:
    """Return a device that does nothing before somebody waits."""
    return SimulatedDevice(seed, eagerness=0.0)


def finish(device: SimulatedDevice) -> None:
    for stream in Stream:
        device.record(stream).synchronize()


def states_of(*tensors: Tensor, device: Device | None = None) -> list[ParameterState]:
    return [
        ParameterState(nn.Parameter(t), row, f"p{row}", is_on_host=None if device is None else device.is_host(t))
        for row, t in enumerate(tensors)
    ]


def transfers_of(device: Device, link_dtype: torch.dtype | None = None) -> tuple[Transfers, OverlapStatistics]:
    journal = Journal()
    return Transfers(device, journal, link_dtype), journal.statistics


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


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
    hosts, arrived = transfers.download(states, gradients)
    arrived.synchronize()
    for state, gradient, host in zip(states, gradients, hosts, strict=True):
        assert torch.equal(host, gradient)
        assert host.dtype == gradient.dtype
        assert host.stride() == state.strides
        assert not host.requires_grad


def test_nothing_is_there_before_the_event() -> None:
    device = lazy()
    transfers, _ = transfers_of(device)
    (host,), arrived = transfers.download(states_of(random(3), device=device), [random(3)])
    assert host.isnan().all()
    assert device.is_host(host)
    arrived.synchronize()
    assert torch.equal(host, random(3))


@pytest.mark.parametrize("link", [None, *DTYPES[:3]], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dtype_in_which_gradients_arrive(device: Device, dtype: torch.dtype, link: torch.dtype | None) -> None:
    states = states_of(random(70, dtype=dtype), device=device)
    gradient = random(70, dtype=dtype, seed=1)
    (host,), arrived = transfers_of(device, link)[0].download(states, [gradient])
    arrived.synchronize()
    expected = gradient if link is None or dtype == torch.float64 else gradient.to(link)
    assert host.dtype == expected.dtype
    assert torch.equal(host, expected)
    if link == torch.float32:
        assert torch.equal(host.to(dtype), gradient)  # nothing is lost


@given(st.lists(st.integers(0, 2**16 - 1), min_size=1, max_size=20), st.sampled_from([torch.bfloat16, torch.float16]))
def test_widening_keeps_every_bit(patterns: list[int], dtype: torch.dtype) -> None:
    gradient = torch.tensor(patterns, dtype=torch.uint16).view(torch.int16).view(dtype)
    for device in (PlainDevice(), lazy()):
        transfers, _ = transfers_of(device, torch.float32)
        (host,), arrived = transfers.download(states_of(torch.zeros_like(gradient), device=device), [gradient])
        arrived.synchronize()
        back = host.to(dtype)
        same = back.view(torch.int16) == gradient.view(torch.int16)
        assert bool((same | (back.isnan() & gradient.isnan())).all())


def test_one_copy_for_each_dtype() -> None:
    device = CountingDevice()
    dtypes = [torch.bfloat16, torch.float32, torch.bfloat16, torch.float32, torch.float64]
    states = states_of(*[random(3, dtype=dtype) for dtype in dtypes], device=device)
    gradients = [random(3, dtype=dtype, seed=row) for row, dtype in enumerate(dtypes)]
    transfers, statistics = transfers_of(device)
    hosts, arrived = transfers.download(states, gradients)
    arrived.synchronize()
    assert all(map(torch.equal, hosts, gradients))
    assert device.copies == [
        (2 * ALIGNMENT, torch.bfloat16, Stream.DOWNLOAD),
        (2 * ALIGNMENT, torch.float32, Stream.DOWNLOAD),
        (ALIGNMENT, torch.float64, Stream.DOWNLOAD),
    ]
    assert statistics.downloaded_bytes == ALIGNMENT * (2 * 2 + 2 * 4 + 8)


def test_link_dtype_puts_gradients_of_all_dtypes_into_one_buffer() -> None:
    device = CountingDevice()
    states = states_of(random(3), random(3, dtype=torch.bfloat16), random(3, dtype=torch.float16), device=device)
    transfers, statistics = transfers_of(device, torch.float32)
    transfers.download(states, [state.parameter.detach() for state in states])[1].synchronize()
    assert device.copies == [(3 * ALIGNMENT, torch.float32, Stream.DOWNLOAD)]
    assert statistics.downloaded_bytes == 3 * ALIGNMENT * 4


# ---- downloads: whose memory -----------------------------------------------------------------------------------------


def test_gradient_on_the_host_is_kept_without_a_copy() -> None:
    gradient = random(5, 7)
    transfers, statistics = transfers_of(PlainDevice())
    (host,), _ = transfers.download(states_of(random(5, 7)), [gradient])
    assert host.data_ptr() == gradient.data_ptr()
    assert statistics.downloaded_bytes == 0


@pytest.mark.parametrize("link", [None, torch.float32, torch.bfloat16], ids=str)
def test_gradient_that_is_part_of_a_larger_buffer_is_copied(link: torch.dtype | None) -> None:
    flat = random(2, 35)
    gradient = flat[1].view(5, 7)
    expected = gradient.to(link or torch.float32, copy=True)
    (host,), _ = transfers_of(PlainDevice(), link)[0].download(states_of(random(5, 7)), [gradient])
    flat.fill_(-1.0)
    assert torch.equal(host, expected)
    assert host.untyped_storage().nbytes() == host.nbytes


def test_gradient_on_the_device_may_be_overwritten_at_once(device: Device) -> None:
    gradient = random(5)
    if device.is_host(gradient):
        gradient = torch.cat([gradient, gradient])[:5]
    (host,), arrived = transfers_of(device)[0].download(states_of(random(5), device=device), [gradient])
    gradient.fill_(-1.0)
    arrived.synchronize()
    assert torch.equal(host, random(5))


def test_device_memory_is_given_back_after_its_copy() -> None:
    device = lazy()
    transfers, _ = transfers_of(device)
    hosts, arrived = transfers.download(states_of(random(5), device=device), [random(5)])
    assert len(device._blocks) == 1  # what was packed is dropped, and kept by the stream alone
    finish(device)
    assert arrived.has_passed  # type: ignore[attr-defined]
    assert torch.equal(hosts[0], random(5))
    hosts.clear()
    assert not device._blocks


def test_host_memory_is_not_given_back_while_its_copy_is_under_way() -> None:
    """A step that is dropped, because the worker failed, drops gradients that are still on their way."""
    device = lazy()
    transfers, _ = transfers_of(device)
    hosts, arrived = transfers.download(states_of(random(5), device=device), [random(5)])
    memory = torch.empty(0, dtype=torch.float32).set_(hosts[0].untyped_storage())
    del hosts, arrived
    finish(device)
    assert memory.isnan().all()  # free, and nothing was written afterwards


# ---- downloads: refusals ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gradient", "error", "sentence"),
    [
        (torch.ones(5).to_sparse(), TypeError, "the gradient of p1 is sparse, expected a dense one"),
        (torch.ones(5, dtype=torch.float64), TypeError, "the gradient of p1 is torch.float64, expected float32"),
        (torch.ones(5, dtype=torch.complex64), TypeError, "the gradient of p1 is torch.complex64, expected"),
        (torch.ones(4), ValueError, r"the gradient of p1 has shape \(4,\), expected that of the parameter, \(5,\)"),
    ],
)
@pytest.mark.parametrize("link", [None, torch.bfloat16], ids=str)
def test_gradient_that_does_not_fit(
    device: Device, gradient: Tensor, error: type[Exception], sentence: str, link: torch.dtype | None
) -> None:
    transfers, statistics = transfers_of(device, link)
    with pytest.raises(error, match=sentence):
        transfers.download(states_of(random(5), random(5), device=device), [random(5), gradient])
    assert statistics.downloaded_bytes == 0
    if isinstance(device, SimulatedDevice):
        assert not any(device._streams.values())


# ---- uploads ---------------------------------------------------------------------------------------------------------


@contextmanager
def delivered(transfers: Transfers, states: list[ParameterState], values: list[Tensor]) -> Iterator[None]:
    parcel = transfers.parcel(states)
    assert [value.dtype for value in parcel.values] == [state.parameter_dtype for state in states]
    assert [value.stride() for value in parcel.values] == [state.strides for state in states]
    for target, value in zip(parcel.values, values, strict=True):
        target.copy_(value)
    parcel.deliver()
    del parcel  # what it held is kept by the streams
    yield


def deliver(transfers: Transfers, states: list[ParameterState], values: list[Tensor]) -> None:
    with delivered(transfers, states, values):
        pass


def test_values_of_all_dtypes_and_layouts_reach_their_parameters(device: Device) -> None:
    states = states_of(
        random(5, 7),
        random(6, 4, dtype=torch.bfloat16).t(),
        random(3, 4, 5, 6).contiguous(memory_format=torch.channels_last),
        random(8, 6)[:, ::2],
        random(dtype=torch.float16),
        random(9, dtype=torch.bfloat16),
        random(0, 2),
        device=device,
    )
    values = [random(*state.shape, dtype=state.parameter_dtype, seed=5) for state in states]
    versions = [state.parameter._version for state in states]
    transfers, statistics = transfers_of(device)
    deliver(transfers, states, values)
    transfers.await_parameters()
    assert transfers.is_awaited
    for state, value in zip(states, values, strict=True):
        assert torch.equal(state.parameter, value)
    assert [state.parameter._version for state in states] == versions
    by_dtype = [[s for s in states if s.parameter_dtype == dtype] for dtype in {s.parameter_dtype for s in states}]
    expected = sum(FlatLayout(group).numel * group[0].parameter_dtype.itemsize for group in by_dtype)
    assert statistics.uploaded_bytes == expected


def test_parameters_are_awaited_one_by_one() -> None:
    device = lazy()
    states = states_of(*[torch.zeros(4) for _ in range(3)], device=device)
    first, second, third = (state.parameter for state in states)
    transfers, _ = transfers_of(device)
    for row, state in enumerate(states):
        deliver(transfers, [state], [torch.full((4,), 1.0 + row)])
    assert not transfers.is_awaited
    assert torch.equal(first, torch.zeros(4))
    transfers.await_parameters(frozenset({id(second)}))
    assert torch.equal(second, torch.full((4,), 2.0))
    assert torch.equal(first, torch.full((4,), 1.0))  # it came before, on the same stream
    assert torch.equal(third, torch.zeros(4))
    assert not transfers.is_awaited
    transfers.await_parameters(frozenset({id(first), id(torch.ones(1))}))
    assert torch.equal(third, torch.zeros(4))
    transfers.await_parameters(frozenset({id(third)}))
    assert torch.equal(third, torch.full((4,), 3.0))
    assert transfers.is_awaited


def test_parameter_that_is_sent_twice_is_awaited_as_it_was_sent_last() -> None:
    device = lazy()
    (state,) = states_of(torch.zeros(4), device=device)
    transfers, _ = transfers_of(device)
    for value in (1.0, 2.0):
        deliver(transfers, [state], [torch.full((4,), value)])
    transfers.await_parameters(frozenset({id(state.parameter)}))
    assert torch.equal(state.parameter, torch.full((4,), 2.0))
    assert transfers.is_awaited


def test_settling_waits_for_uploads_that_only_the_model_waited_for() -> None:
    device = LateModel(0, eagerness=0.0)
    (state,) = states_of(torch.zeros(4), device=device)
    transfers, _ = transfers_of(device)
    deliver(transfers, [state], [torch.ones(4)])
    transfers.await_parameters()
    assert transfers.is_awaited
    assert torch.equal(state.parameter, torch.zeros(4))  # the model will wait, and nobody did
    transfers.settle()
    assert torch.equal(state.parameter, torch.ones(4))


def test_settling_leaves_the_model_to_wait_for_itself() -> None:
    device = lazy()
    (state,) = states_of(torch.zeros(4), device=device)
    transfers, _ = transfers_of(device)
    transfers.settle()
    deliver(transfers, [state], [torch.ones(4)])
    transfers.settle()
    assert torch.equal(state.parameter, torch.ones(4))
    assert not transfers.is_awaited


# ---- uploads after what still reads the old values -------------------------------------------------------------------


def reads_late(device: SimulatedDevice, parameter: Tensor) -> list[Tensor]:
    """Enqueue what a model does late on its stream: to read a parameter."""
    seen: list[Tensor] = []
    device._enqueue(Stream.CURRENT, Operation(lambda: seen.append(parameter.detach().clone())))
    return seen


@pytest.mark.parametrize("seed", range(5))
def test_upload_comes_after_what_the_model_does_now(seed: int) -> None:
    device = LateModel(seed, 0.5)
    (state,) = states_of(torch.zeros(4), device=device)
    transfers, _ = transfers_of(device)
    seen = reads_late(device, state.parameter)
    deliver(transfers, [state], [torch.ones(4)])
    finish(device)
    assert torch.equal(seen[0], torch.zeros(4))
    assert torch.equal(state.parameter, torch.ones(4))


@pytest.mark.parametrize("kind", ["on the device", "on the host", "both"])
@pytest.mark.parametrize("seed", range(5))
def test_upload_that_follows_a_download_comes_after_what_the_model_did_before_it(seed: int, kind: str) -> None:
    """Also where every gradient is on the host already, as sums of micro-batches are."""
    device = LateModel(seed, 0.5)
    count = 2 if kind == "both" else 1
    states = states_of(*[torch.zeros(4)] * count, device=device)
    gradients = [random(4) for _ in states]
    if kind != "on the device":
        gradients[0] = device.host_empty(4, torch.float32).fill_(2.0)
    transfers, _ = transfers_of(device)
    seen = [reads_late(device, state.parameter) for state in states]
    _, arrived = transfers.download(states, gradients)
    arrived.synchronize()
    with transfers.following_download():
        deliver(transfers, states, [torch.ones(4)] * count)
    finish(device)
    for state, (value,) in zip(states, seen, strict=True):
        assert torch.equal(value, torch.zeros(4))
        assert torch.equal(state.parameter, torch.ones(4))


def test_upload_that_follows_a_download_does_not_wait_for_what_the_model_does_later() -> None:
    device = LateModel(0, 0.0)
    states = states_of(torch.zeros(4), device=device)
    transfers, _ = transfers_of(device)
    _, arrived = transfers.download(states, [random(4)])
    arrived.synchronize()
    backward_goes_on: list[Any] = []
    device._waits[Stream.CURRENT].append(SimulatedEvent(device))  # never passes
    device._enqueue(Stream.CURRENT, Operation(lambda: backward_goes_on.append(1)))
    with transfers.following_download():
        deliver(transfers, states, [torch.ones(4)])
    transfers.settle()
    assert torch.equal(states[0].parameter, torch.ones(4))
    assert not backward_goes_on


def test_following_ends_with_its_block_also_after_an_error() -> None:
    device = LateModel(1, 0.0)
    (state,) = states_of(torch.zeros(4), device=device)
    transfers, _ = transfers_of(device)
    with pytest.raises(KeyError), transfers.following_download():
        raise KeyError
    seen = reads_late(device, state.parameter)
    deliver(transfers, [state], [torch.ones(4)])
    finish(device)
    assert torch.equal(seen[0], torch.zeros(4))


# ---- gradients that do not travel ------------------------------------------------------------------------------------


@pytest.mark.parametrize("link", [None, *DTYPES[:3]], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_narrowed_gradient_has_the_values_of_one_that_travelled(dtype: torch.dtype, link: torch.dtype | None) -> None:
    transfers, _ = transfers_of(PlainDevice(), link)
    gradient = random(70, dtype=dtype)
    (travelled,), _ = transfers.download(states_of(gradient), [gradient])
    assert transfers.narrows == (link in (torch.bfloat16, torch.float16))
    narrowed = transfers.narrowed(gradient)
    assert narrowed.dtype == dtype
    assert torch.equal(narrowed.double(), travelled.double())
    assert transfers.narrows or narrowed is gradient


def test_upload_is_told_of_once_it_was_seen_to_arrive() -> None:
    device, journal = lazy(), Journal()
    transfers = Transfers(device, journal)
    states = states_of(torch.zeros(5), torch.zeros(3), device=device)

    def told() -> list[int]:
        return [span.details["elements"] for span in journal.trace.spans if span.track == "upload"]

    for one in ([states[0]], states):
        parcel = transfers.parcel(one)
        for value in parcel.values:
            value.fill_(1.0)
        parcel.deliver()
    transfers.note_arrived()
    assert told() == []
    transfers.settle()
    assert told() == [5, 8]
    assert all(span.end >= span.begin for span in journal.trace.spans)
