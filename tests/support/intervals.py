"""Elements that put the interval test to the test: new values beside midpoints, cancellation, denormals, specials."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from hypothesis import strategies as st

from superadam.kernels import formula
from superadam.kernels.hyperparameters import Coefficients, Hyperparameters, Interval
from superadam.kernels.native import Dtype

Array = npt.NDArray[np.float32]
Elements = tuple[Array, Array, Array, Array, Array]
"""Gradient, exp_avg, exp_avg_sq, max_exp_avg_sq, master."""

SPECIALS = (0, -0.0, np.inf, -np.inf, np.nan, 1e-45, -1e-45, 2.0**-126, 3.4e38, -3.4e38, 1, -1, 65504, 65519.99)
SPECIALS += (65520, 2.0**-14, 2.0**-24, 2.0**-25, 1e-30, 1e30)


@dataclass(frozen=True)
class Case:
    """Coefficients over an interval, and elements."""

    k: Coefficients
    interval: Interval
    elements: Elements


def magnitudes(rng: np.random.Generator, count: int, low: float, high: float) -> Array:
    """Positive numbers between two powers of two."""
    with np.errstate(all="ignore"):
        return np.exp2(rng.uniform(low, high, count)).astype(np.float32)


def signed(rng: np.random.Generator, values: Array) -> Array:
    return values * rng.choice(np.float32([-1, 1]), len(values))


def any_bits(rng: np.random.Generator, count: int) -> Array:
    return rng.integers(0, 2**32, count, np.uint32).view(np.float32)


def specials(rng: np.random.Generator, count: int) -> Array:
    return rng.choice(np.array(SPECIALS, np.float32), count)


def elements(rng: np.random.Generator, count: int, kind: str, lr: float) -> Elements:
    """Elements of one kind; `lr` is about the size of the updates."""
    size = float(np.log2(max(lr, 1e-8)))
    p = signed(rng, magnitudes(rng, count, size - 3, size + 14))
    with np.errstate(all="ignore"):
        if kind == "bits":
            g, m, p = (any_bits(rng, count) for _ in range(3))
            v = np.abs(any_bits(rng, count)) if rng.random() < 0.8 else any_bits(rng, count)
        elif kind == "specials":
            g, m, v, p = (np.where(rng.random(count) < 0.3, specials(rng, count), x) for x in (p, p[::-1], abs(p), p))
        elif kind == "wide":
            scale = rng.uniform(-60, 20, count)
            g = np.exp2(scale + rng.normal(0, 3, count)) * rng.choice([-1, 1], count)
            m, v = g * np.exp2(rng.normal(0, 5, count)), np.exp2(2 * scale + rng.normal(0, 8, count))
        elif kind == "cancelling":  # w (g - m) takes away nearly all of m
            g = signed(rng, magnitudes(rng, count, -30, 5))
            m = -g * rng.choice([0.05, 0.1, 1 / 9, 0.25, 0.5, 1], count) * (1 + rng.normal(0, 1e-3, count))
            v = g * g * np.exp2(rng.uniform(-12, 4, count))
        elif kind == "small":
            g = np.where(rng.random(count) < 0.3, 0, signed(rng, magnitudes(rng, count, -149, rng.uniform(-40, 0))))
            m = np.where(rng.random(count) < 0.3, 0, signed(rng, magnitudes(rng, count, -149, -30)))
            v = np.where(rng.random(count) < 0.5, 0, magnitudes(rng, count, -149, -60))
        else:  # as in training
            scale = np.exp2(rng.uniform(-40, 0))
            g, m = (
                scale * rng.standard_t(2, count),
                scale * rng.normal(0, 0.5, count) * np.exp2(rng.uniform(-8, 1, count)),
            )
            v = scale * scale * np.exp2(rng.normal(0, 2, count)) * (rng.random(count) > 0.1)
        vmax = np.maximum(v, v * np.exp2(rng.normal(0, 2, count)))
        return tuple(np.ascontiguousarray(one, np.float32) for one in (g, m, v, vmax, p))  # type: ignore[return-value]


def beside_midpoints(rng: np.random.Generator, k: Coefficients, dtype: Dtype, given: Elements) -> Elements:
    """Move masters so that new values lie within about an update of where rounding changes."""
    p = given[4]
    with np.errstate(all="ignore"):
        new = formula.adam_formula(k, *given)[0]
        update = new - (p * np.float32(k.decay) if k.flags & 4 else p)
        step = np.uint32(0x8000 if dtype is Dtype.BFLOAT16 else 0x1000)
        middle = (new.view(np.uint32) // (2 * step) * (2 * step) + step).view(np.float32)
        near = middle - update + update * rng.normal(0, 0.3, len(p)) * rng.choice([1, 1e-2, 1e-4], len(p))
        near = near + near * np.float32(2**-23) * rng.integers(-40, 41, len(p))
    return (*given[:4], np.where(np.isfinite(near), near, p).astype(np.float32))


KINDS = ("training", "training", "training", "wide", "cancelling", "small", "specials", "bits")


@st.composite
def cases(draw: st.DrawFn, count: int = 4096) -> Case:
    """Cases on both sides of each condition of the test; those whose coefficients it refuses are not drawn."""
    return drawn_case(np.random.default_rng(draw(st.integers(0, 2**32 - 1))), count)


def drawn_case(rng: np.random.Generator, count: int = 4096) -> Case:
    """Draw one such case."""
    while True:
        hyper = Hyperparameters(
            lr=float(10 ** rng.uniform(-8, 0.5)),
            beta1=float(rng.choice([0.9, 0.9, 0.95, 0.99, 0.5, 0.51, 0.3, 0.0])),
            beta2=float(rng.choice([0.999, 0.95, 0.99, 0.9999, 0.5, 0.0])),
            eps=float(rng.choice([1e-8, 1e-8, 1e-6, 1e-15, 0.0, 1e-30, 1.0, 1e10])),
            weight_decay=float(rng.choice([0, 0.01, 0.1, 10])),
            amsgrad=bool(rng.random() < 0.25),
            maximize=bool(rng.random() < 0.2),
            decoupled_weight_decay=bool(rng.random() < 0.5),
        )
        width = float(rng.choice([1, 1.01, 1.1, 1.5, 2, 3.9]))
        published = float(np.float32(rng.choice([1.0, rng.uniform(0.01, 1), 10 ** rng.uniform(-6, 0), 2.0**-16])))
        low = float(np.float32(published / width))
        high = float(np.float32(published * rng.choice([1, width])))
        k = Coefficients.at_step(hyper, int(rng.choice([1, 2, 3, 10, 1000, 10**6])), published)
        over = k.over(Interval(low, high))
        if over is None:
            continue
        given = elements(rng, count, rng.choice(KINDS), hyper.lr)
        if rng.random() < 0.7:
            given = beside_midpoints(rng, k, Dtype(rng.choice([Dtype.BFLOAT16, Dtype.FLOAT16])), given)
        return Case(over, Interval(low, high), given)


def factors(interval: Interval, rng: np.random.Generator, count: int = 12) -> list[float]:
    """Factors in an interval: its ends, their neighbours, and others."""
    low, high = map(np.float32, interval)
    inner = [np.nextafter(low, high), np.nextafter(high, low), *rng.uniform(low, high, count).astype(np.float32)]
    return [float(min(max(one, low), high)) for one in (low, high, *inner)]
