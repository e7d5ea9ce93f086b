"""When speculation is worth its work: rarely clipped, and the norm still under the limit."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from superadam import StepKind
from superadam.offload.pipeline import SpeculationPolicy

KINDS = st.lists(st.sampled_from(StepKind), max_size=60)


def after(kinds: list[StepKind]) -> SpeculationPolicy:
    policy = SpeculationPolicy()
    for kind in kinds:
        policy.add_verdict(kind)
    return policy


def test_speculates_from_the_first_step_on() -> None:
    assert SpeculationPolicy().speculates(0.0, 1.0)


def test_stops_within_ten_clipped_steps_and_goes_on_within_ten_good_ones() -> None:
    clipped = [StepKind.CLIPPED] * 10
    assert not after(clipped).speculates(0.0, 1.0)
    assert after(clipped + [StepKind.COMMITTED] * 10).speculates(0.0, 1.0)


def test_a_rare_clipped_step_changes_nothing() -> None:
    assert after(([StepKind.COMMITTED] * 9 + [StepKind.CLIPPED]) * 10).speculates(0.0, 1.0)


@pytest.mark.parametrize(("norm", "expected"), [(0.0, True), (1.0, True), (1.5, False), (math.inf, False)])
def test_early_verdict(norm: float, expected: bool) -> None:
    assert SpeculationPolicy().speculates(norm, 1.0) is expected


def test_norm_of_nan_is_no_reason_to_write() -> None:
    assert not SpeculationPolicy().speculates(math.nan, 1.0)


@given(KINDS, st.floats())
def test_without_a_limit_only_clipping_by_others_counts(kinds: list[StepKind], norm: float) -> None:
    policy = after(kinds)
    assert policy.speculates(norm, None) is policy.speculates(norm, math.inf) is policy.speculates(0.0, 1.0)
    assert policy.speculates(norm, None) is (policy.clipped_share < 0.5)


@given(KINDS)
def test_skipped_steps_do_not_count(kinds: list[StepKind]) -> None:
    counted = [kind for kind in kinds if kind is not StepKind.SKIPPED]
    assert after(kinds).clipped_share == after(counted).clipped_share
    assert 0.0 <= after(kinds).clipped_share <= 1.0
