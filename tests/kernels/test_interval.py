"""The interval test: what it calls certain rounds alike for every factor; every instruction set lists the others."""

import dataclasses
import itertools
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import compact, formula
from support.intervals import HALVES, Case, at_factor, beside_midpoints, cases, decayed, elements, factors
from support.kernel_arrays import FORMATS, Job, coefficient_table, differing, make_segment, narrow, widen
from support.listing import LISTED, Listing
from support.strategies import USUAL

from superadam.kernels import native
from superadam.kernels.hyperparameters import Coefficients, Interval
from superadam.kernels.native import Dtype, Flag, Format, Pass

ORDINARY = dataclasses.replace(USUAL, lr=1e-5)


def values_at(case: Case, factor: float, *, rounds: bool, is_cut: bool) -> np.ndarray:
    values = formula.adam_formula(at_factor(case.k, factor, rounds=rounds), *case.elements)[0]
    return compact.rounded_24bit(values, case.k.turn) if is_cut else values


def check_certain(case: Case, seed: int, *, is_cut: bool = False) -> None:
    """Products with bf16 gradients may be rounded, in what is published and in what the verdict asks for."""
    moved = partial(compact.moved_24bit, turn=case.k.turn) if is_cut else None
    tried = factors(case.interval, np.random.default_rng(seed), 4)
    roundings = {False, case.is_bfloat16}
    others = {at: values_at(case, at[0], rounds=at[1], is_cut=is_cut) for at in itertools.product(tried, roundings)}
    for publishes_rounded, dtype in itertools.product(roundings, HALVES):
        k = at_factor(case.k, case.k.s, rounds=publishes_rounded).over(case.interval)
        certain = formula.is_certain(k, dtype, *case.elements, moved=moved)
        values = values_at(case, case.k.s, rounds=publishes_rounded, is_cut=is_cut)
        published = widen(narrow(values, dtype), dtype)[certain]
        for at, values in others.items():
            assert differing(published, widen(narrow(values, dtype), dtype)[certain]) == 0, (at, dtype)


@given(case=cases(), seed=st.integers(0, 2**32 - 1))
def test_what_is_certain_rounds_alike_for_every_factor(case, seed):
    """With masters of 24 bits, half of the elements come to lie beside midpoints once their thresholds are added."""
    check_certain(case, seed)
    p = case.elements[4]
    thresholds = compact.thresholds(np.arange(len(p)), case.k.turn, 8).astype(np.int32)
    thresholds[np.random.default_rng(seed).random(len(p)) < 0.5] = 0
    shifted = (p.view(np.int32) - thresholds).view(np.float32)
    shifted = np.where(np.isfinite(shifted) & (np.signbit(shifted) == np.signbit(p)), shifted, p)
    check_certain(dataclasses.replace(case, elements=(*case.elements[:4], shifted)), seed, is_cut=True)


@given(seed=st.integers(0, 2**32 - 1), lr=st.floats(1e-4, 1.0))
def test_sums_with_decay_are_rounded_for_every_factor(seed, lr):
    """The gradient changes the last bits of a sum that decides about both moments."""
    hyper = dataclasses.replace(ORDINARY, lr=lr, eps=0.0, beta2=0.95, decoupled_weight_decay=False)
    k, rng = Coefficients.at_step(hyper, 1, 0.5).over(Interval(0.25, 0.75)), np.random.default_rng(seed)
    case = Case(k, Interval(0.25, 0.75), elements(rng, 4096, k, every=[decayed]))
    check_certain(dataclasses.replace(case, elements=beside_midpoints(rng, case, Dtype.BFLOAT16)), seed)


EACH_PASS = pytest.mark.parametrize("which", [Pass.SPECULATE, Pass.COMMIT_AND_SPECULATE], ids=lambda which: which.name)


@EACH_PASS
@given(
    case=cases(),
    gradient=st.sampled_from((Dtype.FLOAT32, *HALVES)),
    out=st.sampled_from(HALVES),
    length=st.integers(0, 70) | st.sampled_from([native.CHUNK - 1, native.CHUNK + 3, 2 * native.CHUNK + 21]),
    form=st.sampled_from(FORMATS),
)
def test_every_instruction_set_lists_what_the_oracle_does(which, case, gradient, out, length, form):
    if Format.MOMENTS_8BIT in form:
        case = dataclasses.replace(case, k=dataclasses.replace(case.k, flags=case.k.flags & ~Flag.AMSGRAD))
        length -= length % compact.BLOCK
    Listing(which, case, gradient, out, length, capacity=length, form=form).check()


def training_case(count: int, factor: float = 0.5, width: float = 1.25, seed: int = 7) -> Case:
    """Elements as in fine-tuning, of which about one in a hundred is uncertain."""
    rng = np.random.default_rng(seed)
    scale = np.exp(rng.normal(0, 1.2, count)) * 1e-6
    g, m = scale * rng.standard_t(4, count) / factor, scale * rng.normal(0, 0.3, count)
    v, p = scale**2, rng.normal(0, 0.02, count)
    interval = Interval(factor / width, factor * width)
    k = Coefficients.at_step(ORDINARY, 500, factor).over(interval)
    return Case(k, interval, tuple(one.astype(np.float32) for one in (g, m, v, v, p)))


@EACH_PASS
def test_threads_fill_one_list(which):
    listing = Listing(which, training_case(1 << 18), Dtype.BFLOAT16, Dtype.BFLOAT16, 1 << 18, 1 << 13)
    listing.check(threads=3)
    assert 1 << 10 < listing.count < 1 << 13


def test_a_list_that_is_too_short_says_how_long_it_would_be():
    listing = Listing(Pass.SPECULATE, training_case(1 << 16), Dtype.BFLOAT16, Dtype.BFLOAT16, 1 << 16, capacity=100)
    for isa in native.available_isas():
        expected = listing.run(isa)
        assert listing.count == len(expected["index"]) > 100, isa


@pytest.mark.parametrize("dtype", HALVES, ids=lambda dtype: dtype.name)
@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
def test_listed_elements_are_patched_with_another_factor(dtype, form):
    """A pass over two long lists, with the verdict's factor, makes the published values those of that factor."""
    cases = [training_case(1 << 16, width=3.9, seed=seed) for seed in range(2)]
    exact = at_factor(cases[0].k, cases[0].interval.high)
    listings = [Listing(Pass.SPECULATE, one, Dtype.BFLOAT16, dtype, 1 << 16, 1 << 16, form) for one in cases]
    references = [listing.segment.expected(Pass.SPECULATE, [exact])["out"] for listing in listings]
    published = [listing.segment.arrays["out"].view for listing in listings]
    values, places = np.zeros((2, 1 << 16), np.uint16), np.zeros((2, 1 << 16), np.int32)
    table = np.zeros(2, native.SEGMENT)
    for isa in native.available_isas():
        values[:], places[:] = 0, 0
        for n, (row, listing) in enumerate(zip(table, listings, strict=True)):
            listing.run(isa)
            assert listing.count > native.CHUNK
            assert differing(published[n], references[n]) > 0
            for name in ("index", *LISTED):
                row[name] = listing.record[name][0]
            row["target"], row["out"] = published[n].ctypes.data, values[n].ctypes.data
            row["places"], row["begin"] = places[n].ctypes.data, (1 << 31) - (1 << 16)
            row["length"], row["gradient_dtype"], row["out_dtype"] = listing.count, Dtype.BFLOAT16, dtype
            row["format"] = Format.LISTED_24BIT if Format.MASTER_24BIT in form else Format.PLAIN
            row["first_threshold"] = listing.segment.first_threshold
        native.run(Pass.SPECULATE, table, coefficient_table([exact]), isa=isa, threads=3)
        for n, listing in enumerate(listings):
            assert differing(published[n], references[n]) == 0, isa
            index = listing.arrays["index"].view[: listing.count]
            assert differing(values[n][: listing.count], references[n][index]) == 0, isa
            assert (places[n][: listing.count] == index + table[n]["begin"]).all(), isa


def test_a_product_with_the_step_size_may_not_overflow_for_one_factor_alone():
    hyper = dataclasses.replace(ORDINARY, lr=682.6988525390625, beta1=0.3, beta2=1 - 2.0**-45, eps=2.0**57)
    interval = Interval(0.4, 0.6)
    k = Coefficients.at_step(dataclasses.replace(hyper, weight_decay=0.0), 10**12, 0.5).over(interval)
    moment = 10485265 * 2.0**97  # times `nss`, a last bit below infinity, and above it where the gradient counts more
    given = tuple(np.array([x], np.float32) for x in (396 * 2.0**71 / 0.55, moment, 0, 0, 1.25 * 2.0**100))
    assert not np.isfinite(values_at(Case(k, interval, given), 0.6, rounds=False, is_cut=False))
    check_certain(Case(k, interval, given), 0)


def test_few_elements_are_uncertain_in_fine_tuning():
    """A test that called everything uncertain would be right, and of no use."""
    case = training_case(1 << 18)
    for cut, most in ((None, 0.02), (partial(compact.moved_24bit, turn=0x12345678), 0.03)):
        uncertain = {dtype: np.mean(~formula.is_certain(case.k, dtype, *case.elements, moved=cut)) for dtype in HALVES}
        assert uncertain[Dtype.BFLOAT16] < most
        assert uncertain[Dtype.FLOAT16] < 8 * most


@pytest.mark.parametrize(
    ("name", "value", "flags", "message"),
    [
        ("out_dtype", Dtype.FLOAT32, Flag(0), "dtypes"),
        ("length", 1 << 33, Flag(0), "length"),
        ("capacity", -1, Flag(0), "length"),
        ("index", 0, Flag(0), "lacks an array"),
        ("gradient", 0, Flag(0), "lacks an array"),
        ("exp_avg_sq", 0, Flag(0), "lacks an array"),
        ("max_exp_avg_sq", 64, Flag(0), "lacks an array"),
        ("max_exp_avg_sq", 0, Flag.AMSGRAD, "lacks an array"),
    ],
    ids=str,
)
def test_a_list_that_cannot_be_filled_is_refused(name, value, flags, message):
    case = training_case(64)
    case = dataclasses.replace(case, k=dataclasses.replace(case.k, flags=case.k.flags | flags))
    listing = Listing(Pass.SPECULATE, case, Dtype.BFLOAT16, Dtype.BFLOAT16, 64, capacity=64)
    table = listing.table()
    (listing.record if name in (native.UNCERTAIN.names or ()) else table)[name] = value
    with pytest.raises(ValueError, match=message):
        native.run(Pass.SPECULATE, table, coefficient_table(listing.job.sets))
    assert listing.segment.arrays["out"].is_unchanged()


@pytest.mark.parametrize("name", ["places", "target"])
def test_places_and_targets_without_an_index_are_refused(name):
    job = Job(Pass.SPECULATE, [make_segment(1, 8, Dtype.FLOAT32, Dtype.BFLOAT16)], [training_case(1).k])
    table = job.table()
    table[name] = job.segments[0].arrays["out"].address
    with pytest.raises(ValueError, match="lacks an array"):
        native.run(Pass.SPECULATE, table, coefficient_table(job.sets))
    if name == "places":
        return
    table["index"], table["out_dtype"] = table["target"], Dtype.FLOAT32
    with pytest.raises(ValueError, match="dtypes"):
        native.run(Pass.SPECULATE, table, coefficient_table(job.sets))


@pytest.mark.parametrize(
    ("hyper", "step", "factor", "interval"),
    [
        (ORDINARY, 5, 0.0, Interval(0.0, 0.5)),
        (ORDINARY, 5, 0.5, Interval(0.4, np.inf)),
        (ORDINARY, 5, 0.5, Interval(0.6, 0.7)),
        (ORDINARY, 5, 0.5, Interval(0.3, 0.4)),
        (ORDINARY, 5, 0.5, Interval(0.4, np.nan)),
        (dataclasses.replace(ORDINARY, lr=1e4), 1, 0.5, Interval(0.4, 0.6)),
    ],
)
def test_intervals_that_the_proof_does_not_cover_are_refused(hyper, step, factor, interval):
    assert Coefficients.at_step(hyper, step, factor).over(interval) is None


@given(lr=st.floats(1e-8, 1.0), step=st.integers(1, 10**6), factor=st.floats(1e-6, 1.0), rounds=st.booleans())
def test_scalars_of_the_test_are_rounded_up(lr, step, factor, rounds):
    k = Coefficients.at_step(dataclasses.replace(ORDINARY, lr=lr), step, factor, rounds=rounds)
    for width in (1.0, 1.01, 1.5, 3.9):
        low, high = float(np.float32(k.s / width)), float(np.float32(k.s * width))
        over = k.over(interval := Interval(low, high))
        assert all(map(interval.covers, (low, k.s, high)))
        assert not any(map(interval.covers, (0.99 * low, 1.01 * high)))
        products = high + k.s if Flag.ROUND in k.flags else high
        assert over.interval.spread > max(high - k.s, k.s - low) + 2.0**-8 * products
        assert over.interval.spread > 2.0**-6 * high
        assert over.interval.slope > -k.nss * k.w  # a product that is exact in double
        assert over.interval.kappa > k.c2**0.5 / k.bc2s
        assert over.interval.least > 2.0**-40 / k.bc2s
        assert over.interval.slack > 2.0**-68
        assert all(float(np.float32(one)) == one for one in over.interval)
