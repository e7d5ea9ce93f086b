"""Converts compact state to fp32 and back in torch, with the kernels' bits.

The formats are those of `cpu/compact.h`. Positions are those of elements in memory; blocks have 64 of them. Whole
arrays are converted a part at a time, so that what is in between stays small.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from superadam.kernels import native

BLOCK = native.BLOCK
"""Elements that share an exponent in 8-bit moments, and after which the phases of thresholds begin again."""

NEAREST = None
"""In the place of a step's turn: round to nearest, ties away from zero."""

_PART = 1 << 18  # elements that are converted at a time, a multiple of BLOCK
_PHASES = torch.tensor([int(f"{position:06b}"[::-1], 2) << 26 for position in range(BLOCK)], device="cpu")
_MAGNITUDE = 0x7FFFFFFF
_NAN = 0x7FC00000


def thresholds(numel: int, turn: int | None, cut: int) -> Tensor:
    """Return the numbers of `cut` bits that are added to as many magnitudes before these bits are cut off; int32."""
    if turn is NEAREST:
        return torch.full((numel,), 1 << (cut - 1), dtype=torch.int32, device="cpu")
    block = (_PHASES + turn & 0xFFFFFFFF) >> (32 - cut)
    return block.int().repeat(-(-numel // BLOCK))[:numel]


@dataclass(frozen=True)
class Codes:
    """Moments in 8 bits: an exponent for each block, and for each element how far it lies below the block's largest.

    Attributes:
        mantissa: bits of fraction of a code.
        has_sign: whether the uppermost bit of a code is a sign; without one, negative numbers become NaN.
    """

    mantissa: int
    has_sign: bool
    dtypes = (torch.uint8, torch.uint8)
    numel_per_second = BLOCK  # elements for each entry of the second array

    def encode(self, values: Tensor, codes: Tensor, exponents: Tensor, turn: int | None) -> None:
        """Write flat fp32 values into two flat arrays; a block with Inf or NaN becomes all NaN."""
        cut, bits = 23 - self.mantissa, values.view(torch.int32)
        magnitudes = bits & _MAGNITUDE
        is_nan = values.isnan() if self.has_sign else values.isnan() | ((bits < 0) & (magnitudes > 0))
        magnitudes = torch.where(is_nan, _NAN, magnitudes)
        rounded = (magnitudes + thresholds(len(bits), turn, cut) >> cut).view(len(bits) // BLOCK, BLOCK)
        largest = (rounded.amax(1) >> self.mantissa).clamp(max=255)
        least = 0 if self.has_sign else 1
        found = torch.where(rounded == 0, 0, (rounded - self._before_least(largest)).clamp(min=least))
        if self.has_sign:
            found |= (bits.view(found.shape) >> 31 & 1) << 7
        codes.copy_(torch.where((largest == 255)[:, None], 0, found).view(-1))
        exponents.copy_(largest)

    def decode(self, codes: Tensor, exponents: Tensor) -> Tensor:
        """Return the fp32 values of two flat arrays."""
        blocks, shared = codes.int().view(len(exponents), BLOCK), exponents.int()
        magnitudes = blocks & 127 if self.has_sign else blocks
        bits = (magnitudes + self._before_least(shared)).clamp(min=1) << (23 - self.mantissa)
        bits = torch.where(magnitudes == 0, 0, bits)
        if self.has_sign:
            bits |= blocks >> 7 << 31
        return torch.where((shared == 255)[:, None], _NAN, bits).view(torch.float32).view(-1)

    def _before_least(self, exponents: Tensor) -> Tensor:
        return ((exponents + 1 << self.mantissa) - 1 - (127 if self.has_sign else 255))[:, None]


@dataclass(frozen=True)
class Planes:
    """Masters of 24 bits: the upper 16 in one array, the next 8 in another.

    Attributes:
        copy_dtype: of the working copy. A master that is rounded to nearest keeps its rounding to this dtype.
    """

    copy_dtype: torch.dtype
    dtypes = (torch.int16, torch.uint8)
    numel_per_second = 1

    def encode(self, values: Tensor, high: Tensor, low: Tensor, turn: int | None) -> None:
        """Write flat fp32 values into two flat arrays; NaN stays NaN."""
        bits = values.view(torch.int32)
        rounded = torch.where(values.isnan(), bits | 0x400000, bits + thresholds(len(bits), turn, 8)) & -256
        if turn is NEAREST:  # which may lie in the middle of two numbers of that dtype, between which `values` do not
            copies = values.to(self.copy_dtype), rounded.view(torch.float32).to(self.copy_dtype)
            is_moved = (copies[0] != copies[1]) & ~values.isnan()
            rounded = torch.where(is_moved, torch.where(rounded > bits, rounded - 256, rounded + 256), rounded)
        high.copy_(rounded >> 16)
        low.copy_(rounded >> 8 & 255)

    @staticmethod
    def decode(high: Tensor, low: Tensor) -> Tensor:
        """Return the fp32 values of two arrays of one shape."""
        return (high.int() << 16 | low.int() << 8).view(torch.float32)


EXP_AVG, EXP_AVG_SQ = Codes(3, has_sign=True), Codes(4, has_sign=False)
MASTERS = {dtype: Planes(dtype) for dtype in (torch.bfloat16, torch.float16)}  # by the dtype of the working copy

Encoding = Codes | Planes


@torch.no_grad()
def encode(encoding: Encoding, values: Tensor, first: Tensor, second: Tensor) -> bool:
    """Write flat values of any float dtype, rounded to nearest, into two flat arrays; return whether a bit changed."""
    is_changed = False
    for begin in range(0, len(values), _PART):
        stored = _parts(encoding, first, second, begin)
        new = torch.empty_like(stored[0]), torch.empty_like(stored[1])
        encoding.encode(values[begin : begin + _PART].float(), *new, NEAREST)
        if not all(map(torch.equal, new, stored)):
            is_changed = True
            stored[0].copy_(new[0])
            stored[1].copy_(new[1])
    return is_changed


@torch.no_grad()
def decode(encoding: Encoding, first: Tensor, second: Tensor, values: Tensor) -> None:
    """Write what two flat arrays hold into flat `values`, which are of a float dtype."""
    for begin in range(0, len(values), _PART):
        values[begin : begin + _PART] = encoding.decode(*_parts(encoding, first, second, begin))


def _parts(encoding: Encoding, first: Tensor, second: Tensor, begin: int) -> tuple[Tensor, Tensor]:
    step = encoding.numel_per_second
    return first[begin : begin + _PART], second[begin // step : (begin + _PART) // step]
