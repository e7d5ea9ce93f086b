"""State in fewer bits on the GPU: every code, and NaNs with payloads that arithmetic gives on some processors only."""

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from support import compact
from support.gpu_arrays import DEVICE, needs_triton

from superadam.gpu import casts
from superadam.gpu.language import jit, tl

Array = npt.NDArray[Any]

LENGTH = 4096  # elements of a program
MOMENTS = (("exp_avg", 3, True), ("exp_avg_sq", 4, False))

encode_8bit, decode_8bit = casts.encode_8bit, casts.decode_8bit
narrow_by_threshold, round_24bit = casts.narrow_by_threshold, casts.round_24bit
join_24bit, split_24bit, STATE_BLOCK = casts.join_24bit, casts.split_24bit, casts.STATE_BLOCK


@jit()
def encode_kernel(bits, turns, codes, exponents, mantissa: tl.constexpr, has_sign: tl.constexpr, length: tl.constexpr):
    index, block = tl.arange(0, length), tl.arange(0, length // STATE_BLOCK)
    begin = tl.program_id(0)
    value = tl.load(bits + begin * length + index).to(tl.float32, bitcast=True)
    turn = tl.load(turns).to(tl.uint32)
    code, exponent = encode_8bit(value, turn, index, mantissa, has_sign)
    tl.store(codes + begin * length + index, code)
    tl.store(exponents + begin * (length // STATE_BLOCK) + block, exponent)


@jit()
def decode_kernel(codes, exponents, bits, mantissa: tl.constexpr, has_sign: tl.constexpr, length: tl.constexpr):
    index, block = tl.arange(0, length), tl.arange(0, length // STATE_BLOCK)
    begin = tl.program_id(0)
    code = tl.load(codes + begin * length + index)
    exponent = tl.load(exponents + begin * (length // STATE_BLOCK) + block)
    value = decode_8bit(code, exponent, mantissa, has_sign)
    tl.store(bits + begin * length + index, value.to(tl.int32, bitcast=True))


@jit()
def halves_kernel(bits, turns, moments, high, low, joined, length: tl.constexpr):
    index = tl.program_id(0) * length + tl.arange(0, length)
    value = tl.load(bits + index).to(tl.float32, bitcast=True)
    turn = tl.load(turns).to(tl.uint32)
    tl.store(moments + index, narrow_by_threshold(value, turn, index).to(tl.int16, bitcast=True))
    upper, lower = split_24bit(round_24bit(value, turn, index))
    tl.store(high + index, upper.to(tl.int16, bitcast=True))
    tl.store(low + index, lower)
    tl.store(joined + index, join_24bit(upper, lower).to(tl.int32, bitcast=True))


def on_device(array: Array) -> torch.Tensor:
    return torch.from_numpy(array.copy()).to(DEVICE)


def extreme_bits(seed: int) -> Array:
    """Return blocks of float32, as bits: any, all NaN, around the bounds of exponents, and one of each in zeros."""
    rng = np.random.default_rng(seed)
    anything = rng.integers(0, 2**32, (16, 64))
    edges = (rng.integers(0, 257, (64, 1)) << 23) + rng.integers(-2, 3, (64, 64)) & 0x7FFFFFFF
    edges = edges >> rng.integers(0, 4, (64, 1)) | rng.integers(0, 2, edges.shape) << 31
    payloads = rng.choice([0, 1, 0xFF, 0xFFFF, 0x40, 0x3FFFFF, 0x400000, 0x7FFF00, 0x7FFF80, 0x7FFFFF], (16, 64))
    nans = 0x7F800000 + payloads + (rng.integers(0, 2, payloads.shape) << 31)  # and Inf
    zeros = rng.integers(0, 2, (64, 64)) << 31
    alone = zeros.copy()
    alone[np.arange(64), rng.integers(0, 64, 64)] = rng.choice(np.concatenate([anything, nans, edges]).ravel(), 64)
    positive = np.concatenate([anything, edges, alone]) & 0x7FFFFFFF
    blocks = rng.permutation(np.concatenate([anything, edges, nans, zeros[:2], alone, positive]))
    return np.concatenate([blocks.ravel(), np.zeros(-blocks.size % LENGTH, np.int64)]).astype(np.uint32)


TURNS = (0, 0xFFFFFFFF, 0x9E3779B9, 0x80000000, 1)


@needs_triton
@pytest.mark.parametrize("turn", TURNS)
@pytest.mark.parametrize(("name", "mantissa", "has_sign"), MOMENTS)
def test_moments_get_the_codes_of_the_cpu(name, mantissa, has_sign, turn):
    bits = extreme_bits(turn % 1000)
    codes = torch.zeros(len(bits), dtype=torch.uint8, device=DEVICE)
    exponents = torch.zeros(len(bits) // compact.BLOCK, dtype=torch.uint8, device=DEVICE)
    arguments = on_device(bits.view(np.int32)), on_device(np.array([turn])), codes, exponents
    with np.errstate(all="ignore"):
        encode_kernel[(len(bits) // LENGTH,)](*arguments, mantissa=mantissa, has_sign=has_sign, length=LENGTH)
    expected = compact.encode_codes(bits.view(np.float32), turn, mantissa, has_sign=has_sign)
    assert mantissa == compact.MANTISSA[name]
    np.testing.assert_array_equal(exponents.cpu().numpy(), expected[1])
    np.testing.assert_array_equal(codes.cpu().numpy(), expected[0])


@needs_triton
@pytest.mark.parametrize(("name", "mantissa", "has_sign"), MOMENTS)
def test_every_code_has_the_value_of_the_cpu(name, mantissa, has_sign):
    """With every exponent, also codes that no step writes."""
    codes = np.tile(np.arange(256, dtype=np.uint8), 256)
    exponents = np.repeat(np.arange(256, dtype=np.uint8), 256 // compact.BLOCK)
    bits = torch.zeros(len(codes), dtype=torch.int32, device=DEVICE)
    grid = (len(codes) // LENGTH,)
    decode_kernel[grid](
        on_device(codes), on_device(exponents), bits, mantissa=mantissa, has_sign=has_sign, length=LENGTH
    )
    expected = compact.decode_codes(codes, exponents, mantissa, has_sign=has_sign)
    np.testing.assert_array_equal(bits.cpu().numpy().view(np.uint32), expected.view(np.uint32))


@needs_triton
@pytest.mark.parametrize("turn", TURNS)
def test_halves_and_planes_are_those_of_the_cpu(turn):
    """A NaN of all ones, as NVIDIA's GPUs make it, stays NaN."""
    bits = extreme_bits(turn % 1000)
    moments, high = (torch.zeros(len(bits), dtype=torch.int16, device=DEVICE) for _ in range(2))
    low = torch.zeros(len(bits), dtype=torch.uint8, device=DEVICE)
    joined = torch.zeros(len(bits), dtype=torch.int32, device=DEVICE)
    arguments = on_device(bits.view(np.int32)), on_device(np.array([turn]))
    with np.errstate(all="ignore"):
        halves_kernel[(len(bits) // LENGTH,)](*arguments, moments, high, low, joined, length=LENGTH)
    values = bits.view(np.float32)
    assert np.isnan(values[bits == 0x7FFFFFFF]).any()
    stored = moments.cpu().numpy().view(np.uint16)
    np.testing.assert_array_equal(stored, compact.encode_bfloat16(values, turn))
    expected = compact.rounded_24bit(values, turn).view(np.uint32)
    planes = high.cpu().numpy().view(np.uint16).astype(np.uint32) << 16 | low.cpu().numpy().astype(np.uint32) << 8
    np.testing.assert_array_equal(planes, expected)
    np.testing.assert_array_equal(joined.cpu().numpy().view(np.uint32), expected)
