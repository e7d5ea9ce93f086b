"""The oracle itself: its fma against the C library's, its products and its sums; its steps are those of the kernels."""

import ctypes
import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support import formula
from support.strategies import Magnitudes, hyperparameters, lengths, random_array

from superadam.kernels.hyperparameters import Coefficients, Hyperparameters

SEEDS = st.integers(0, 2**32 - 1)
_libm = ctypes.CDLL("libm.so.6")
_libm.fmaf.restype, _libm.fmaf.argtypes = ctypes.c_float, [ctypes.c_float] * 3
_libm.fma.restype, _libm.fma.argtypes = ctypes.c_double, [ctypes.c_double] * 3


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    return np.array_equal(a, b, equal_nan=True) and np.array_equal(np.signbit(a[a == 0]), np.signbit(b[b == 0]))


# -- fma ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("real", "reference"), [(np.float32, _libm.fmaf), (np.float64, _libm.fma)], ids=["fp32", "fp64"]
)
@given(seed=SEEDS, kind=st.sampled_from(Magnitudes), cancels=st.booleans())
def test_fma_rounds_once(real, reference, seed, kind, cancels):
    rng = np.random.default_rng(seed)
    a, b, c = (random_array(rng, 100, kind, real) for _ in range(3))
    if cancels:  # what is left of the product is its rounding error
        with np.errstate(all="ignore"):
            c = -(a * b)
    expected = np.array([reference(*each) for each in zip(a.tolist(), b.tolist(), c.tolist(), strict=True)], real)
    assert same_bits(formula.fma(a, b, c), expected)


@given(st.integers(0, 2**24 - 1), st.integers(-149, 100), st.sampled_from([-1, 0, 1]))
def test_fma_sees_what_lies_next_to_a_tie(mantissa, exponent, offset):
    """Rounding to double first makes such sums ties, which then go the wrong way."""
    tie = Fraction(2 * mantissa + 1) * Fraction(2) ** (exponent - 1)  # halfway between two fp32 numbers, or below them
    a, b = np.float32(2.0**-75), np.float32(offset * 2.0**-74)  # the product is the least that fp32 operands can add
    c = np.float32(float(tie))
    exact = Fraction(float(a)) * Fraction(float(b)) + Fraction(float(c))
    assert formula.fma(a, b, c) == nearest_float32(exact)


def nearest_float32(exact: Fraction) -> float:
    """Return the fp32 number nearest to `exact`, ties to even, by comparing the neighbours of a guess."""
    guess = np.float32(float(exact))
    with np.errstate(over="ignore"):
        near = [guess, np.nextafter(guess, np.float32(np.inf)), np.nextafter(guess, np.float32(-np.inf))]
    return float(min(near, key=lambda x: (abs(Fraction(float(x)) - exact), int(x.view(np.uint32)) % 2)))


@pytest.mark.parametrize("real", [np.float32, np.float64])
def test_fma_at_infinities_and_zeros(real):
    largest = np.finfo(real).max
    cases = {
        (largest, largest, -np.inf): -np.inf,  # the product is finite, although it overflows
        (np.inf, 0.0, 1.0): np.nan,
        (np.inf, 1.0, -np.inf): np.nan,
        (largest, 2.0, 0.0): np.inf,
        (1.0, 0.0, -0.0): 0.0,
        (-1.0, 0.0, -0.0): -0.0,
        (-1.0, 1.0, 1.0): 0.0,
        (np.finfo(real).smallest_subnormal, -0.25, 0.0): -0.0,
    }
    a, b, c = np.array(list(cases), real).T
    assert same_bits(formula.fma(a, b, c), np.array(list(cases.values()), real))


# -- the formula -------------------------------------------------------------------------------------------------------


@given(hyper=hyperparameters(), scale=st.sampled_from([0.25, 0.3]), seed=SEEDS)
def test_scaling_multiplies_the_gradient_once(hyper, scale, seed):
    rng = np.random.default_rng(seed)
    g, m, v, vmax, p = (np.abs(random_array(rng, 50, Magnitudes.WIDE, np.float32)) for _ in range(5))
    scaled = formula.adam_formula(Coefficients.at_step(hyper, 4, scale), g, m, v, vmax, p)
    before = formula.adam_formula(Coefficients.at_step(hyper, 4), g * np.float32(scale), m, v, vmax, p)
    assert all(same_bits(a, b) for a, b in zip(scaled, before, strict=True))


@given(hyper=hyperparameters(), scale=st.floats(-1.0, 1.0, width=32), seed=SEEDS)
def test_a_rounded_product_is_that_of_torch(hyper, scale, seed):
    """But for fp64, whose gradients are never bf16."""
    rng = np.random.default_rng(seed)
    g, m, v, vmax, p = (np.abs(random_array(rng, 50, Magnitudes.WIDE, np.float32)) for _ in range(5))
    half = torch.from_numpy(g).bfloat16()
    k = Coefficients.at_step(hyper, 4, scale, rounds=True)
    rounded = formula.adam_formula(k, half.float().numpy(), m, v, vmax, p)
    before = formula.adam_formula(Coefficients.at_step(hyper, 4), half.mul_(scale).float().numpy(), m, v, vmax, p)
    assert all(same_bits(a, b) for a, b in zip(rounded, before, strict=True))
    doubles = [array[:5].astype(np.float64) for array in (g, m, v, vmax, p)]
    sets = [Coefficients.at_step(hyper, 4, scale, rounds=rounds, double=True) for rounds in (False, True)]
    assert all(same_bits(a, b) for a, b in zip(*(formula.adam_formula(k, *doubles) for k in sets), strict=True))


def test_no_inverse_restores_the_state():
    """Why rolling back is not computing backwards: the inverse of one ordinary step gives these shares of the bits."""
    rng = np.random.default_rng(0)
    p, m, v, g = (scale * rng.standard_normal(1 << 16, np.float32) for scale in np.float32([0.02, 1e-4, 1e-3, 1e-3]))
    v = v * v
    k = Coefficients.at_step(Hyperparameters(1e-5, 0.9, 0.999, 1e-8, 0.1, False, False, True), 1000)
    w, b2, c2, nss, bc2s, eps, decay = map(np.float32, (k.w, k.b2, k.c2, k.nss, k.bc2s, k.eps, k.decay))
    new_p, new_m, new_v, _ = formula.adam_formula(k, g, m, v, v, p)
    inverse = {
        "p": (new_p - (nss * new_m) / (np.sqrt(new_v) / bc2s + eps)) / decay,
        "m": (new_m - w * g) / (1 - w),
        "v": (new_v - c2 * g * g) / b2,
    }
    before = {"p": p, "m": m, "v": v}
    shares = {name: float(np.mean(inverse[name] == before[name])) for name in before}
    assert {name: round(share, 3) for name, share in shares.items()} == {"p": 0.999, "m": 0.426, "v": 0.967}


def test_larger_or_nan():
    a = np.array([1.0, 2.0, np.nan, 1.0, 0.0, -0.0], np.float32)
    b = np.array([2.0, 1.0, 1.0, np.nan, -0.0, 0.0], np.float32)
    assert same_bits(formula.larger_or_nan(a, b), np.array([2.0, 2.0, np.nan, np.nan, 0.0, -0.0], np.float32))


# -- the norm ----------------------------------------------------------------------------------------------------------


@given(length=lengths(), seed=SEEDS, kind=st.sampled_from([Magnitudes.ORDINARY, Magnitudes.WIDE]))
def test_chunk_sums_are_sums_of_squares(length, seed, kind):
    gradient = random_array(np.random.default_rng(seed), length, kind, np.float32)
    sums = formula.chunk_sums(gradient)
    squares = gradient.astype(np.float64) ** 2  # exact
    exact = [math.fsum(squares[i : i + formula.CHUNK]) for i in range(0, length, formula.CHUNK)]
    # 260 additions of values of one sign one after another: at most 260 * 2**-53 = 2.9e-14.
    np.testing.assert_allclose(sums, exact, rtol=1e-12, atol=0)
    np.testing.assert_allclose(formula.ordered_sum(sums), math.fsum(exact), rtol=1e-12, atol=0)


def test_lanes_are_added_pairwise():
    """In the stated order: lane i and i + 8, and so on; neighbours first, or one after another, give other bits."""
    gradients = np.random.default_rng(0).standard_normal((100, formula.LANES)).astype(np.float32)
    squares = gradients.astype(np.float64) ** 2
    halves = neighbours = squares
    for width in (8, 4, 2, 1):
        halves = halves[:, :width] + halves[:, width:]
        neighbours = neighbours[:, ::2] + neighbours[:, 1::2]
    ours = [formula.chunk_sums(gradient)[0] for gradient in gradients]
    assert ours == halves[:, 0].tolist()
    assert ours != neighbours[:, 0].tolist()
    assert ours != [formula.ordered_sum(each) for each in squares]


@given(length=lengths(), seed=SEEDS, kind=st.sampled_from([Magnitudes.BITS, Magnitudes.SPECIAL, Magnitudes.HUGE]))
def test_nonfinite_elements_are_counted(length, seed, kind):
    gradient = random_array(np.random.default_rng(seed), length, kind, np.float32)
    counts = formula.chunk_nonfinite(gradient)
    assert len(counts) == -(-length // formula.CHUNK)
    assert counts.sum() == sum(not math.isfinite(g) for g in gradient)


def test_ordered_sum_does_not_compensate():
    assert formula.ordered_sum(np.array([1e100, 1.0, -1e100])) == 0.0
