"""Elements that put the interval test to the test: new values beside midpoints, cancellation, denormals, specials."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
from hypothesis import strategies as st
from support import formula

from superadam.kernels.hyperparameters import Coefficients, Hyperparameters, Interval
from superadam.kernels.native import Dtype, Flag

HALVES = (Dtype.BFLOAT16, Dtype.FLOAT16)

Array = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]
Elements = tuple[Array, Array, Array, Array, Array]
"""Gradient, exp_avg, exp_avg_sq, max_exp_avg_sq, master."""

SPECIALS = (0, -0.0, np.inf, -np.inf, np.nan, 1e-45, -1e-45, 2.0**-126, 3.4e38, -3.4e38, 1, -1, 65504, 65519.99)
SPECIALS += (65520, 2.0**-14, 2.0**-24, 2.0**-25, 1e-30, 1e30)


@dataclass(frozen=True)
class Case:
    """Coefficients over an interval, and elements; gradients that are bf16 numbers may have rounded products."""

    k: Coefficients
    interval: Interval
    elements: Elements
    is_bfloat16: bool = False


def at_factor(k: Coefficients, factor: float, *, rounds: bool = False) -> Coefficients:
    flags = k.flags & ~(Flag.SCALE | Flag.ROUND)
    if factor != 1.0:
        flags |= Flag.SCALE | (Flag.ROUND if rounds else Flag(0))
    return replace(k, s=factor, flags=flags)


class Draws:
    """Random numbers of one case, as doubles."""

    def __init__(self, rng: np.random.Generator, count: int, k: Coefficients) -> None:
        self.rng, self.count, self.k = rng, count, k

    def powers(self, low: float, high: float) -> Doubles:
        """Positive numbers between two powers of two."""
        return np.exp2(self.rng.uniform(low, high, self.count))

    def signs(self) -> Doubles:
        return self.rng.choice([-1.0, 1.0], self.count)

    def mixed(self, share: float, some: npt.ArrayLike, others: npt.ArrayLike) -> Doubles:
        return np.where(self.rng.random(self.count) < share, some, others)

    def bits(self) -> Doubles:
        return self.rng.integers(0, 2**32, self.count, np.uint32).view(np.float32).astype(np.float64)

    def specials(self) -> Doubles:
        return self.rng.choice(np.array(SPECIALS, np.float64), self.count)

    def moment_for(self, update: Doubles, v: Doubles) -> Doubles:
        """Return the moment with which an update is about as large, where the gradient hardly changes both."""
        d = np.sqrt(v * self.k.b2) / self.k.bc2s + self.k.eps
        return update * d / max(abs(self.k.nss), 1e-30) / max(1.0 - self.k.w, 1e-3)


Kind = tuple[Doubles, Doubles, Doubles, Doubles]
"""Gradient, exp_avg, exp_avg_sq, and the new value over the update, or the master."""


def training(draws: Draws) -> Kind:
    scale, rng, count = draws.powers(-40, 0)[0], draws.rng, draws.count
    g, m = scale * rng.standard_t(2, count), scale * rng.normal(0, 0.5, count) * draws.powers(-8, 1)
    return g, m, scale * scale * np.exp2(rng.normal(0, 2, count)) * (rng.random(count) > 0.1), draws.powers(-3, 14)


def wide(draws: Draws) -> Kind:
    scale, rng, count = draws.rng.uniform(-60, 20, draws.count), draws.rng, draws.count
    g = np.exp2(scale + rng.normal(0, 3, count)) * draws.signs()
    v = np.exp2(2 * scale + rng.normal(0, 8, count))
    return g, g * np.exp2(rng.normal(0, 5, count)), v, draws.powers(-3, 14)


def cancelling(draws: Draws) -> Kind:
    """w (g - m) takes away nearly all of m."""
    g = draws.powers(-30, 5) * draws.signs()
    part = draws.rng.choice([0.05, 0.1, 1 / 9, 0.25, 0.5, 1], draws.count)
    m = -g * part * (1 + draws.rng.normal(0, 1e-3, draws.count))
    return g, m, g * g * draws.powers(-12, 4), draws.powers(-3, 14)


def small(draws: Draws) -> Kind:
    g = draws.mixed(0.3, 0, draws.powers(-149, draws.rng.uniform(-40, 0)) * draws.signs())
    m = draws.mixed(0.3, 0, draws.powers(-149, -30) * draws.signs())
    return g, m, draws.mixed(0.5, 0, draws.powers(-149, -60)), draws.powers(-3, 14)


def linear(draws: Draws) -> Kind:
    """The update is proportional to the factor: the denominator and what is left of the moment hardly count."""
    root = draws.powers(-30, 0)
    g = draws.signs() * root * draws.powers(-12, -6) / np.sqrt(draws.k.c2)
    coarse = np.exp2(np.floor(np.log2(np.abs(g)))) * draws.rng.uniform(1.0, 1.1, draws.count)  # for bf16: just above 1
    g = draws.mixed(0.5, g, np.copysign(coarse, g)) / draws.k.s
    return g, draws.k.w * draws.k.s * g * draws.powers(-20, -6) * draws.signs(), root * root, draws.powers(6, 12)


def inverse(draws: Draws) -> Kind:
    """The update is inversely proportional to the factor: only the denominator changes, and with the gradient alone."""
    g = draws.signs() * draws.powers(-20, 10)
    v = draws.mixed(0.5, 0, (draws.k.s * g) ** 2 * draws.k.c2 * draws.powers(-30, -10))
    return g, draws.k.s * g * draws.powers(6, 12) * draws.signs(), v, draws.powers(6, 12)


def still(draws: Draws) -> Kind:
    """Only roundings change; the update may be far larger than the new value."""
    root = draws.powers(-30, 0)
    m = root * draws.powers(-20, 0) * draws.signs()
    return m * draws.powers(-30, -14) / draws.k.s * draws.signs(), m, root * root, draws.powers(-17, 14)


def denormal(draws: Draws) -> Kind:
    """New values, and what changes them, are denormals, of magnitudes that a division makes no larger."""
    new, root = draws.powers(-149, -110), draws.powers(-15, 5)
    m = draws.moment_for(draws.signs() * draws.mixed(0.3, 0, new * draws.powers(-10, 3)), root * root)
    change = draws.powers(-152, -140) / max(abs(draws.k.nss) * draws.k.w, 1e-30) * root / draws.k.s
    return change * draws.signs(), m, root * root, draws.mixed(0.2, 0, new)


def faint(draws: Draws) -> Kind:
    """The second moment is a denormal, and the denominator little more than its root."""
    v = draws.mixed(0.2, 0, draws.powers(-149, -120))
    g = draws.powers(-80, -60) * draws.signs() / draws.k.s
    m = draws.mixed(0.3, draws.powers(-149, -120), draws.powers(-90, -50)) * draws.signs()
    return g, m, v, draws.powers(-3, 14)


def huge(draws: Draws) -> Kind:
    """The second moment overflows for some factors."""
    most = float(np.finfo(np.float32).max)
    v = most * draws.rng.uniform(0.5, 1.0, draws.count)
    rest = np.maximum(most - v * draws.k.b2, 0.0) * draws.rng.uniform(0.3, 1.0, draws.count)
    g = np.sqrt(rest / draws.k.c2) / draws.k.s * draws.signs()
    return g, g * draws.powers(-10, 6) * draws.k.s * draws.signs(), v, draws.powers(0, 12)


def edited(draws: Draws) -> Kind:
    """The second moment was made negative."""
    g = draws.powers(-20, 5) * draws.signs()
    v = -((draws.k.s * g) ** 2) * draws.k.c2 * draws.rng.uniform(0, 1.0, draws.count) / max(draws.k.b2, 0.1)
    return g, draws.k.s * g * draws.powers(-6, 6) * draws.signs(), v, draws.powers(4, 14)


def decayed(draws: Draws) -> Kind:
    """With L2, weights that decay decide; what they add to the moment is cancelled."""
    g, m, v, ratio = still(draws)
    if Flag.L2 not in draws.k.flags:
        return g, m, v, ratio
    k = draws.k
    new = abs(k.nss) * k.w * k.bc2s / np.sqrt(k.c2) * draws.powers(-14, -8) * draws.signs()
    x = k.wd * new
    m = -k.w * x / max(1.0 - k.w, 1e-3) * (1 + draws.rng.normal(0, 1e-4, draws.count))
    return x * draws.powers(-25, -22) / k.s, m, x * x * k.c2 * draws.mixed(0.5, 0, draws.powers(-20, -2)), new


def specials(draws: Draws) -> Kind:
    g, m, v, _ = training(draws)
    new = draws.powers(-10, 10)
    return (*(draws.mixed(0.3, draws.specials(), x) for x in (g, m, v, new)),)  # type: ignore[return-value]


def bits(draws: Draws) -> Kind:
    v = draws.bits()
    return draws.bits(), draws.bits(), v if draws.rng.random() < 0.2 else np.abs(v), draws.bits()


RELATIVE: tuple[Callable[[Draws], Kind], ...] = (
    training, wide, cancelling, small, linear, inverse, still, faint, huge, edited,
)  # fmt: skip
ABSOLUTE: tuple[Callable[[Draws], Kind], ...] = (denormal, decayed, specials, bits)


def elements(
    rng: np.random.Generator,
    count: int,
    k: Coefficients,
    *,
    is_bfloat16: bool = False,
    every: Sequence[Callable[[Draws], Kind]] = (*RELATIVE, *ABSOLUTE),
) -> Elements:
    made = []
    with np.errstate(all="ignore"):
        for number, kind in enumerate(every):
            draws = Draws(rng, len(range(number, count, len(every))), k)
            g, m, v, p = kind(draws)
            vmax = np.maximum(v, v * np.exp2(rng.normal(0, 2, draws.count)))
            g, m, v, vmax = (one.astype(np.float32) for one in (g, m, v, vmax))
            if is_bfloat16:
                g = formula.widen_bfloat16(formula.narrow_bfloat16(g))
            if kind in RELATIVE:
                update = np.float64(formula.adam_formula(k, g, m, v, vmax, np.zeros(draws.count, np.float32))[0])
                update = np.where(np.isfinite(update), update, 0.0)
                p = (np.where(update != 0, np.abs(update), 1.0) * p * draws.signs() - update) / (k.decay or 1.0)
            made.append((g, m, v, vmax, p.astype(np.float32)))
    return tuple(np.concatenate(one) for one in zip(*made, strict=True))  # type: ignore[return-value]


def middle_beside(values: Array, dtype: Dtype) -> Array:
    """Return where rounding changes, next to each value."""
    unit = 0x10000 if dtype is Dtype.BFLOAT16 else 0x2000
    middle = (values.view(np.uint32) // unit * unit + unit // 2).astype(np.uint32).view(np.float32)
    if dtype is Dtype.BFLOAT16:
        return middle
    denormal = np.copysign((np.floor(np.abs(values) * 2.0**24) + 0.5) * 2.0**-24, values)
    return np.where(np.abs(values) < 2.0**-14, denormal, middle).astype(np.float32)


def beside_midpoints(rng: np.random.Generator, case: Case, dtype: Dtype) -> Elements:
    """Move masters so that new values of one factor, or any nearby, lie next to where rounding changes."""
    low, high = case.interval
    aims = [(low, False), (high, False), (rng.uniform(low, high), False), (low, True), (high, True)]
    aims = [(float(np.float32(one)), rounds and case.is_bfloat16) for one, rounds in aims]
    p = case.elements[4].copy()
    with np.errstate(all="ignore"):
        for number, (factor, rounds) in enumerate(aims):
            chosen = slice(number, None, len(aims))
            at = at_factor(case.k, factor, rounds=rounds)
            g, m, v, vmax, p[chosen] = (one[chosen] for one in case.elements)
            for _ in range(2 if Flag.L2 in at.flags else 1):  # with L2, updates depend on masters
                p[chosen] = _beside_midpoints(rng, at, dtype, (g, m, v, vmax, p[chosen]))
    return (*case.elements[:4], p)


def _beside_midpoints(rng: np.random.Generator, k: Coefficients, dtype: Dtype, given: Elements) -> Array:
    p, count = given[4], len(given[4])
    decay = np.float32(k.decay if Flag.DECOUPLED in k.flags and k.decay else 1.0)
    new = formula.adam_formula(k, *given)[0]
    update = np.float64(new) - np.float64(p * decay)
    noise = rng.normal(0, 0.3, count) * rng.choice([1, 1e-2, 1e-4], count) * (rng.random(count) < 0.3)
    near = ((np.float64(middle_beside(new, dtype)) + update * (noise - 1)) / decay).astype(np.float32)
    steps = np.where(rng.random(count) < 0.7, rng.integers(-2, 3, count), rng.integers(-40, 41, count))
    near = (near.view(np.int32) + steps.astype(np.int32)).view(np.float32)
    return np.where(np.isfinite(near), near, p)


def cases() -> st.SearchStrategy[Case]:
    """Cases on both sides of each condition of the test; those whose coefficients it refuses are not drawn."""
    return st.integers(0, 2**32 - 1).map(lambda seed: drawn_case(np.random.default_rng(seed)))


def drawn_case(rng: np.random.Generator, count: int = 4096) -> Case:
    while True:
        hyper = Hyperparameters(
            lr=float(rng.choice([1, 1, 1, -1]) * 10 ** rng.uniform(-8, 0.5)),
            beta1=float(rng.choice([0.9, 0.9, 0.95, 0.99, 0.5, 0.51, 0.3, 0.0])),
            beta2=float(rng.choice([0.999, 0.95, 0.99, 0.9999, 0.5, 0.0])),
            eps=float(rng.choice([1e-8, 1e-8, 1e-6, 1e-15, 0.0, 1e-30, 1.0, 1e10])),
            weight_decay=float(rng.choice([0, 0.01, 0.1, 10])),
            amsgrad=bool(rng.random() < 0.25),
            maximize=bool(rng.random() < 0.2),
            decoupled_weight_decay=bool(rng.random() < 0.5),
        )
        width = float(rng.choice([1, 1.01, 1.1, 1.1, 1.5, 2, 3.9, 1000]))
        published = float(np.float32(rng.choice([1.0, rng.uniform(0.01, 1), 10 ** rng.uniform(-6, 0), 2.0**-16])))
        low = float(np.float32(published / width))
        high = float(np.float32(published * rng.choice([1, width])))
        k = Coefficients.at_step(hyper, int(rng.choice([1, 2, 3, 10, 1000, 10**6])), published)
        over = k.over(Interval(low, high))
        if over is None:
            continue
        is_bfloat16 = bool(rng.random() < 0.5)
        case = Case(over, Interval(low, high), elements(rng, count, over, is_bfloat16=is_bfloat16), is_bfloat16)
        return replace(case, elements=beside_midpoints(rng, case, HALVES[int(rng.integers(2))]))


def factors(interval: Interval, rng: np.random.Generator, count: int = 12) -> list[float]:
    """Factors in an interval: its ends, their neighbours, and others."""
    low, high = map(np.float32, interval)
    inner = [np.nextafter(low, high), np.nextafter(high, low), *rng.uniform(low, high, count).astype(np.float32)]
    return [float(min(max(one, low), high)) for one in (low, high, *inner)]
