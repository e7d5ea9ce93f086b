"""The rules of the placement, over measured times: what they promise holds for any times."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

from superadam.buckets import DEFAULT_NUMEL
from superadam.placement import (
    ENOUGH_SPEED,
    LEAST_BUCKETS,
    LEAST_NUMEL,
    OVERHEAD_SHARE,
    SLACK_SHARE,
    BucketTimes,
    Placement,
    elements_to_keep,
    enough_cores,
    last_parameters,
    numel_of_buckets,
    rate,
    should_widen,
)

SECONDS = st.floats(1e-6, 10.0)


def bucket(elements: int = 1000, **changes: object) -> BucketTimes:
    usual = BucketTimes(
        elements, gradient_bytes=2, is_widened=False, cores=4, ready=0.0, worker_seconds=1.0, handing_seconds=1e-4
    )
    return replace(usual, **changes)  # type: ignore[arg-type]


@st.composite
def steps(draw: st.DrawFn) -> list[BucketTimes]:
    """Draw the buckets of a step, in the order in which they became ready."""
    sizes = draw(st.lists(st.integers(0, 1000), min_size=1, max_size=12))
    gaps = draw(st.lists(st.floats(0.0, 2.0), min_size=len(sizes), max_size=len(sizes)))
    begin = draw(st.floats(0.0, 1e4))
    moments = [begin + gap for gap in itertools.accumulate(gaps)]
    return [bucket(size, ready=ready) for size, ready in zip(sizes, moments, strict=True)]


def done_after(step: list[BucketTimes], seconds_per_element: float) -> float:
    """Return when a worker ends that takes these buckets one after another."""
    done = step[0].ready
    for one in step:
        done = max(done, one.ready) + one.elements * seconds_per_element
    return done


# ---- how much stays on the device ------------------------------------------------------------------------------------


@given(steps(), SECONDS, st.integers(0, 13_000))
def test_what_is_kept_is_affordable_and_the_end_of_the_step(
    step: list[BucketTimes], seconds: float, affordable: int
) -> None:
    kept = elements_to_keep(step, seconds, affordable)
    ends = list(itertools.accumulate((one.elements for one in reversed(step)), initial=0))
    assert kept in ends
    assert kept <= affordable


@given(steps(), SECONDS, st.integers(0, 13_000), st.integers(0, 13_000))
def test_more_memory_and_a_slower_cpu_keep_no_less(
    step: list[BucketTimes], seconds: float, affordable: int, more: int
) -> None:
    kept = elements_to_keep(step, seconds, affordable)
    assert kept <= elements_to_keep(step, seconds, affordable + more)
    assert kept <= elements_to_keep(step, 1.5 * seconds, affordable)


@given(steps(), st.floats(1e-9, 10.0))
def test_fewest_buckets_after_which_the_worker_is_in_time(step: list[BucketTimes], seconds: float) -> None:
    total = sum(one.elements for one in step)
    kept = elements_to_keep(step, seconds, total)
    begin, end = step[0].ready, step[-1].ready
    allowed = end + SLACK_SHARE * (end - begin)
    in_time = [count for count in range(1, len(step) + 1) if done_after(step[:count], seconds) <= allowed]
    assert in_time == list(range(1, len(in_time) + 1))
    assert kept == total - sum(one.elements for one in step[: len(in_time)])


@given(steps(), st.integers(0, 13_000))
def test_hopeless_cpu_leaves_everything_that_fits_to_the_device(step: list[BucketTimes], affordable: int) -> None:
    assume(step[0].elements > 0)
    fitting = [sum(one.elements for one in step[count:]) for count in range(len(step) + 1)]
    hopeless = 1e6
    assert elements_to_keep(step, hopeless, affordable) == max(kept for kept in fitting if kept <= affordable)


@given(st.lists(st.integers(1, 1000), min_size=2, max_size=12), st.integers(0, 13_000))
def test_nothing_is_kept_where_the_cpu_is_fast_enough(sizes: list[int], affordable: int) -> None:
    step = [bucket(size, ready=float(i)) for i, size in enumerate(sizes)]
    in_time = SLACK_SHARE * (len(sizes) - 1) / 1001
    assert elements_to_keep(step, in_time, affordable) == 0


# ---- cores, link, bucket size ----------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.integers(1, 64), SECONDS), min_size=1, max_size=12))
def test_fewest_cores_that_are_about_as_fast_as_the_fastest(tried: list[tuple[int, float]]) -> None:
    times = [bucket(cores=cores, worker_seconds=seconds) for cores, seconds in tried]
    chosen = enough_cores(times)
    rates = {cores: rate([one for one in times if one.cores == cores]) for cores, _ in tried}
    assert rates[chosen] * ENOUGH_SPEED <= min(rates.values())
    assert all(one * ENOUGH_SPEED > min(rates.values()) for cores, one in rates.items() if cores < chosen)


def test_half_the_cores_are_enough_where_memory_is_the_limit() -> None:
    assert enough_cores([bucket(cores=8), bucket(cores=4, worker_seconds=1.02)]) == 4
    assert enough_cores([bucket(cores=8), bucket(cores=4, worker_seconds=1.9)]) == 8


@pytest.mark.parametrize(
    ("link_seconds_per_byte", "is_better"), [(0.0, True), (1e-4, True), (3e-4, False), (1.0, False)]
)
def test_widening_pays_while_the_link_is_not_the_slower_one(link_seconds_per_byte: float, is_better: bool) -> None:
    """1 ms for an element as it is, 0.8 ms widened; the link gets to 0.8 ms for 4 bytes at 0.2 ms for each."""
    times = [bucket(1000), bucket(1000, is_widened=True, gradient_bytes=4, worker_seconds=0.8)]
    assert should_widen(times, link_seconds_per_byte) is is_better


@given(st.lists(st.booleans(), max_size=6), SECONDS)
def test_widening_takes_a_look_at_both(kinds: list[bool], seconds: float) -> None:
    times = [bucket(is_widened=kind, worker_seconds=seconds) for kind in kinds]
    assert not should_widen(times, 0.0)  # no difference, or nothing to compare with
    slow = [replace(one, worker_seconds=2 * seconds) if not one.is_widened else one for one in times]
    assert should_widen(slow, 0.0) is (len(set(kinds)) == 2)


@given(st.integers(0, 10**12), st.floats(0.0, 1.0), st.floats(0.0, 1e3), st.integers(0, 10**9))
def test_size_of_buckets_is_within_bounds(total: int, handing: float, worker: float, elements: int) -> None:
    numel = numel_of_buckets([bucket(elements, handing_seconds=handing, worker_seconds=worker)], total)
    assert LEAST_NUMEL <= numel <= DEFAULT_NUMEL
    assert numel <= max(LEAST_NUMEL, total // LEAST_BUCKETS)


def test_size_of_buckets_is_the_smallest_that_is_cheap_to_hand_over() -> None:
    numel = 4 * 1024 * 1024
    times = [bucket(1000, worker_seconds=1000 * 1e-9, handing_seconds=numel * 1e-9 * OVERHEAD_SHARE)] * 3
    assert numel_of_buckets(times, 100 * DEFAULT_NUMEL) == pytest.approx(numel, abs=1)


def test_empty_buckets_have_a_rate() -> None:
    assert rate([bucket(0, worker_seconds=2.0)]) == 2.0


# ---- which parameters ------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 50), max_size=12), st.integers(0, 10), st.integers(1, 60))
def test_last_parameters_are_the_shortest_end_that_fills_the_buckets(
    sizes: list[int], gpu_buckets: int, bucket_numel: int
) -> None:
    order: list[Tensor] = [torch.empty(size) for size in sizes]
    chosen = last_parameters(order, Placement(gpu_buckets, bucket_numel, None, 1))
    assert all(one is other for one, other in zip(chosen, reversed(order), strict=False))
    wanted, elements = gpu_buckets * bucket_numel, sum(one.numel() for one in chosen)
    assert elements >= min(wanted, sum(sizes))
    if chosen:
        assert elements - chosen[-1].numel() < wanted
