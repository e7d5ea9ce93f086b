"""The placer: what is tried, what counts, and that the choice is made once."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from superadam.buckets import DEFAULT_NUMEL, Bucket
from superadam.devices import Device, PlainDevice
from superadam.devices.simulated import SimulatedDevice
from superadam.parameter import ParameterState
from superadam.placement import LEAST_NUMEL, BucketTimes, Placement, last_parameters
from superadam.placer import BYTES_PER_ELEMENT, FREE_SHARE, TRIED_STEPS, WARM_UP_STEPS, Placer

CORES = 4
AUTO = {"gpu_buckets": "auto", "bucket_numel": "auto", "link_dtype": "auto", "cores": "auto"}


class Measured(SimulatedDevice):
    """A device with memory, cores and a link of given sizes."""

    def __init__(self, free_elements: int = 10**9, cores: int = CORES, link_seconds_per_byte: float = 0.0) -> None:
        super().__init__(0)
        self.free = int(free_elements * BYTES_PER_ELEMENT / FREE_SHARE) + 1
        self.cores = cores
        self.link = link_seconds_per_byte

    def free_bytes(self) -> int:
        return self.free

    def idle_cores(self) -> int:
        return self.cores

    def link_seconds_per_byte(self) -> float:
        return self.link


class Steps:
    """Makes steps over parameters of given sizes as a scheduler does.

    Times are those of a worker that takes as many seconds for an element as it is told.
    """

    def __init__(
        self, sizes: Sequence[int], device: Device | None = None, dtype: torch.dtype = torch.bfloat16, **options: Any
    ) -> None:
        self.parameters = [nn.Parameter(torch.zeros(size, dtype=dtype)) for size in sizes]
        self.placer = Placer(device or Measured(), sum(sizes), **{**AUTO, **options})
        self.given: list[Placement] = []

    def make(
        self,
        rows: Sequence[int] | None = None,
        *,
        kept: int = 0,
        seconds_per_element: float = 1e-9,
        fewer_cores: float = 1.0,
        widened: float = 1.0,
        cores: int | None = None,
        is_whole: bool = True,
        waits: Sequence[int] = (),
    ) -> bool:
        """Make a step, each parameter in a bucket of its own, ready one second after the one before.

        Args:
            rows: of the parameters, in order.
            kept: so many of the last ones stay.
            seconds_per_element: of the worker, times `fewer_cores` and `widened` where that is tried.
            cores: that the worker says it had, instead of those that it was told to use.
            is_whole: whether the step ends with a verdict.
            waits: buckets that the governor does not let be speculated on.
        """
        placer, chosen = self.placer, range(len(self.parameters)) if rows is None else rows
        usual = placer.placement
        self.given = []
        for number, row in enumerate(chosen):
            parameter = self.parameters[row]
            state = ParameterState(parameter, row, f"p{row}")
            stays = number >= len(chosen) - kept
            gradient = torch.zeros_like(parameter, requires_grad=False)
            given = placer.begin_bucket(Bucket([state], [gradient], parameter.numel(), is_kept=stays))
            self.given.append(given)
            if stays or number in waits:
                continue
            is_widened = given.link_dtype != usual.link_dtype
            seconds = seconds_per_element * parameter.numel()
            seconds *= (widened if is_widened else 1.0) * (fewer_cores if given.cores < usual.cores else 1.0)
            placer.note_times(
                BucketTimes(
                    elements=parameter.numel(),
                    gradient_bytes=4 if is_widened else gradient.element_size(),
                    is_widened=is_widened,
                    cores=given.cores if cores is None else cores,
                    ready=float(number),
                    worker_seconds=seconds,
                    handing_seconds=1e-6,
                )
            )
        return placer.end_step(is_whole=is_whole)

    def choose(self, **options: Any) -> Placement:
        """Make the steps after which the choice is made."""
        assert not any(self.make(**options) for _ in range(WARM_UP_STEPS + TRIED_STEPS - 1))
        assert self.make(**options)
        return self.placer.placement

    @property
    def tries(self) -> bool:
        return any(one != self.placer.placement for one in self.given)


SIZES = [1000] * 6


# ---- what is explicit ------------------------------------------------------------------------------------------------

EXPLICIT = {"gpu_buckets": 2, "bucket_numel": 1234, "link_dtype": torch.float32, "cores": 3}


@given(st.sets(st.sampled_from(sorted(EXPLICIT))), st.integers(0, 2), st.floats(1e-9, 1e-2))
def test_explicit_values_are_never_changed(names: set[str], kept: int, seconds: float) -> None:
    options = {name: EXPLICIT[name] for name in names}
    steps = Steps(SIZES, **options)
    for _ in range(8):
        steps.make(kept=kept, seconds_per_element=seconds, fewer_cores=0.9, widened=0.5)
        for placement in (*steps.given, steps.placer.placement):
            assert all(getattr(placement, name) == value for name, value in options.items())
        if names == set(EXPLICIT):
            assert not steps.tries


def test_what_is_automatic_beside_kept_buckets_is_chosen(caplog: pytest.LogCaptureFixture) -> None:
    """Buckets that stay have no times, and are not waited for."""
    steps = Steps(SIZES, gpu_buckets=2)
    with caplog.at_level(logging.INFO, "superadam"):
        for _ in range(WARM_UP_STEPS + TRIED_STEPS):
            steps.make(kept=2, fewer_cores=1.0)
    assert len(caplog.records) == 1
    assert steps.placer.placement.gpu_buckets == 2
    assert steps.placer.placement.cores == CORES // 2


def test_without_cores_nothing_is_tried() -> None:
    steps = Steps(SIZES, Measured(cores=0))
    for _ in range(6):
        steps.make(cores=0)
        assert not steps.tries
    assert steps.placer.placement == Placement(0, DEFAULT_NUMEL, None, 0)


def test_device_without_a_link_is_not_tried_with_a_wider_one() -> None:
    steps = Steps(SIZES, PlainDevice(), cores=CORES)
    for _ in range(6):
        steps.make(widened=0.01)
        assert all(one.link_dtype is None for one in steps.given)
        assert steps.placer.placement.gpu_buckets == 0


# ---- what counts -----------------------------------------------------------------------------------------------------


def test_warm_up_is_neither_tried_nor_counted(caplog: pytest.LogCaptureFixture) -> None:
    steps = Steps(SIZES)
    with caplog.at_level(logging.INFO, "superadam"):
        for _ in range(WARM_UP_STEPS):
            assert not steps.make(seconds_per_element=1.0)  # slow, as first times are
            assert not steps.tries
        for _ in range(TRIED_STEPS - 1):
            assert not steps.make()
            assert steps.tries
        assert not caplog.records
        assert steps.make()
    assert steps.placer.placement.gpu_buckets == 0


NOT_COUNTED: dict[str, dict[str, Any]] = {
    "rolled back": {"is_whole": False},
    "without gradients": {"rows": []},
    "left waiting by the governor": {"waits": range(6)},
    "left waiting in part": {"waits": [5]},
    "made while somebody waited": {"cores": 0},
}


@pytest.mark.parametrize("why", NOT_COUNTED)
def test_steps_that_tell_nothing_do_not_count(why: str, caplog: pytest.LogCaptureFixture) -> None:
    steps = Steps(SIZES)
    steps.make()
    with caplog.at_level(logging.INFO, "superadam"):
        for _ in range(TRIED_STEPS):
            assert not caplog.records
            for _ in range(3):
                assert not steps.make(seconds_per_element=1.0, **NOT_COUNTED[why])
            steps.make()
    assert len(caplog.records) == 1
    assert steps.placer.placement.gpu_buckets == 0  # slow were only those that do not count


def test_only_the_widened_bucket_was_made_beside_the_model() -> None:
    """Somebody reads the state after the first bucket in each backward: then there is nothing to compare with."""
    steps = Steps([1000, 1000])
    placer = steps.placer
    for _ in range(8):
        for number, parameter in enumerate(steps.parameters):
            state = ParameterState(parameter, number, "p")
            given = placer.begin_bucket(Bucket([state], [torch.zeros_like(parameter)], 1000))
            cores = given.cores if number == 1 else 0
            is_widened = given.link_dtype is not None
            placer.note_times(BucketTimes(1000, 4 if is_widened else 2, is_widened, cores, number, 1e-3, 1e-6))
        assert not placer.end_step(is_whole=True)


@given(st.lists(st.sampled_from([*NOT_COUNTED, "whole", "fewer gradients", "kept"]), max_size=12))
def test_choice_is_made_once_whatever_steps_come(kinds: list[str]) -> None:
    steps = Steps(SIZES)
    others = {"whole": {}, "fewer gradients": {"rows": [0, 2, 4]}, "kept": {"kept": 3}}
    chosen: Placement | None = None
    for kind in kinds:
        before = steps.placer.placement
        is_new = steps.make(**{**NOT_COUNTED, **others}[kind])
        if chosen is not None:
            assert not steps.tries
            assert steps.placer.placement == chosen
        elif is_new:
            chosen = steps.placer.placement
        else:
            assert steps.placer.placement == before


def test_choice_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    steps = Steps(SIZES)
    with caplog.at_level(logging.INFO):
        for _ in range(10):
            steps.make()
    (record,) = caplog.records
    assert (record.name, record.levelname) == ("superadam", "INFO")
    assert str(steps.placer.placement) in record.getMessage()


# ---- what is chosen --------------------------------------------------------------------------------------------------


def test_only_some_buckets_are_treated_otherwise() -> None:
    steps = Steps(SIZES)
    steps.make()
    steps.make()
    usual = steps.placer.placement
    assert [one.link_dtype for one in steps.given] == [None, torch.float32, *[None] * 4]
    assert [one.cores for one in steps.given] == [CORES, CORES, CORES // 2, *[CORES] * 3]
    assert all(one.bucket_numel == usual.bucket_numel for one in steps.given)
    wide = Steps(SIZES, dtype=torch.float32)
    wide.make()
    wide.make()
    assert all(one.link_dtype is None for one in wide.given)


def test_cores_and_link_are_chosen_by_their_times() -> None:
    assert Steps(SIZES).choose(fewer_cores=1.9, widened=0.8) == Placement(0, LEAST_NUMEL, torch.float32, CORES)
    assert Steps(SIZES).choose(fewer_cores=1.01, widened=1.2) == Placement(0, LEAST_NUMEL, None, CORES // 2)
    slow_link = Measured(link_seconds_per_byte=1e-6)
    assert Steps(SIZES, slow_link).choose(widened=0.1).link_dtype is None


def test_link_is_not_measured_where_it_does_not_matter() -> None:
    class Untouched(Measured):
        def link_seconds_per_byte(self) -> float:
            raise AssertionError("16 MiB were copied for nothing")

    Steps(SIZES, Untouched(), link_dtype=torch.bfloat16).choose()
    Steps(SIZES, Untouched(), dtype=torch.float32).choose()


@pytest.mark.parametrize("bucket_numel", [1, 700, 1000, 1500, 10**6])
@given(
    st.lists(st.integers(1, 5000), min_size=1, max_size=12),
    st.integers(0, 30_000),
    st.sampled_from([1e-9, 1e-3, 1.0]),
)
def test_what_is_kept_fits(bucket_numel: int, sizes: list[int], free_elements: int, seconds: float) -> None:
    """Also after rounding to whole buckets and whole parameters."""
    device = Measured(free_elements)
    steps = Steps(sizes, device, bucket_numel=bucket_numel)
    placement = steps.choose(seconds_per_element=seconds)
    kept = sum(one.numel() for one in last_parameters(steps.placer.order, placement))
    assert kept * BYTES_PER_ELEMENT <= device.free * FREE_SHARE
    if seconds == 1.0 and free_elements >= sum(sizes):
        assert kept >= sum(sizes) - bucket_numel
    if seconds == 1e-9 and len(sizes) > 1:
        assert kept == 0


# ---- order -----------------------------------------------------------------------------------------------------------


def test_order_is_that_of_the_last_whole_step() -> None:
    steps = Steps(SIZES)

    def order() -> list[int]:
        return [next(i for i, p in enumerate(steps.parameters) if p is one) for one in steps.placer.order]

    assert order() == []
    steps.make([3, 1, 2])
    assert order() == [3, 1, 2]
    steps.make([5, 4, 3, 2, 1, 0], is_whole=False)
    assert order() == [3, 1, 2]
    steps.make([5, 4, 3, 2, 1, 0])
    assert order() == [5, 4, 3, 2, 1, 0]
    steps.make([0, 1])  # some parameters take no part in some steps
    assert order() == [5, 4, 3, 2, 1, 0]
    steps.make([0, 1, 2, 3, 4, 5])
    assert order() == [0, 1, 2, 3, 4, 5]


def test_parameters_that_stay_come_last() -> None:
    """They become ready among the others, but are the ones that are to stay again."""
    steps = Steps([10] * 3, gpu_buckets=1, bucket_numel=1, link_dtype=torch.float32, cores=1)
    buckets = [
        Bucket([ParameterState(parameter, row, "p")], [torch.zeros_like(parameter)], 10, is_kept=row == 0)
        for row, parameter in enumerate(steps.parameters)
    ]
    for bucket in buckets:
        steps.placer.begin_bucket(bucket)
    assert steps.placer.end_step(is_whole=True)
    assert steps.placer.order[-1] is steps.parameters[0]


@given(st.lists(st.permutations(range(4)), min_size=1, max_size=4), st.booleans())
def test_other_parameters_are_told_and_another_order_of_the_same_is_not(orders: list[list[int]], keeps: bool) -> None:
    explicit = {**EXPLICIT, "gpu_buckets": 1 if keeps else 0}
    steps = Steps([10] * 4, **explicit)
    known: frozenset[int] = frozenset()
    for order, count in itertools.product(orders, (2, 4)):
        present = frozenset(map(id, (steps.parameters[row] for row in order[:count])))
        is_new = steps.make(order[:count])
        assert is_new == (keeps and len(present) >= len(known) and present != known)
        known = present if len(present) >= len(known) else known
    steps.parameters = [nn.Parameter(torch.zeros(10)) for _ in range(4)]  # as after replacing the model's
    assert steps.make() is keeps


# ---- explicit changes ------------------------------------------------------------------------------------------------


def test_explicit_change_ends_the_trials(caplog: pytest.LogCaptureFixture) -> None:
    steps = Steps(SIZES)
    steps.make()
    steps.make()
    wanted = Placement(1, 10, None, 2)
    steps.placer.place(wanted)
    with caplog.at_level(logging.INFO, "superadam"):
        for _ in range(5):
            assert not steps.make()
            assert not steps.tries
    assert steps.placer.placement == wanted
    assert not caplog.records


@pytest.mark.parametrize("cores", [0, CORES])
def test_worker_can_neither_come_nor_go(cores: int) -> None:
    steps = Steps(SIZES, Measured(cores=cores))
    before = steps.placer.placement
    with pytest.raises(
        ValueError, match=r"cores is \d, but the scheduler was made with \d, .*; make another scheduler"
    ):
        steps.placer.place(Placement(0, 10, None, 0 if cores else 1))
    assert steps.placer.placement == before
    steps.placer.place(Placement(0, 10, None, 2 if cores else 0))


def test_device_that_cannot_keep_is_told() -> None:
    told = "gpu_buckets is 3, but PlainDevice cannot make steps where the model is; .* leave gpu_buckets at 'auto' or 0"
    with pytest.raises(ValueError, match=told):
        Placer(PlainDevice(), 100, 3, "auto", "auto", 1)
    placer = Placer(PlainDevice(), 100, 0, "auto", "auto", 1)
    before = placer.placement
    with pytest.raises(ValueError, match=told):
        placer.place(Placement(3, 10, None, 1))
    assert placer.placement == before


def test_more_state_than_the_device_has_room_for_is_refused_with_both_figures() -> None:
    device = Measured()
    device.free = 12 * 10**9 - 1
    options: dict[str, Any] = {"bucket_numel": 10**6, "link_dtype": None, "cores": 1}
    with pytest.raises(MemoryError, match=r"takes 12\.00 GB, but 12\.00 GB are free there; keep fewer buckets"):
        Placer(device, 2 * 10**9, 1000, **options)
    placer = Placer(device, 2 * 10**9, 999, **options)
    device.free -= 999 * 12 * 10**6  # it has moved there
    before = placer.placement
    with pytest.raises(MemoryError, match=r"takes 0\.01 GB"):
        placer.place(replace(before, gpu_buckets=1000))
    assert placer.placement == before
    placer.place(replace(before, gpu_buckets=998))
    assert placer.placement.gpu_buckets == 998
    Placer(device, 10**3, 10**6, **options)  # no more than there is
