"""Hyper-parameters of a parameter group, captured by value, and the scalars that the kernels take.

Every scalar is computed in double and rounded once to the precision of the state, and only here.
"""

from __future__ import annotations

import ctypes
import functools
import math
import numbers
import operator
import reprlib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from decimal import MIN_EMIN, Context, Decimal
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from superadam.host.signals import THIS_THREAD
from superadam.kernels.memory import has_memory
from superadam.kernels.native import Flag

_SMALLEST_NORMAL_FLOAT32 = 2.0**-126
_PRODUCT_IN_BFLOAT16 = 2.0**-8  # relative error of a product that is rounded to bf16
_GOLDEN_TURN = 0x9E3779B9  # 2**32 over the golden ratio: its multiples are as evenly spread as can be
_NUMBERS = ("lr", "betas[0]", "betas[1]", "eps", "weight_decay")
_FLAGS = ("amsgrad", "maximize", "decoupled_weight_decay")
_others = operator.itemgetter("lr", "eps", "weight_decay", *_FLAGS)
_USUAL_TYPES = (*(float for _ in _NUMBERS), *(bool for _ in _FLAGS))


@dataclass(frozen=True, slots=True)
class Hyperparameters:
    """The arguments of `torch.optim.Adam` that its formula depends on; raises ValueError for values out of range."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    amsgrad: bool
    maximize: bool
    decoupled_weight_decay: bool
    lr_sign: float = 1.0  # by which 0.0 and -0.0 differ, which are equal

    def __post_init__(self) -> None:
        if not math.isfinite(self.lr):  # schedulers may go below 0
            raise ValueError(f"Invalid learning rate: {self.lr}; expected a finite number")
        for index, beta in enumerate((self.beta1, self.beta2)):
            if not 0.0 <= beta < 1.0:
                raise ValueError(f"Invalid beta parameter at index {index}: {beta}; expected 0 <= beta < 1")
        if not 0.0 <= self.eps < math.inf:
            raise ValueError(f"Invalid epsilon value: {self.eps}; expected a finite number of at least 0")
        if not 0.0 <= self.weight_decay < math.inf:
            raise ValueError(f"Invalid weight_decay value: {self.weight_decay}; expected a finite number of at least 0")

    @staticmethod
    def of_group(group: Mapping[str, Any]) -> Hyperparameters:
        """Return the present values of a parameter group, tensors read out; raises ValueError for an invalid one."""
        betas = group["betas"]
        if not isinstance(betas, tuple | list) or len(betas) != 2:
            raise ValueError(f"Invalid betas: {described(betas)}; expected a pair of numbers")
        lr, eps, weight_decay, *flags = _others(group)
        raw = (lr, *betas, eps, weight_decay, *flags)
        if tuple(map(type, raw)) == _USUAL_TYPES:
            return _hyperparameters(*raw, math.copysign(1.0, lr))
        parsed: list[Any] = [_number(*named) for named in zip(_NUMBERS, raw, strict=False)]
        return Hyperparameters(*parsed, *[*map(_flag, _FLAGS, flags), math.copysign(1.0, parsed[0])])


_hyperparameters = functools.lru_cache(maxsize=256)(Hyperparameters)


def number_of(value: object) -> float | None:
    """Return a real number, or that of a one-element tensor, as a float; None for anything else."""
    with THIS_THREAD.without_handlers, suppress(OverflowError, RuntimeError):  # beyond every double; on the meta device
        if isinstance(value, Tensor):
            is_number = value.numel() == 1 and not value.is_complex() and has_memory(value)
            return float(value.item()) if is_number else None
        if isinstance(value, numbers.Real):
            return float(value)
    return None


def described(value: object) -> str:
    """Return how errors show a value: dtype and shape of a tensor, else its text if that is short."""
    with THIS_THREAD.without_handlers, suppress(Exception):  # of nested tensors, or of numbers with thousands of digits
        if not isinstance(value, Tensor):
            text = reprlib.repr(value)
        elif value.numel() == 1 and value.is_cpu and has_memory(value):
            text = repr(value.detach())
        else:
            text = f"{value.dtype} of shape {reprlib.repr(tuple(value.shape))}"
        if len(text) < 80 and text.isprintable():
            return text
    return f"a {type(value).__name__}"


def _number(name: str, value: object) -> float:
    number = number_of(value)
    if number is None:
        must = f"Tensor {name} must be 1-element; " if isinstance(value, Tensor) and value.numel() != 1 else ""
        raise ValueError(f"Invalid {name}: {described(value)}; {must}expected a number or a one-element tensor")
    return number


def _flag(name: str, value: object) -> bool:
    if value is not None and not isinstance(value, int | np.bool_):
        raise ValueError(f"Invalid {name}: {described(value)}; expected True or False")
    return bool(value)


def turn_of(step: int) -> int:
    """Return by how much of 2**32 the thresholds of a step's roundings are turned."""
    return step * _GOLDEN_TURN % 2**32


_KEPT_POWERS = 256
_latest_powers: dict[float, tuple[int, Decimal, Decimal]] = {}  # of each beta: a step, the power, and beta itself
_DIGITS = Context(prec=80, Emin=MIN_EMIN, traps=[])


@functools.lru_cache(maxsize=4096)
def beta_power(beta: float, step: int) -> float:
    """Return `beta**step` correctly rounded to double; C libraries' pow differ in rare last bits.

    Of decimal numbers of so many digits, 2**53 products are so near to the true one that no midpoint of two doubles
    comes between. Where it is a midpoint of more digits itself, as 0.5**1075, which is below 2**-37, either may come.
    """
    before, power, base = _latest_powers.get(beta) or (0, Decimal(1), Decimal.from_float(beta))  # untrapped
    power = _DIGITS.multiply(power, base) if before == step - 1 else _DIGITS.power(base, step)
    if len(_latest_powers) >= _KEPT_POWERS:
        _latest_powers.clear()
    _latest_powers[beta] = step, power, base
    return float(power)


class Interval(NamedTuple):
    """Factors of a gradient from `low` to `high`, both included; fp32 numbers."""

    low: float
    high: float

    def covers(self, factor: float) -> bool:
        """Whether a fp32 factor lies in the interval."""
        return self.low <= factor <= self.high


class IntervalScalars(NamedTuple):
    """The scalars of the interval test, named as in `interval.h`; each is a fp32 number, and rounded up."""

    spread: float
    slope: float
    kappa: float
    least: float
    slack: float


class Scale(NamedTuple):
    """A factor on a gradient; `rounds`: whether torch would round the product to bf16 as it writes it back."""

    factor: float = 1.0
    rounds: bool = False

    @staticmethod
    def recorded(factor: float, dtype: torch.dtype) -> Scale:
        """Return the scale by which torch would have multiplied a gradient of this dtype."""
        return Scale(factor, dtype == torch.bfloat16 and factor != 1.0)


def _rounded(value: float, double: bool) -> float:
    """Return a number rounded to fp32, or with `double` as it is."""
    if double:
        return value
    if abs(value) < _SMALLEST_NORMAL_FLOAT32:
        # The processor's own conversion gives 0 while denormals are flushed (torch.set_flush_denormal).
        return math.copysign(math.ldexp(round(math.ldexp(value, 149)), -149), value)
    return ctypes.c_float(value).value


@functools.lru_cache(maxsize=256)
def _constants(hyper: Hyperparameters, is_scaled: bool, rounds: bool, double: bool) -> tuple[Flag, list[float]]:
    """Return the flags, and the scalars that are the same in all steps: decay, wd, w, b2, c2 and eps."""
    flags = Flag(0)
    if is_scaled:
        flags |= Flag.SCALE | (Flag.ROUND if rounds else Flag(0))
    if hyper.maximize:
        flags |= Flag.MAXIMIZE
    if hyper.weight_decay != 0.0:
        flags |= Flag.DECOUPLED if hyper.decoupled_weight_decay else Flag.L2
    if hyper.amsgrad:
        flags |= Flag.AMSGRAD
    scalars = (
        *(1.0 - hyper.lr * hyper.weight_decay, hyper.weight_decay),
        *(1.0 - hyper.beta1, hyper.beta2, 1.0 - hyper.beta2, hyper.eps),
    )
    return flags, [_rounded(value, double) for value in scalars]


@dataclass(slots=True)  # not frozen, which takes long to make
class Coefficients:
    """The scalars of one step of one group, named as in `adam_formula.h`, each rounded to the state's precision."""

    s: float
    decay: float
    wd: float
    w: float
    b2: float
    c2: float
    nss: float
    bc2s: float
    eps: float
    flags: Flag
    turn: int = 0  # of 2^32; counts only where state is stored in fewer bits
    interval: IntervalScalars | None = None  # None where only `s` is covered

    @staticmethod
    def at_step(
        hyper: Hyperparameters, step: int, scale: float = 1.0, *, rounds: bool = False, double: bool = False
    ) -> Coefficients:
        """Return the scalars of step `step`, counted from 1, rounded to fp32, or with `double` to fp64.

        `scale` and `rounds` are those of a `Scale`.
        """
        s = _rounded(scale, double)
        flags, (decay, wd, w, b2, c2, eps) = _constants(hyper, s != 1.0, rounds, double)
        nss = _rounded(-(hyper.lr / (1.0 - beta_power(hyper.beta1, step))), double)
        bc2s = _rounded(math.sqrt(1.0 - beta_power(hyper.beta2, step)), double)
        return Coefficients(s, decay, wd, w, b2, c2, nss, bc2s, eps, flags, turn_of(step))

    def over(self, interval: Interval) -> Coefficients | None:
        """Return these scalars with those of the interval test; None where its proof (docs/clipping.md) does not hold.

        It covers products with the gradient that are rounded to bf16, and those that are not.
        """
        low, high = interval
        # The other scalars are in range, as betas are at least 0 and below 1.
        if not (0.0 < low <= self.s <= high < math.inf and abs(self.nss) <= 2.0**10):
            return None
        rounded = high + (self.s if Flag.ROUND in self.flags else 0.0)  # the verdict's product, and the published one
        distance = max(high - self.s, self.s - low) + _PRODUCT_IN_BFLOAT16 * rounded
        slope, kappa = _rounded_up(abs(self.nss) * self.w), _rounded_up(math.sqrt(self.c2) / self.bc2s)
        scalars = IntervalScalars(
            spread=_rounded_up(max(distance, 2.0**-6 * high) * (1.0 + 2.0**-9)),
            slope=slope,
            kappa=kappa,
            least=_rounded_up(2.0**-40 / self.bc2s),
            slack=_rounded_up(2.0**-68 + (2.0**-18 * slope / kappa if Flag.L2 in self.flags else 0.0)),
        )
        return replace(self, interval=scalars)

    def row(self) -> tuple[float, ...]:
        """Return the values in the order of `superadam.kernels.native.COEFFICIENTS`."""
        formula = (self.s, self.decay, self.wd, self.w, self.b2, self.c2, self.nss, self.bc2s, self.eps)
        return (*formula, *(self.interval or [0.0] * len(IntervalScalars._fields)), self.turn, int(self.flags))


def _rounded_up(value: float) -> float:
    """Return a normal fp32 number above a number of at least 0: a denormal could be flushed to 0."""
    return max(float(np.nextafter(np.float32(value), np.float32(np.inf))), _SMALLEST_NORMAL_FLOAT32)
