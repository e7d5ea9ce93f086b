"""Numpy reference of Adam's formula, the casts and the gradient norm; the kernels have to match its bits.

Every operation is correctly rounded in the precision of the arrays, fp32 or fp64; no kernel is called, and speed is of
no concern. `adam_formula` has the names and the order of its counterpart in `cpu/adam_formula.h`. The floating-point
control register of the calling thread must be as the process started: round to nearest, denormals kept.
"""

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from superadam.kernels.hyperparameters import Coefficients
from superadam.kernels.native import Dtype, Flag

Array = npt.NDArray[Any]
"""A float32 or float64 array or numpy scalar."""

CHUNK = 4096
"""Consecutive elements of a gradient whose squares are summed together."""

LANES = 16
"""Virtual lanes of a sum: lane i takes the elements i, i + 16, i + 32, ... of its chunk."""


def adam_formula(
    k: Coefficients, g: Array, m: Array, v: Array, vmax: Array, p: Array
) -> tuple[Array, Array, Array, Array]:
    """Return the new (p, m, v, vmax) after one step with the gradient `g`; without amsgrad `vmax` is returned as it is.

    Kingma & Ba, "Adam", arXiv 1412.6980, Algorithm 1; AMSGrad: Reddi et al., arXiv 1904.09237; decoupled decay:
    Loshchilov & Hutter, arXiv 1711.05101; the order of operations is that of torch.optim's fused CPU kernel. All arrays
    have the dtype and shape of `p`; for fp64 arrays `k` holds fp64 scalars.
    """
    return _formula(k, g, m, v, vmax, p)[:4]


def _formula(
    k: Coefficients, g: Array, m: Array, v: Array, vmax: Array, p: Array
) -> tuple[Array, Array, Array, Array, Array, Array]:
    """Return what `adam_formula` does, the denominator and the update."""
    real = p.dtype.type
    s, decay, wd, w, b2, c2, nss, bc2s, eps = map(real, (k.s, k.decay, k.wd, k.w, k.b2, k.c2, k.nss, k.bc2s, k.eps))
    with np.errstate(all="ignore"):
        if Flag.SCALE in k.flags:
            g = g * s
            if Flag.ROUND in k.flags and real is np.float32:
                g = widen_bfloat16(narrow_bfloat16(g))
        if Flag.MAXIMIZE in k.flags:
            g = -g
        if Flag.DECOUPLED in k.flags:
            p = p * decay
        if Flag.L2 in k.flags:
            g = fma(p, wd, g)

        difference = g - m
        m = fma(w, difference, m) if w < 0.5 else fma(w - real(1), difference, g)
        v = fma(c2 * g, g, v * b2)

        second = v
        if Flag.AMSGRAD in k.flags:
            second = vmax = larger_or_nan(vmax, v)
        d = np.sqrt(second) / bc2s + eps
        q = (nss * m) / d
        return p + q, m, v, vmax, d, q


def is_certain(
    k: Coefficients,
    dtype: Dtype,
    g: Array,
    m: Array,
    v: Array,
    vmax: Array,
    p: Array,
    *,
    moved: Callable[[Array], Array] | None = None,
) -> Array:
    """Return which new values, rounded to `dtype`, bf16 or fp16, the interval test of `cpu/interval.h` calls certain.

    All arrays are fp32; `k` has the scalars of the interval. For masters of 24 bits, `moved` adds the thresholds to new
    values.
    """
    assert k.interval is not None
    spread, slope, kappa, least, slack = map(_single, k.interval)
    new, _, _, _, d, q = _formula(k, g, m, v, vmax, p)
    with np.errstate(all="ignore"):
        a, aq = np.abs(new if moved is None else moved(new)), np.abs(q)
        room = _room(a, dtype, is_cut=moved is not None)
        roundings = fma(a, _single(2**-22), fma(aq, _single(2**-19), slack))
        t = np.abs(g) * spread
        d_low = fma(-kappa, t, d)
        change = t * fma(kappa, aq, slope)
        return (
            (change < (room - roundings) * d_low)
            & (least < d_low)
            & (a + d < _single(2**50))
            & (v > _single(-(2**-149)))
        )


def _single(value: float) -> Array:
    return np.array(value, np.float32)


def _room(a: Array, dtype: Dtype, *, is_cut: bool) -> Array:
    """Return how far magnitudes may move, at least, and still round alike."""
    kept, half, share = (0xFFFF0000, 0x8000, 63) if dtype is Dtype.BFLOAT16 else (0xFFFFE000, 0x1000, 7)
    cell = a.view(np.uint32) & np.uint32(kept)
    middle, above = ((cell | np.uint32(low)).view(np.float32) for low in (half, half | 0x200))
    room = larger_or_nan(middle - a, a - above) if is_cut else np.abs(a - middle)
    room = smaller(a * _single(share * 2**-15), room)
    return room if dtype is Dtype.BFLOAT16 else smaller(a - _single(2**-14), room)


def smaller(a: Array, b: Array) -> Array:
    return np.where(a < b, a, b)


def larger_or_nan(a: Array, b: Array) -> Array:
    """Return b where it is larger or NaN, else a: NaN wins from either side, and of two equal zeros the first stays."""
    return np.where((a < b) | np.isnan(b), b, a)


def fma(a: Array, b: Array, c: Array) -> Array:
    """Return a * b + c, rounded once, for operands that are all float32 or all float64 (then by the C library)."""
    with np.errstate(all="ignore"):
        is_double = np.result_type(a, b, c) == np.float64
        return np.asarray(np.frompyfunc(_libm.fma, 3, 1)(a, b, c), np.float64) if is_double else _fma_float32(a, b, c)


def _fma_float32(a: Array, b: Array, c: Array) -> Array:
    """Round the exact a * b + c to odd in double, then to nearest in fp32.

    The product of two fp32 numbers is exact in double. Rounding to odd records in the last bit whether anything was cut
    off, and 53 bits are more than 24 + 2, so the second rounding recognizes every tie (Boldo & Melquiond, "Emulation of
    FMA and correctly rounded sums: proved algorithms using rounding to odd", 2008).
    """
    product, addend = np.broadcast_arrays(np.float64(a) * np.float64(b), np.float64(c))
    total = product + addend
    # Knuth's TwoSum: total + error is exactly product + addend (nothing here comes near the ends of double's range).
    from_addend = total - product
    error = (product - (total - from_addend)) + (addend - from_addend)
    bits = total.view(np.int64)
    is_cut = np.isfinite(total) & (error != 0) & (bits % 2 == 0)
    outwards = (error > 0) == (total > 0)
    odd = bits + np.where(is_cut, np.where(outwards, 1, -1), 0)
    return odd.view(np.float64).astype(np.float32)


_libm = ctypes.CDLL("libm.so.6")
_libm.fma.restype, _libm.fma.argtypes = ctypes.c_double, [ctypes.c_double] * 3


# -- casts of the working copy: bf16 and fp16 as uint16 bit patterns -------------------------------------------------


def narrow_bfloat16(values: Array) -> Array:
    """Return float32 rounded to the nearest bf16, ties to even, as uint16; NaN stays NaN, overflow becomes Inf."""
    bits = np.asarray(values, dtype=np.float32).view(np.uint32).astype(np.uint64)
    # A bf16 is the upper half of a fp32, and magnitudes are ordered like their bits: add half, less one when even.
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    return np.where(np.isnan(values), bits >> 16 | 0x40, rounded).astype(np.uint16)


def widen_bfloat16(halves: Array) -> Array:
    """Return the float32 values of bf16 bit patterns (uint16); exact."""
    return (np.asarray(halves, dtype=np.uint16).astype(np.uint32) << 16).view(np.float32)


def narrow_float16(values: Array) -> Array:
    """Return float32 rounded to the nearest fp16, ties to even, as uint16; NaN stays NaN, overflow becomes Inf."""
    with np.errstate(all="ignore"):
        return np.asarray(values, dtype=np.float32).astype(np.float16).view(np.uint16)


def widen_float16(halves: Array) -> Array:
    """Return the float32 values of fp16 bit patterns (uint16); exact."""
    with np.errstate(all="ignore"):
        return np.asarray(halves, dtype=np.uint16).view(np.float16).astype(np.float32)


# -- the norm ---------------------------------------------------------------------------------------------------------


def chunk_sums(gradient: Array) -> npt.NDArray[np.float64]:
    """Return the sum of squares of each chunk of a 1-D gradient, float32 or float64, in fp64.

    Every lane adds its squares one after another by fma (for fp32 the square is exact anyway); then the lanes are added
    pairwise: lane i and i + 8, then i and i + 4, i and i + 2, and the last two.
    """
    chunks = -(-len(gradient) // CHUNK)
    padded = np.zeros(chunks * CHUNK, dtype=np.float64)
    rows = padded.reshape(chunks, CHUNK // LANES, LANES)
    lanes = np.zeros((chunks, LANES))
    with np.errstate(all="ignore"):
        padded[: len(gradient)] = gradient
        for row in range(CHUNK // LANES):
            g = rows[:, row, :]
            lanes = fma(g, g, lanes) if gradient.dtype == np.float64 else lanes + g * g
        for width in (8, 4, 2, 1):
            lanes = lanes[:, :width] + lanes[:, width : 2 * width]
    return lanes[:, 0]


def chunk_nonfinite(gradient: Array) -> npt.NDArray[np.int64]:
    starts = range(0, len(gradient), CHUNK)
    return np.array([np.count_nonzero(~np.isfinite(gradient[i : i + CHUNK])) for i in starts], dtype=np.int64)


def ordered_sum(values: npt.NDArray[np.float64]) -> float:
    """Return `values[0] + values[1] + ...`, added in this order (`sum` of Python 3.12 compensates; this must not)."""
    total = 0.0
    for value in values.tolist():
        total += value
    return total
