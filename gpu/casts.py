"""Loads, stores and casts of every dtype; rounding to 16 bits is written out so that every bit is defined here.

The same casts are in `cpu/isa/vec_scalar.h` and `tests/support/formula.py`. Halves are stored as uint16.
"""

from __future__ import annotations

from superadam.kernels.native import Dtype

from .language import constant, jit, tl

FLOAT32, BFLOAT16, FLOAT16, FLOAT64 = (
    constant(int(dtype)) for dtype in (Dtype.FLOAT32, Dtype.BFLOAT16, Dtype.FLOAT16, Dtype.FLOAT64)
)

VECTOR_BYTES = 16
"""What a thread loads at once where every address is a multiple of this."""


@jit()
def pointer(address, DTYPE: tl.constexpr, IS_ALIGNED: tl.constexpr):
    """Return addresses (int64) as pointers to elements; IS_ALIGNED promises multiples of VECTOR_BYTES."""
    if DTYPE == FLOAT64:
        result = address.to(tl.pointer_type(tl.float64))
    elif DTYPE == FLOAT32:
        result = address.to(tl.pointer_type(tl.float32))
    else:
        result = address.to(tl.pointer_type(tl.uint16))
    if IS_ALIGNED:
        if len(address.shape) == 2:
            result = tl.multiple_of(result, [16, 16])
        elif len(address.shape) == 1:
            result = tl.multiple_of(result, [16])
        else:
            result = tl.multiple_of(result, 16)
    return result


@jit()
def widen(stored, DTYPE: tl.constexpr):
    """Return stored elements as float32, or float64 as they are; exact."""
    if DTYPE == BFLOAT16:
        return (stored.to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    elif DTYPE == FLOAT16:
        return stored.to(tl.float16, bitcast=True).to(tl.float32)
    else:
        return stored


@jit()
def narrow(value, DTYPE: tl.constexpr):
    """Return float32 rounded to nearest even, as it is stored; NaN stays NaN. float32 and float64 stay as they are."""
    if DTYPE == BFLOAT16:
        # A bf16 is the upper half of a fp32, and magnitudes are ordered like their bits: add half, less one when even.
        # Not a cast: on some processors and in the interpreter casts are wrong for denormals.
        bits = value.to(tl.uint32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        return tl.where(value != value, (bits >> 16) | 0x40, rounded).to(tl.uint16)
    elif DTYPE == FLOAT16:
        return value.to(tl.float16).to(tl.uint16, bitcast=True)
    else:
        return value
