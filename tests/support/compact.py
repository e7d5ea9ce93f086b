"""Numpy reference of the formats in which state takes fewer bits; the kernels have to match its bits (`cpu/compact.h`).

Arrays are flat. A *turn* is that of a step (`Coefficients.turn`); positions count elements from the beginning of a
parameter, modulo 64, and `first` is that of the first element of a segment.
"""

from typing import Any

import numpy as np
import numpy.typing as npt
from support.formula import narrow_bfloat16, widen_bfloat16

from superadam.kernels.native import Format

Array = npt.NDArray[Any]
State = dict[str, Array]
"""The arrays of a segment that hold its state, by their names there."""

BLOCK = 64
MOMENTS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
MANTISSA = {"exp_avg": 3, "exp_avg_sq": 4}
"""Bits of fraction of 8-bit moments; those of the first one have a sign."""

PHASES = np.array([int(f"{position:06b}"[::-1], 2) << 26 for position in range(BLOCK)], np.uint32)
"""Of each position in a block, a multiple of 1/64 of a full turn of 2^32; neighbours are far apart."""


def thresholds(positions: Array, turn: int, cut: int) -> npt.NDArray[np.uint64]:
    """Return the numbers of `cut` bits that are added to magnitudes before as many bits are cut off."""
    turned = PHASES[positions % BLOCK].astype(np.uint64) + np.uint64(turn) & np.uint64(0xFFFFFFFF)
    return turned >> np.uint64(32 - cut)


def bits_of(values: Array) -> npt.NDArray[np.uint64]:
    return np.asarray(values, np.float32).view(np.uint32).astype(np.uint64)


def encode_bfloat16(values: Array, turn: int, first: int = 0) -> Array:
    """Return float32 as bf16 bit patterns (uint16), rounded by thresholds; NaN stays NaN."""
    bits = bits_of(values)
    rounded = bits + thresholds(np.arange(len(bits)) + first, turn, 16) >> np.uint64(16)
    return np.where(np.isnan(values), bits >> np.uint64(16) | np.uint64(0x40), rounded).astype(np.uint16)


def encode_codes(values: Array, turn: int, mantissa: int, *, has_sign: bool, first: int = 0) -> tuple[Array, Array]:
    """Return float32 as 8-bit codes, and the exponent of each block of 64; a block with Inf or NaN becomes all NaN.

    A code is a float's exponent and `mantissa` bits of fraction, counted down from the largest that there can be with
    the block's exponent; 0 is zero. Without a sign, what is not zero gets at least code 1; negative numbers are NaN.
    """
    bits = bits_of(values)
    magnitudes = bits & np.uint64(0x7FFFFFFF)
    if not has_sign:
        magnitudes[bits > np.uint64(0x80000000)] = 0x7FC00000
    cut = 23 - mantissa
    rounded = (magnitudes + thresholds(np.arange(len(bits)) + first, turn, cut) >> np.uint64(cut)).astype(np.int64)
    blocks = rounded.reshape(-1, BLOCK)
    exponents = np.minimum(blocks.max(axis=1) >> mantissa, 255)
    codes = np.maximum(blocks - _base(exponents, mantissa, has_sign), 0 if has_sign else 1)
    codes = np.where(blocks == 0, 0, codes)
    if has_sign:
        codes |= (bits >> np.uint64(31)).astype(np.int64).reshape(-1, BLOCK) << 7
    codes[exponents == 255] = 0
    return codes.reshape(-1).astype(np.uint8), exponents.astype(np.uint8)


def decode_codes(codes: Array, exponents: Array, mantissa: int, *, has_sign: bool) -> Array:
    """Return the float32 values of 8-bit codes; each is also a bf16 number."""
    blocks = codes.astype(np.int64).reshape(-1, BLOCK)
    magnitudes = blocks & 127 if has_sign else blocks
    signs = (blocks >> 7 if has_sign else blocks * 0) << 31
    values = np.maximum(magnitudes + _base(exponents.astype(np.int64), mantissa, has_sign), 1) << (23 - mantissa)
    bits = np.where(magnitudes == 0, 0, values) | signs
    bits[exponents == 255] = 0x7FC00000
    return bits.reshape(-1).astype(np.uint32).view(np.float32)


def _base(exponents: Array, mantissa: int, has_sign: bool) -> Array:
    return ((exponents + 1 << mantissa) - 1 - (127 if has_sign else 255))[:, None]


def moved_24bit(values: Array, turn: int, positions: Array | None = None) -> Array:
    """Return float32 plus their thresholds, of which a master of 24 bits keeps the upper 24; NaN stays NaN."""
    bits = bits_of(values)
    positions = np.arange(len(bits)) if positions is None else positions
    moved = np.where(np.isnan(values), bits | np.uint64(0x400000), bits + thresholds(positions, turn, 8))
    return moved.astype(np.uint32).view(np.float32)


def rounded_24bit(values: Array, turn: int, positions: Array | None = None) -> Array:
    """Return float32 rounded by thresholds to what a master of 24 bits holds."""
    return (moved_24bit(values, turn, positions).view(np.uint32) & np.uint32(0xFFFFFF00)).view(np.float32)


def encode(values: State, turn: int, form: Format, first: int = 0) -> State:
    """Return a segment's arrays that store these float32 values: master, moments, perhaps a `max_exp_avg_sq`."""
    stored = dict(values)
    for name in MOMENTS:
        if name not in values:
            continue
        if Format.MOMENTS_BFLOAT16 in form:
            is_max = name == "max_exp_avg_sq"
            stored[name] = narrow_bfloat16(values[name]) if is_max else encode_bfloat16(values[name], turn, first)
        elif Format.MOMENTS_8BIT in form:
            codes = encode_codes(values[name], turn, MANTISSA[name], has_sign=name == "exp_avg", first=first)
            stored[name], stored[f"{name}_exponents"] = codes
    if Format.MASTER_24BIT in form:
        positions = np.arange(len(values["master"])) + first
        bits = rounded_24bit(values["master"], turn, positions).view(np.uint32)
        stored["master"], stored["master_low"] = (bits >> 16).astype(np.uint16), (bits >> 8).astype(np.uint8)
    return stored


def decode(stored: State, form: Format) -> State:
    values = {name: stored[name] for name in ("master", *MOMENTS) if name in stored}
    for name in MOMENTS:
        if name in values and Format.MOMENTS_BFLOAT16 in form:
            values[name] = widen_bfloat16(stored[name])
        elif name in values and Format.MOMENTS_8BIT in form:
            exponents = stored[f"{name}_exponents"]
            values[name] = decode_codes(stored[name], exponents, MANTISSA[name], has_sign=name == "exp_avg")
    if Format.MASTER_24BIT in form:
        bits = stored["master"].astype(np.uint32) << 16 | stored["master_low"].astype(np.uint32) << 8
        values["master"] = bits.view(np.float32)
    return values
