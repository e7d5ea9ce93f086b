"""The rules of the placement, over measured times: what they promise holds for any times."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

from superadam.offload.buckets import DEFAULT_NUMEL
from superadam.offload.placement import (
    LEAST_BUCKETS,
    LEAST_NUMEL,
    SLACK_SHARE,
    BucketTimes,
    Placement,
    elements_to_keep,
    last_parameters,
    numel_of_buckets,
    rate,
    saved_share,
    worker_ends,
)

SECONDS = st.floats(1e-6, 10.0)


def bucket(elements: int = 1000, **changes: object) -> BucketTimes:
    usual = BucketTimes(elements, bytes=elements, ready=0.0, worker_seconds=1.0)
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


@given(steps(), SECONDS, st.integers(0, 12), st.integers(0, 12))
def test_saved_share_compares_with_what_is_kept_now(
    step: list[BucketTimes], seconds: float, now: int, then: int
) -> None:
    assume(all(one.elements for one in step))  # or several numbers of buckets have the same elements
    now, then = min(now, len(step)), min(then, len(step))
    step = [replace(one, is_resident=number >= len(step) - now) for number, one in enumerate(step)]
    ends, begin, end = worker_ends(step, seconds), step[0].ready, step[-1].ready
    before, after = (max(end, ends[len(step) - kept]) - begin for kept in (now, then))
    saved = saved_share(step, seconds, sum(one.elements for one in step[len(step) - then :]))
    assert saved == pytest.approx((before - after) / max(before, 1e-9))
    assert (saved >= 0) if then >= now else (saved <= 0)


def test_passes_of_other_bytes_have_one_rate() -> None:
    """A bucket whose step before is committed in the same pass takes longer, at the same speed."""
    alone = bucket(1000, bytes=18_000, worker_seconds=0.18)
    fused = bucket(1000, bytes=34_000, worker_seconds=0.34)
    assert rate([alone]) == pytest.approx(rate([fused, alone, fused]))


# ---- bucket size and rate --------------------------------------------------------------------------------------------


@given(st.integers(0, 10**12))
def test_size_of_buckets_is_an_eighth_of_the_model_within_bounds(total: int) -> None:
    numel = numel_of_buckets(total)
    assert LEAST_NUMEL <= numel <= DEFAULT_NUMEL
    assert numel in (LEAST_NUMEL, DEFAULT_NUMEL, total // LEAST_BUCKETS)
    assert numel <= max(LEAST_NUMEL, total // LEAST_BUCKETS)


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
