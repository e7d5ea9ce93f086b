"""Loads, stores and casts of every dtype; rounding to 16 bits is written out so that every bit is defined here.

The same casts are in `cpu/isa/vec_scalar.h` and `tests/support/formula.py`. Halves are stored as uint16.
"""

from __future__ import annotations

from superadam.kernels.native import BLOCK, Dtype

from .language import constant, jit, tl

FLOAT32, BFLOAT16, FLOAT16, FLOAT64 = (
    constant(int(dtype)) for dtype in (Dtype.FLOAT32, Dtype.BFLOAT16, Dtype.FLOAT16, Dtype.FLOAT64)
)

BYTES = constant(-1)
"""Of `pointer`: elements are uint8, as they are in parts of state that is stored in fewer bits."""

STATE_BLOCK = constant(BLOCK)
"""Elements of 8-bit moments that share an exponent; thresholds repeat after as many (`cpu/compact.h`)."""

VECTOR_BYTES = 16
"""What a thread loads at once where every address is a multiple of this."""


@jit()
def pointer(address, DTYPE: tl.constexpr, IS_ALIGNED: tl.constexpr):
    """Return one address (int64), or a row of them, as pointers to elements; IS_ALIGNED promises whole vectors."""
    if DTYPE == FLOAT64:
        result = address.to(tl.pointer_type(tl.float64))
    elif DTYPE == FLOAT32:
        result = address.to(tl.pointer_type(tl.float32))
    elif DTYPE == BYTES:
        result = address.to(tl.pointer_type(tl.uint8))
    else:
        result = address.to(tl.pointer_type(tl.uint16))
    if IS_ALIGNED:
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
def thresholds(turn, position, CUT: tl.constexpr):
    """Return what is added to magnitudes before CUT bits are cut off: that of a step's turn (`cpu/compact.h`)."""
    j = position.to(tl.uint32)
    even = (j & 1) << 31 | (j & 4) << 27 | (j & 16) << 23
    phase = even | (j & 2) << 29 | (j & 8) << 25 | (j & 32) << 21  # the six bits in reverse
    return (turn + phase) >> (32 - CUT)


@jit()
def narrow_by_threshold(value, turn, position):
    """Return float32 as bf16, rounded by thresholds; NaN stays NaN."""
    more = thresholds(turn, position, 16)
    bits = value.to(tl.uint32, bitcast=True)
    return tl.where(value != value, (bits >> 16) | 0x40, (bits + more) >> 16).to(tl.uint16)


@jit()
def round_24bit(value, turn, position):
    """Return float32 rounded by thresholds to its upper 24 bits; NaN stays NaN."""
    bits = value.to(tl.uint32, bitcast=True)
    moved = tl.where(value != value, bits | 0x400000, bits + thresholds(turn, position, 8))
    return (moved & 0xFFFFFF00).to(tl.float32, bitcast=True)


@jit()
def join_24bit(high, low):
    """Return the float32 of its upper 16 bits and the next 8."""
    return (high.to(tl.uint32) << 16 | low.to(tl.uint32) << 8).to(tl.float32, bitcast=True)


@jit()
def split_24bit(value):
    """Return the upper 16 bits of float32, and the next 8."""
    bits = value.to(tl.uint32, bitcast=True)
    return (bits >> 16).to(tl.uint16), (bits >> 8 & 0xFF).to(tl.uint8)


@jit()
def blocks_of(values):
    """Return a row for each block of state."""
    return tl.reshape(values, (values.shape[0] // STATE_BLOCK, STATE_BLOCK))


@jit()
def code_base(exponents, MANTISSA: tl.constexpr, HAS_SIGN: tl.constexpr):
    """Return what the codes of each block count from, as int32 in one column."""
    return (((exponents + 1) << MANTISSA) - (128 if HAS_SIGN else 256))[:, None]


@jit()
def decode_8bit(codes, exponents, MANTISSA: tl.constexpr, HAS_SIGN: tl.constexpr):
    """Return the float32 of 8-bit codes, of which each block has one exponent (`cpu/compact.h`)."""
    code, exponent = blocks_of(codes.to(tl.int32)), exponents.to(tl.int32)
    magnitude = code & 127 if HAS_SIGN else code
    bits = tl.maximum(magnitude + code_base(exponent, MANTISSA, HAS_SIGN), 1) << (23 - MANTISSA)
    bits = tl.where(magnitude != 0, bits, 0)
    if HAS_SIGN:
        bits |= (code & 128) << 24
    bits = tl.where((exponent == 255)[:, None], 0x7FC00000, bits)
    return tl.reshape(bits, codes.shape).to(tl.float32, bitcast=True)


@jit()
def encode_8bit(value, turn, position, MANTISSA: tl.constexpr, HAS_SIGN: tl.constexpr):
    """Return float32 as 8-bit codes, rounded by thresholds, and the exponent of each block; both are uint8.

    Inf and NaN make their block NaN; without a sign so do negative numbers.
    """
    bits = value.to(tl.uint32, bitcast=True)
    # Some compilers make the mask an absolute value, which may give NaN any sign.
    magnitude = tl.where(value != value, 0x7FC00000, bits & 0x7FFFFFFF)
    if not HAS_SIGN:
        magnitude = tl.where(bits > 0x80000000, 0x7FC00000, magnitude)
    cut: tl.constexpr = 23 - MANTISSA
    rounded = blocks_of(((magnitude + thresholds(turn, position, cut)) >> cut).to(tl.int32))
    exponent = tl.minimum(tl.max(rounded, 1) >> MANTISSA, 255)
    code = tl.maximum(rounded - code_base(exponent, MANTISSA, HAS_SIGN), 0 if HAS_SIGN else 1)
    code = tl.where(rounded != 0, code, 0)
    if HAS_SIGN:
        code |= blocks_of((bits >> 24 & 128).to(tl.int32))
    code = tl.where((exponent == 255)[:, None], 0, code)
    return tl.reshape(code, value.shape).to(tl.uint8), exponent.to(tl.uint8)


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
