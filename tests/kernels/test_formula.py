"""The oracle itself: its fma against the C library's, its products and its sums; its steps are those of the kernels."""

import ctypes
import math

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from support import formula
from support.reference import same_bits
from support.strategies import Magnitudes, hyperparameters, lengths, random_array

from superadam.kernels.hyperparameters import Coefficients, Hyperparameters

SEEDS = st.integers(0, 2**32 - 1)
_fmaf = ctypes.CDLL("libm.so.6").fmaf
_fmaf.restype, _fmaf.argtypes = ctypes.c_float, [ctypes.c_float] * 3


def check_fma(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> None:
    assert same_bits(formula.fma(a, b, c), np.frompyfunc(_fmaf, 3, 1)(a, b, c).astype(np.float32))


@given(seed=SEEDS, kind=st.sampled_from(Magnitudes), cancels=st.booleans())
def test_fma_of_fp32_rounds_once(seed, kind, cancels):
    """As does that of the C library, which is taken for fp64."""
    rng = np.random.default_rng(seed)
    a, b, c = (random_array(rng, 100, kind, np.float32) for _ in range(3))
    if cancels:  # what is left of the product is its rounding error
        with np.errstate(all="ignore"):
            c = -(a * b)
    check_fma(a, b, c)


@given(st.integers(0, 2**24 - 1), st.integers(-149, 100), st.sampled_from([-1, 0, 1]))
def test_fma_sees_what_lies_next_to_a_tie(mantissa, exponent, offset):
    """Rounding to double first makes such sums ties, which then go the wrong way."""
    a, b = 2.0**-75, offset * 2.0**-74  # the product is the least that fp32 operands can add
    tie = (2 * mantissa + 1) * 2.0 ** (exponent - 1)  # halfway between two fp32 numbers, or below them
    check_fma(*np.array([a, b, tie], np.float32)[:, None])


def test_fma_at_infinities_and_zeros():
    largest, smallest = np.finfo(np.float32).max, np.finfo(np.float32).smallest_subnormal
    cases = [
        (largest, largest, -np.inf),  # the product is finite, although it overflows
        (np.inf, 0.0, 1.0),
        (np.inf, 1.0, -np.inf),
        (largest, 2.0, 0.0),
        (1.0, 0.0, -0.0),
        (-1.0, 0.0, -0.0),
        (-1.0, 1.0, 1.0),
        (smallest, -0.25, 0.0),
    ]
    check_fma(*np.array(cases, np.float32).T)


# -- the formula -------------------------------------------------------------------------------------------------------


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


@given(length=lengths(), seed=SEEDS, kind=st.sampled_from([Magnitudes.ORDINARY, Magnitudes.WIDE]))
def test_chunk_sums_are_sums_of_squares(length, seed, kind):
    gradient = random_array(np.random.default_rng(seed), length, kind, np.float32)
    sums = formula.chunk_sums(gradient)
    squares = gradient.astype(np.float64) ** 2  # exact
    exact = [math.fsum(squares[i : i + formula.CHUNK]) for i in range(0, length, formula.CHUNK)]
    # 260 additions of values of one sign one after another: at most 260 * 2**-53 = 2.9e-14.
    np.testing.assert_allclose(sums, exact, rtol=1e-12, atol=0)
    np.testing.assert_allclose(formula.ordered_sum(sums), math.fsum(exact), rtol=1e-12, atol=0)
