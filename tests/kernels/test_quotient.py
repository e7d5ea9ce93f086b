"""The quotient of a root and bc2s by products, as vector kernels of x86-64 take it: its proof in docs/design.md."""

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
from support.deep import TIMES

from superadam.kernels import native
from superadam.kernels.hyperparameters import Coefficients
from superadam.kernels.native import Dtype, Flag, Pass

STEPS = [(0.999, 1), (0.999, 2), (0.999, 1000), (0.95, 7), (1 - 2**-53, 1)]
DIVISORS = [*(math.sqrt(1 - beta**step) for beta, step in STEPS), 1.0, 1 - 2**-24, 1 - 2**-23, 0.5, 0.5 + 2**-24]


def rounded(number: Fraction, bits: int) -> Fraction:
    """Return the nearest number of so many bits, of two the even one."""
    exponent = abs(number.numerator).bit_length() - number.denominator.bit_length()
    last = Fraction(2) ** (exponent - bits + (abs(number) >= Fraction(2) ** exponent))
    return round(number / last) * last


def quotient(x: Fraction, c: Fraction, bits: int) -> Fraction:
    """Return what the kernels compute of two numbers that need no more bits."""
    inverse = rounded(1 / c, bits)
    product = rounded(x * inverse, bits)
    return rounded(product + rounded(x - product * c, bits) * inverse, bits)


@pytest.mark.parametrize("bits", range(2, 8))
def test_numbers_of_few_bits_are_all_divided_right(bits: int) -> None:
    numbers = [Fraction(mantissa, 2 ** (bits - 1)) for mantissa in range(2 ** (bits - 1), 2**bits)]
    for x, c in itertools.product(numbers, numbers):
        assert quotient(x, c, bits) == rounded(x / c, bits)


@pytest.mark.parametrize(("x", "c"), [(2, 1), (3, 1), (3, 2)])
def test_pairs_that_the_proof_leaves_over(x: int, c: int) -> None:
    x, c = (2 - Fraction(below, 2**23) for below in (x, c))
    assert quotient(x, c, 24) == rounded(x / c, 24)


def published(isa: str, exp_avg: np.ndarray, exp_avg_sq: np.ndarray, bc2s: float) -> np.ndarray:
    """Return m / (sqrt(v) / bc2s) of fp32 moments, as a kernel computes it."""
    arrays = {"exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
    arrays |= {name: np.zeros_like(exp_avg) for name in ("gradient", "master", "out")}
    segments = np.zeros(1, native.SEGMENT)
    for name, array in arrays.items():
        segments[name] = array.ctypes.data
    segments["length"], segments["gradient_dtype"], segments["out_dtype"] = len(exp_avg), Dtype.FLOAT32, Dtype.FLOAT32
    keeps_moments = Coefficients(s=1, decay=1, wd=0, w=0, b2=1, c2=0, nss=1, bc2s=bc2s, eps=0, flags=Flag(0))
    native.run(Pass.SPECULATE, segments, np.array([keeps_moments.row()], native.COEFFICIENTS), isa=isa)
    return arrays["out"]


@pytest.mark.slow
def test_every_mantissa_of_a_root(isa: str) -> None:
    # Roots of numbers from 1 to 4 have every mantissa. If the denominator has another last bit, the quotient is not 1.
    stride = 1 if isa in ("avx512", "avx2") else 101
    exp_avg_sq = np.arange(0x3F800000, 0x40800000, stride, np.uint32).view(np.float32)
    drawn = 1 - np.random.default_rng(0).random(4 * TIMES)
    for divisor in np.float32([*DIVISORS, *drawn]):
        denominator = np.sqrt(exp_avg_sq) / divisor
        assert np.all(published(isa, denominator, exp_avg_sq, float(divisor)) == 1.0), divisor


@pytest.mark.parametrize("divisor", DIVISORS)
def test_roots_of_numbers_at_the_ends(isa: str, divisor: float) -> None:
    generator = np.random.default_rng(1)
    everywhere = generator.integers(0, 0x7F800000, 4096, np.uint32).view(np.float32)
    ends = [0.0, 2.0**-149, 3 * 2.0**-149, 2.0**-126, 2.0**127, np.finfo(np.float32).max, np.inf, np.nan, -1.0]
    exp_avg_sq = np.array([*ends, *everywhere], np.float32)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        denominator = np.sqrt(exp_avg_sq) / np.float32(divisor)
        for exp_avg in (denominator, np.full_like(denominator, 2.0**-70)):
            found = published(isa, exp_avg, exp_avg_sq, float(np.float32(divisor)))
            np.testing.assert_array_equal(found, exp_avg / denominator)
