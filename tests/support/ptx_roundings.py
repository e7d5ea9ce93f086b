"""Roundings that no kernel may have, for faults that are planted: `support.ptx` knows them inside `known()` alone."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from contextlib import contextmanager
from fractions import Fraction
from typing import Any

import numpy as np
from support import ptx
from support.ptx import Array, rounded, typed


def directed(nearest: Array, excess: Array, mode: str, ftz: str | None, is_cancelled: Array | bool = False) -> Array:
    """Return the bits of what lies one step from the nearest result, by the sign of what is exact beyond that."""
    goal = nearest.dtype.type({"rn": 0, "rz": 0, "rm": -np.inf, "rp": np.inf}[mode])
    moves = {"rn": False, "rz": excess * np.sign(nearest) < 0, "rm": excess < 0, "rp": excess > 0}[mode]
    result = np.where(moves, np.nextafter(nearest, goal), nearest)
    result = np.where(np.equal(mode, "rm") & is_cancelled & (excess == 0) & (nearest == 0), -np.abs(result), result)
    return rounded(flushed(result, ftz), f"f{8 * nearest.itemsize}")


def flushed(value: Array, ftz: str | None) -> Array:
    is_small = (np.abs(value) < np.finfo(np.float32).tiny) & bool(ftz) & (value.dtype == np.float32)
    return np.where(is_small, np.copysign(value.dtype.type(0), value), value)


def arithmetic(name: str, mode: str, ftz: str | None, kind: str, *sources: Array) -> Array:
    """Return an operation; products of two fp32 are exact in fp64, as a sum with its error is. fp64 takes fractions."""
    a, *others = (flushed(typed(one, kind), ftz) for one in sources)
    excess: Any = _excess if kind == "f32" else _slow_excess
    if name in ("div", "sqrt"):
        nearest = a / others[0] if name == "div" else np.sqrt(a)
        by = (others or [nearest])[0]
        return directed(nearest, excess(-nearest, by, a, np.zeros_like(a)) * np.sign(by), mode, ftz)
    one, zero = np.ones_like(a), np.full_like(a, -0.0)
    b, c = {"mul": (others[0], zero), "sub": (one, -others[0]), "add": (one, others[0])}.get(name, others)
    is_cancelled = (np.signbit(a) != np.signbit(b)) != np.signbit(c)
    nearest = ptx.fma(a, b, c, kind)
    return directed(nearest, excess(a, b, c, nearest), mode, ftz, is_cancelled & (name != "mul"))


def _excess(a: Array, b: Array, c: Array, nearest: Array) -> Array:
    """Return something with the sign of a * b + c - nearest."""
    product = a.astype(np.float64) * b
    total = product + c
    error = (product - (total - (total - product))) + (c - (total - product))
    return np.where(total == nearest, error, total - nearest)


@functools.partial(np.frompyfunc, nin=4, nout=1)
def _exact(a: float, b: float, c: float, nearest: float) -> float:
    if not all(map(math.isfinite, (a, b, c))):
        return 0.0
    rest = Fraction(a) * Fraction(b) + Fraction(c) - (Fraction(nearest) if math.isfinite(nearest) else 0)
    return -nearest if math.isinf(nearest) else float((rest > 0) - (rest < 0))


def _slow_excess(*values: Array) -> Array:
    result: Array = _exact(*values).astype(np.float64)
    return result


def convert(mode: str, ftz: str | None, to: str, source: str, a: Array) -> Array:
    value = flushed(typed(a, source), ftz)
    nearest = value.astype(ptx.dtype_of(to))
    return directed(nearest, value.astype(np.float64) - nearest.astype(np.float64), mode, ftz)


@contextmanager
def known() -> Iterator[None]:
    """Let the executor know them, behind those that kernels may have."""
    before = [*ptx.OPERATIONS]
    ptx.operation(r"(add|sub|mul|div|sqrt|fma)\.(r[nzmp])(\.ftz)?\.(f32|f64)")(arithmetic)
    ptx.operation(r"cvt\.(r[nzmp])(\.ftz)?\.(f16|f32)\.(f32|f64)")(convert)
    yield
    ptx.OPERATIONS[:] = before
    ptx.find.cache_clear()
