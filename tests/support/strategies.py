"""Hypothesis strategies for hyper-parameters, lengths and arrays of every magnitude.

Arrays are drawn as a seed and a kind per array, not element by element: thousands of elements cost nothing to draw, and
a failure shrinks to a short array of a simple kind. Hyper-parameters that are denormal doubles (below 1e-307) are left
out: Python itself reads them as zeros while denormals are flushed.
"""

import enum

import numpy as np
import numpy.typing as npt
from hypothesis import strategies as st

from superadam.kernels.hyperparameters import Coefficients, Hyperparameters

CHUNK = 4096


class Magnitudes(enum.Enum):
    """What the elements of a random array look like."""

    ORDINARY = "normally distributed around 0"
    TINY = "from the smallest denormal to 1e-30"
    HUGE = "1e20 to 1e30"
    WIDE = "denormal to 1e30"
    SPECIAL = "zeros of both signs, ones, the ends of the range, Inf and NaN"
    BITS = "any bit pattern"


USUAL = Hyperparameters(1e-3, 0.9, 0.999, 1e-8, 0.1, amsgrad=False, maximize=False, decoupled_weight_decay=True)


def random_array(
    rng: np.random.Generator, length: int, kind: Magnitudes, dtype: npt.DTypeLike
) -> npt.NDArray[np.floating]:
    """Return `length` elements of float32 or float64, of both signs."""
    limits = np.finfo(dtype)
    smallest = np.log10(limits.smallest_subnormal)
    if kind is Magnitudes.BITS:
        return rng.integers(0, 256, length * np.dtype(dtype).itemsize, dtype=np.uint8).view(dtype)
    if kind is Magnitudes.SPECIAL:
        tiny = [0.0, limits.smallest_subnormal, limits.smallest_normal]
        choices = np.array([*tiny, 0.5, 1.0, 3.0, limits.max, np.inf, np.nan], dtype=dtype)
        return rng.choice(np.concatenate([choices, -choices]), length)
    if kind is Magnitudes.ORDINARY:
        return rng.standard_normal(length).astype(dtype)
    low, high = {
        Magnitudes.TINY: (smallest, -30 if dtype == np.float32 else -300),
        Magnitudes.HUGE: (20, 30),
        Magnitudes.WIDE: (smallest, 30),
    }[kind]
    return (10.0 ** rng.uniform(low, high, length) * rng.choice([-1.0, 1.0], length)).astype(dtype)


def lengths() -> st.SearchStrategy[int]:
    """Lengths from 0 to a few chunks, mostly around the multiples of vectors and chunks."""
    edges = [0, 1, 15, 16, 17, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 17, 3 * CHUNK]
    return st.one_of(st.integers(0, 70), st.sampled_from(edges), st.integers(0, 3 * CHUNK + 40))


def hyperparameters(largest: float = 1e30) -> st.SearchStrategy[Hyperparameters]:
    """Every combination of Adam's options, on both sides of each branch of the formula."""
    anything = st.floats(0.0, largest, allow_subnormal=False)
    betas = st.one_of(
        st.sampled_from([0.0, 0.3, 0.5, 0.9, 0.999]), st.floats(0.0, 1.0, exclude_max=True, allow_subnormal=False)
    )
    return st.builds(
        Hyperparameters,
        lr=st.one_of(st.sampled_from([0.0, 1e-5, -1e-3, 1.0]), anything),
        beta1=betas,
        beta2=betas,
        eps=st.one_of(st.sampled_from([0.0, 1e-8, 1e-40]), anything),
        weight_decay=st.one_of(st.sampled_from([0.0, 0.01, 0.1]), anything),
        amsgrad=st.booleans(),
        maximize=st.booleans(),
        decoupled_weight_decay=st.booleans(),
    )


def scales() -> st.SearchStrategy[float]:
    """Factors on the gradients: none, a clip coefficient, an unscale factor, anything."""
    return st.one_of(
        st.sampled_from([1.0, 0.5, 2.0**-16]),
        st.floats(0.0, 1.0, allow_subnormal=False),
        st.floats(0.0, 1e30, allow_subnormal=False),
    )


def coefficients(*, double: bool = False) -> st.SearchStrategy[Coefficients]:
    steps = st.one_of(st.integers(1, 5), st.integers(1, 1_000_000), st.integers(2**24, 2**53))
    options = {"rounds": st.booleans(), "double": st.just(double)}
    return st.builds(Coefficients.at_step, hyperparameters(), steps, scales(), **options)
