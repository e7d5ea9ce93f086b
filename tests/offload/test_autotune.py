"""The autotuner and the rules of the placement: what is measured, what counts, and when and how the choice changes."""

import logging
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.overlap import EagerSimulatedDevice, loss_of, overlapped, train
from torch import nn

from superadam import OffloadScheduler, SpeculativeCPUAdamW
from superadam.devices import Device, PlainDevice
from superadam.offload import placement
from superadam.offload.buckets import Bucket
from superadam.offload.needs import bytes_of_state
from superadam.offload.placement import AGREEING_STEPS, FREE_SHARE, Autotuner, Placement, last_pieces, numel_of_buckets
from superadam.state.parameter import ParameterState, Piece
from superadam.testing import SimulatedDevice

CORES = 4
BYTES_PER_ELEMENT = bytes_of_state() + torch.bfloat16.itemsize
"""Of a resident bucket: state and gradient."""
BYTES = {"bytes_of_state": bytes_of_state(), "bytes_of_gradient": torch.bfloat16.itemsize}
AUTO = {"gpu_buckets": "auto", "bucket_numel": "auto", "transfer_dtype": "auto", "num_threads": "auto", **BYTES}


class Measured(SimulatedDevice):
    """A device with memory and cores of given sizes."""

    def __init__(self, free_elements: int = 10**9, num_threads: int = CORES) -> None:
        super().__init__(0)
        self.free = int(free_elements * BYTES_PER_ELEMENT / FREE_SHARE) + 1
        self.num_threads = num_threads
        self.kept = 0  # elements
        self.questions = 0

    def free_bytes(self) -> int:
        self.questions += 1
        return int(self.free - bytes_of_state() * self.kept)

    def idle_cores(self) -> int:
        return self.num_threads


class Steps:
    """Makes steps over parameters of given sizes as a scheduler does, with the times of a simulated worker."""

    def __init__(self, sizes: Sequence[int], device: Device | None = None, **options: Any) -> None:
        self.parameters = [nn.Parameter(torch.zeros(size, dtype=torch.bfloat16)) for size in sizes]
        self.states = [ParameterState(parameter, row, f"p{row}") for row, parameter in enumerate(self.parameters)]
        self.device: Any = device or Measured()
        self.autotuner = Autotuner(self.device, sum(sizes), **{**AUTO, **options})

    def make(self, *, kept: int = 0, seconds_per_element: float = 1e-9, waits: Sequence[int] = ()) -> bool:
        """Make a step, each parameter in a bucket of its own, ready a second after the one before.

        Args:
            kept: how many of the last ones stay.
            seconds_per_element: of the worker.
            waits: buckets that the policy does not let be speculated on.
        """
        count, done, waiting = len(self.parameters), 0.0, 0
        self.device.kept = 0
        for number, (parameter, state) in enumerate(zip(self.parameters, self.states, strict=True)):
            stays, numel = number >= count - kept, parameter.numel()
            is_later = not stays and number in waits
            self.device.kept += numel if stays else 0
            waiting += numel if number in waits else 0
            self.autotuner.add_bucket(Bucket(stays, dict.fromkeys([state]), numel))
            seconds = 0.0 if stays or is_later else seconds_per_element * numel
            done = max(done, number) + seconds
            self.autotuner.add_work(placement.Work(numel, done, seconds, True, stays, waits=is_later))
        backward = count - 1
        return self.autotuner.choose(backward if done > backward else math.inf, seconds_per_element * waiting)

    def choose(self, **options: Any) -> Placement:
        """Make steps until the choice stays the same, and return it."""
        for _ in range(10 * AGREEING_STEPS):
            numel = sum(one.shape.numel() for one in last_pieces(self.autotuner.order, self.autotuner.placement))
            sizes = [one.numel() for one in reversed(self.parameters)]
            self.make(kept=next(n for n in range(len(sizes) + 1) if sum(sizes[:n]) >= numel), **options)
        return self.autotuner.placement


SIZES = [1000] * 6


# ---- what is explicit ------------------------------------------------------------------------------------------------

EXPLICIT = {"gpu_buckets": 2, "bucket_numel": 1234, "transfer_dtype": torch.float32, "num_threads": 3}


@given(st.sets(st.sampled_from(sorted(EXPLICIT))), st.integers(0, 2), st.floats(1e-9, 1e-2))
def test_explicit_values_are_never_changed(names: set[str], kept: int, seconds: float) -> None:
    options = {name: EXPLICIT[name] for name in names}
    steps = Steps(SIZES, **options)
    for _ in range(8):
        steps.make(kept=kept, seconds_per_element=seconds)
        assert all(getattr(steps.autotuner.placement, name) == value for name, value in options.items())


@pytest.mark.parametrize("device", [Measured(num_threads=0), PlainDevice()])
def test_nothing_is_kept_without_cores_or_where_no_step_can_be_made(device, caplog):
    steps = Steps(SIZES, device)
    with caplog.at_level(logging.INFO, "superadam"):
        assert not any(steps.make(seconds_per_element=1.0) for _ in range(6))
    assert steps.autotuner.placement.gpu_buckets == 0
    assert not caplog.records


# ---- what counts -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("waits", "kept"), [(range(6), 6), (range(3, 6), 3), ([5], 1)], ids=str)
def test_what_waits_for_the_verdict_is_kept(waits: Sequence[int], kept: int) -> None:
    """All its work comes after backward, however fast the host is before that. Once nothing waits, nothing is kept."""
    steps = Steps(SIZES, bucket_numel=200)
    assert any(steps.make(seconds_per_element=0.9e-3, waits=waits) for _ in range(10 * AGREEING_STEPS))
    assert steps.autotuner.placement.gpu_buckets == 5 * kept
    assert steps.choose(seconds_per_element=1e-9).gpu_buckets == 0


@pytest.mark.parametrize(("seconds", "kept"), [(0.09, 0), (0.15, 1)])
def test_a_last_result_that_is_late_by_two_percent_is_kept(seconds: float, kept: int) -> None:
    """Of five seconds from the first bucket to the last."""
    assert Steps(SIZES, bucket_numel=1000).choose(seconds_per_element=seconds / 1000).gpu_buckets == kept


def test_nothing_moves_before_several_steps_agree(caplog: pytest.LogCaptureFixture) -> None:
    steps = Steps(SIZES, bucket_numel=1000)
    slow, fast = {"seconds_per_element": 2e-3}, {"seconds_per_element": 1e-9}
    with caplog.at_level(logging.INFO, "superadam"):
        for _ in range(3):
            assert not any(steps.make(**fast) for _ in range(6))  # also the rate is that of most of the last buckets
            assert not any(steps.make(**slow) for _ in range(AGREEING_STEPS - 1))
        assert not caplog.records
        assert any(steps.make(**slow) for _ in range(30))
    assert steps.autotuner.placement.gpu_buckets == 4
    (record,) = caplog.records
    assert (record.name, record.levelname) == ("superadam", "INFO")
    assert str(steps.autotuner.placement) in record.getMessage()


def test_a_full_device_bounds_the_choice() -> None:
    steps = Steps(SIZES, bucket_numel=1000)
    assert steps.choose(seconds_per_element=1.0).gpu_buckets == 6
    steps.autotuner.shrink()
    assert steps.autotuner.placement.gpu_buckets == 3
    assert steps.choose(seconds_per_element=1.0).gpu_buckets == 3
    assert steps.choose(seconds_per_element=1e-9).gpu_buckets == 0
    steps.autotuner.place(Placement(0, 2000, None, 1), stays_automatic=True)  # what counts, is their elements
    assert steps.choose(seconds_per_element=1.0).gpu_buckets == 1


# ---- what is chosen --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bucket_numel", [1, 700, 1000, 1500, 10**6])
@given(
    st.lists(st.integers(1, 5000), min_size=1, max_size=12), st.integers(0, 30_000), st.sampled_from([1e-9, 1e-3, 1e6])
)
def test_what_is_kept_fits(bucket_numel: int, sizes: list[int], free_elements: int, seconds: float) -> None:
    """Also after rounding to whole buckets and whole parameters."""
    device = Measured(free_elements)
    steps = Steps(sizes, device, bucket_numel=bucket_numel)
    placement = steps.choose(seconds_per_element=seconds)
    kept = sum(one.shape.numel() for one in last_pieces(steps.autotuner.order, placement))
    assert kept * BYTES_PER_ELEMENT <= device.free * 0.8
    if seconds == 1e6 and free_elements >= sum(sizes):  # none hides behind the others' backward
        assert kept >= sum(sizes) - bucket_numel
    if seconds == 1e-9 and len(sizes) > 1:
        assert kept == 0


@pytest.mark.parametrize(
    ("options", "each"),
    [({}, 12), ({"amsgrad": True}, 16), ({"moments": "8bit", "master": "24bit"}, 3 + 2 * (1 + 1 / 64))],
)
def test_what_stays_takes_what_the_optimizer_stores(options: dict[str, Any], each: float) -> None:
    model = nn.ParameterList([torch.zeros(100, 64)]).bfloat16()
    optimizer = SpeculativeCPUAdamW(model.parameters(), **options)
    device = Measured()
    device.free = math.ceil(each * 6400) - 1
    with pytest.raises(MemoryError, match="the state that is to stay on the device"):
        OffloadScheduler(optimizer, model, device=device, gpu_buckets=1)
    device.free += 1
    OffloadScheduler(optimizer, model, device=device, gpu_buckets=1).close()


def test_a_scheduler_of_no_parameters_has_nothing_to_place() -> None:
    optimizer = SpeculativeCPUAdamW([{"params": []}])
    with OffloadScheduler(optimizer, nn.Linear(2, 2), device=Measured()):
        optimizer.step()


def test_memory_is_asked_for_only_where_a_decision_would_keep_more() -> None:
    """The answer takes a driver longer than a step may lose."""
    device = Measured(3000)
    steps = Steps(SIZES, device, bucket_numel=1000)
    for _ in range(3 * AGREEING_STEPS):
        steps.make(seconds_per_element=1e-9)  # nothing is to be kept
    assert device.questions == 0
    steps = Steps(SIZES, device, bucket_numel=1000)
    for number in range(AGREEING_STEPS):
        assert device.questions == 0
        assert steps.make(seconds_per_element=1.0) is (number == AGREEING_STEPS - 1)
    assert (device.questions, steps.autotuner.placement.gpu_buckets) == (1, 3)
    while steps.autotuner.placement.gpu_buckets:
        asked = device.questions
        steps.make(kept=3, seconds_per_element=1e-9)
    assert device.questions == asked


# ---- explicit changes ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_threads", [0, CORES])
def test_worker_can_neither_come_nor_go(num_threads: int) -> None:
    steps = Steps(SIZES, Measured(num_threads=num_threads))
    before = steps.autotuner.placement
    told = r"num_threads is \d, but the scheduler was made with \d, .*; make another scheduler"
    with pytest.raises(ValueError, match=told):
        steps.autotuner.place(Placement(0, 10, None, 0 if num_threads else 1), stays_automatic=True)
    assert steps.autotuner.placement == before
    steps.autotuner.place(Placement(0, 10, None, 2 if num_threads else 0), stays_automatic=True)


def test_device_that_cannot_keep_is_told() -> None:
    told = "gpu_buckets is 3, but steps cannot be made where the model is, .*; leave gpu_buckets at 'auto' or 0"
    with pytest.raises(ValueError, match=told):
        Autotuner(PlainDevice(), 100, 3, "auto", "auto", 1, **BYTES)
    autotuner = Autotuner(PlainDevice(), 100, 0, "auto", "auto", 1, **BYTES)
    before = autotuner.placement
    with pytest.raises(ValueError, match=told):
        autotuner.place(Placement(3, 10, None, 1), stays_automatic=False)
    assert autotuner.placement == before


def test_more_state_than_the_device_has_room_for_is_refused_with_both_figures() -> None:
    device = Measured()
    device.free = 12 * 10**9 - 1
    options: dict[str, Any] = {"bucket_numel": 10**6, "transfer_dtype": None, "num_threads": 1, **BYTES}
    with pytest.raises(MemoryError, match=r"takes 12\.00 GB, but 12\.00 GB are free there; keep fewer buckets"):
        Autotuner(device, 2 * 10**9, 1000, **options)
    autotuner = Autotuner(device, 2 * 10**9, 999, **options)
    device.free -= 999 * 12 * 10**6  # it has moved there
    before = autotuner.placement
    with pytest.raises(MemoryError, match=r"takes 0\.01 GB"):
        autotuner.place(replace(before, gpu_buckets=1000), stays_automatic=False)
    assert autotuner.placement == before
    asked = device.questions
    for count in (999, 998):
        autotuner.place(replace(before, gpu_buckets=count), stays_automatic=False)
    assert device.questions == asked
    assert autotuner.placement.gpu_buckets == 998
    Autotuner(device, 10**3, 10**6, **options)  # no more than there is


def test_work_says_what_was_only_summed(monkeypatch: pytest.MonkeyPatch) -> None:
    """What comes after a NaN is not speculated on, nor parameters that a program has written to."""
    waits: list[bool] = []
    monkeypatch.setattr(Autotuner, "add_work", lambda self, work: waits.append(work.waits))
    seen, options = [], {"device": SimulatedDevice(0), "bucket_numel": 64, "gpu_buckets": 0}
    with overlapped(torch.bfloat16, max_grad_norm=None, **options) as (model, optimizer, scheduler):
        for factor in (1.0, 1.0, math.nan, 1.0):
            if seen[2:]:
                with torch.no_grad():
                    torch._foreach_clamp_max_([*model.parameters()], 9.0)
            (loss_of(model, 0) * factor).backward()
            scheduler._catch_up()
            optimizer.step()
            optimizer.zero_grad()
            seen.append(set(waits))
            waits.clear()
    assert seen == [set(), {False}, {False, True}, {True}]


def test_a_wait_counts_in_its_own_step_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    awaited: list[float] = []
    monkeypatch.setattr(Autotuner, "choose", lambda self, awaited_at, seconds: awaited.append(awaited_at))
    options, waits = {"device": SimulatedDevice(0), "bucket_numel": 64, "gpu_buckets": 0}, []
    with overlapped(torch.bfloat16, **options) as (model, optimizer, scheduler):
        for number in range(8):
            before = scheduler.statistics.waited_seconds
            train(model, optimizer, range(number, number + 1))
            waits.append(scheduler.statistics.waited_seconds > before)
    assert {*waits} == {False, True}
    assert [math.isfinite(one) for one in awaited] == waits


def test_a_wait_before_the_last_bucket_is_not_that_at_the_end_of_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    awaited: list[float] = []
    monkeypatch.setattr(Autotuner, "choose", lambda self, awaited_at, seconds: awaited.append(awaited_at))
    options = {"device": EagerSimulatedDevice(1, 1.0), "bucket_numel": 64, "gpu_buckets": 0}
    with overlapped(torch.bfloat16, **options) as (model, optimizer, scheduler):
        model[2].weight.register_post_accumulate_grad_hook(lambda _: setattr(scheduler._pipeline, "awaited_at", 1.0))
        train(model, optimizer, range(3))
    assert awaited == 3 * [math.inf]


# ---- the rules of the placement --------------------------------------------------------------------------------------


@given(st.integers(0, 10**12))
def test_size_of_buckets_is_an_eighth_of_the_model_within_bounds(total: int) -> None:
    numel = numel_of_buckets(total)
    assert placement.LEAST_NUMEL <= numel <= placement.MOST_NUMEL
    assert numel in (placement.LEAST_NUMEL, placement.MOST_NUMEL, total // placement.LEAST_BUCKETS)
    assert numel <= max(placement.LEAST_NUMEL, total // placement.LEAST_BUCKETS)
    assert Autotuner(PlainDevice(), total, 0, "auto", "auto", 1, **BYTES).placement.bucket_numel == numel


@pytest.mark.parametrize(("free", "room"), [(None, None), (900, None), (899, 863), (-50, 9), (-90, 0)])
def test_new_values_have_what_packed_gradients_leave_of_nine_tenths(free: int | None, room: int | None) -> None:
    assert placement.room_for_new_values(travelled=1000, packed=100, largest=10, free=free) == room


@given(st.lists(st.integers(0, 50), max_size=12), st.integers(0, 10), st.integers(1, 60))
def test_last_pieces_are_the_shortest_end_that_fills_the_buckets(sizes, gpu_buckets, bucket_numel):
    order: list[Piece] = [ParameterState(torch.empty(size), row, "p") for row, size in enumerate(sizes)]
    chosen = last_pieces(order, Placement(gpu_buckets, bucket_numel, None, 1))
    assert all(one is other for one, other in zip(chosen, reversed(order), strict=False))
    wanted, elements = gpu_buckets * bucket_numel, sum(one.shape.numel() for one in chosen)
    assert elements >= min(wanted, sum(sizes))
    if chosen:
        assert elements - chosen[-1].shape.numel() < wanted


@pytest.mark.parametrize("seed", range(4))
def test_nothing_is_under_way_where_the_placement_is_changed(seed: int) -> None:
    options = {"device": SimulatedDevice(seed), "bucket_numel": 64, "gpu_buckets": 2, "num_threads": 1}
    with overlapped(torch.bfloat16, steps=2, **options) as (model, _, scheduler):
        loss_of(model, 2).backward()
        scheduler.place(gpu_buckets=1)
        assert scheduler._pipeline.worker.is_idle
        assert scheduler._bucketer.rest() == []


def test_what_is_placed_ends_no_other_automatic_choice() -> None:
    with overlapped(torch.bfloat16, device=SimulatedDevice(0), num_threads=1) as (_, _, scheduler):
        assert scheduler._autotuner._is_automatic
        scheduler.place(num_threads=1, bucket_numel=100)
        assert scheduler._autotuner._is_automatic
        scheduler.place(gpu_buckets=scheduler.placement.gpu_buckets)
        assert not scheduler._autotuner._is_automatic
