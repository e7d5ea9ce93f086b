"""The verdict: norm, non-finite count and clip coefficient, whatever the schedule, the split and the thread count."""

import contextlib
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from support.float_modes import flushed_denormals, rounded_upward
from support.visible import are_taken, give_gradients, parameter, parameters_of

import superadam
from superadam import SpeculativeCPUAdam, StepKind
from superadam.kernels import native
from superadam.state.table import GradientNorm
from superadam.step.outcome import clip_coefficient, judge

NORMS = st.floats(0.0, 1e30)


@given(norm=NORMS, limit=NORMS)
@example(1.0, 1.0)
def test_coefficient_is_that_of_clip_grad_norm(norm: float, limit: float) -> None:
    """One gradient element of this size, in fp64, where torch's norm is exact; rounded once to fp32."""
    one = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
    one.grad = torch.ones_like(one)
    torch.nn.utils.clip_grads_with_norm_([one], limit, torch.tensor(norm, dtype=torch.float64))
    assert clip_coefficient(norm, limit) == float(np.float32(one.grad.item()))


@given(norm=NORMS)
@example(math.inf)
def test_no_limit_is_exactly_one(norm: float) -> None:
    assert clip_coefficient(norm, None) == clip_coefficient(norm, math.inf) == 1.0


@pytest.mark.parametrize("mode", [flushed_denormals, rounded_upward])
@pytest.mark.parametrize("is_taken", [False, True])
def test_norms_do_not_depend_on_the_mode_of_the_thread(mode: Callable[[], Any], *, is_taken: bool) -> None:
    """Squares of these gradients are denormal, and so is their sum."""
    one = torch.nn.Parameter(torch.zeros(10_000, dtype=torch.float64))
    optimizer, norms = SpeculativeCPUAdam([one]), []
    for context in (contextlib.nullcontext, mode):
        one.grad = torch.randn(10_000, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 1e-161
        if is_taken:
            optimizer.speculate()
        with context():
            norm = optimizer.clip_grad_norm_(1.0)
            optimizer.step()
        norms += [norm.item(), optimizer.last_outcome.grad_norm]
    assert {*norms} == {norms[0]} != {0.0}


CHUNKS = st.one_of(st.tuples(st.floats(0.0, 1e30), st.just(0)), st.tuples(st.just(math.inf), st.integers(1, 3)))
ENTRIES = st.lists(CHUNKS, max_size=8)


def norm_of(entries: list[tuple[float, int]]) -> GradientNorm:
    return GradientNorm(np.array([s for s, _ in entries], np.float64), np.array([n for _, n in entries], np.int64))


@given(entries=ENTRIES, limit=st.one_of(st.none(), st.just(math.inf), NORMS))
def test_agreement(entries: list[tuple[float, int]], limit: float | None) -> None:
    outcome = judge(norm_of(entries), limit)
    total = 0.0
    for one, _ in entries:  # in this order, in fp64
        total += one
    norm, bad = math.sqrt(total), sum(count for _, count in entries)
    assert (outcome.grad_norm, outcome.nonfinite) == (norm, bad)
    if bad:
        assert (outcome.kind, outcome.clip_coefficient) == (StepKind.SKIPPED, 1.0)
    else:
        clip = clip_coefficient(norm, limit)
        kind = StepKind.COMMITTED if clip == 1.0 else StepKind.CLIPPED
        assert (outcome.kind, outcome.clip_coefficient) == (kind, clip)


@given(entries=ENTRIES, begin=st.integers(0, 8), length=st.integers(0, 8))
def test_norm_is_copied_and_cleared_by_entry(entries: list[tuple[float, int]], begin: int, length: int) -> None:
    norm = norm_of(entries)
    copied = norm.copy()
    norm.clear(slice(begin, begin + length))
    assert copied.sums.tolist() == [s for s, _ in entries]
    assert copied.nonfinite.tolist() == [n for _, n in entries]
    kept = [(0.0, 0) if begin <= i < begin + length else one for i, one in enumerate(entries)]
    assert list(zip(norm.sums.tolist(), norm.nonfinite.tolist(), strict=True)) == kept
    norm.clear()
    assert judge(norm, None) == judge(GradientNorm.zeros(len(entries)), None)
    assert judge(norm, 0.0).grad_norm == 0.0


@pytest.mark.filterwarnings("error")
@given(
    sums=st.lists(st.floats(0.0), min_size=1, max_size=8),
    nonfinite=st.lists(st.integers(0, 2), min_size=8, max_size=8),
    factor=st.one_of(st.floats(2.0**-149, 1.0), st.floats(-1.0, -(2.0**-149))),
    begin=st.integers(0, 8),
)
def test_a_norm_is_scaled_as_its_gradients_are(sums, nonfinite, factor, begin):
    """Also where a sum has overflown, or is of an Inf; nothing warns."""
    norm = GradientNorm(np.array(sums, np.float64), np.array(nonfinite[: len(sums)], np.int64))
    norm.scale(slice(begin, None), factor)
    for place, (before, after) in enumerate(zip(sums, norm.sums.tolist(), strict=True)):
        if place < begin:
            assert after == before
        else:
            assert after == before * (factor * factor)


@given(
    lengths=st.lists(st.integers(0, 9000), min_size=1, max_size=4),
    dtypes=st.lists(st.sampled_from([torch.float32, torch.bfloat16, torch.float64]), min_size=4, max_size=4),
    order=st.permutations(range(4)),
    threads=st.integers(1, 3),
    isa=st.sampled_from(superadam.available_isas()),
)
def test_norm_has_the_same_bits_whatever_the_schedule(lengths, dtypes, order, threads, isa):
    optimizer = SpeculativeCPUAdam([parameter(n, dtype=dtypes[i], seed=i) for i, n in enumerate(lengths)])
    before = superadam.get_num_threads(), superadam.active_isa()
    superadam.set_num_threads(1)
    give_gradients(optimizer, 1)
    gradients = [one.grad.clone() for one in parameters_of(optimizer)]  # else they would not be taken
    expected = optimizer.clip_grad_norm_(1.0).item()
    try:
        superadam.set_num_threads(threads)
        native._active = isa
        for index in order:
            if index < len(lengths):
                optimizer.speculate([parameters_of(optimizer)[index]])
        assert all(are_taken(optimizer))
        assert optimizer.clip_grad_norm_(math.inf).item() == expected
        assert optimizer.resolve().grad_norm == expected
    finally:
        superadam.set_num_threads(before[0])
        native._active = before[1]
    exact = math.sqrt(math.fsum(x * x for gradient in gradients for x in gradient.double().tolist()))
    assert expected == pytest.approx(exact, rel=1e-13)  # under 300 roundings of 1.1e-16 each


@pytest.mark.parametrize(("value", "count"), [(math.inf, 3), (-math.inf, 3), (math.nan, 3), (3e38, 0), (1e-45, 0)])
def test_nonfinite_elements_are_counted(value: float, count: int) -> None:
    """Overflow of the sum of squares is no Inf: it runs in fp64."""
    optimizer = SpeculativeCPUAdam([parameter(5000), parameter(7)])
    for one, where in zip(parameters_of(optimizer), ([0, 4999], [3]), strict=True):
        one.grad = torch.ones_like(one)
        one.grad[where] = value
    optimizer.step()
    assert optimizer.last_outcome.nonfinite == count
    assert (optimizer.last_outcome.kind is StepKind.SKIPPED) is bool(count)
    assert math.isfinite(optimizer.last_outcome.grad_norm) is not bool(count)
