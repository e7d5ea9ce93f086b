"""The rounding of `superadam.testing`, in torch, has the bits of the oracle in numpy and of what steps store."""

import numpy as np
import pytest
import torch
from support import compact
from support.formula import widen_bfloat16
from support.strategies import USUAL

from superadam.kernels.hyperparameters import Coefficients
from superadam.testing import round_by_thresholds, round_to_8_bits

STEPS = [1, 2, 63, 1000, 2**24 + 1, 2**31, 2**40 + 3]

SPECIAL = [0, 1, 0xFFFF, 0x7FFFFF, 0x7F7FFFFF, 0x7F800000, 0x7F800001, 0x7FC00000, 0x7FFFFFFF]


def patterns(numel: int) -> torch.Tensor:
    """Return fp32 values of random bits, among them denormals, infinities and every kind of NaN, of both signs."""
    bits = np.random.default_rng(numel).integers(0, 2**32, numel, dtype=np.uint32)
    special = np.array([one | sign for one in SPECIAL for sign in (0, 0x80000000)], np.uint32)
    bits[: len(special)] = special[:numel]
    return torch.from_numpy(bits.view(np.float32))


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("numel", [0, 1, 63, 64, 65, 1000])
def test_it_has_the_bits_of_the_oracle(numel, step):
    values = patterns(numel)
    before = values.clone()
    turn = Coefficients.at_step(USUAL, step).turn
    rounded = round_by_thresholds(values, step, 16).view(torch.int32)
    expected = widen_bfloat16(compact.encode_bfloat16(values.numpy(), turn))
    assert torch.equal(rounded, torch.from_numpy(expected).view(torch.int32))
    for first in (1, 40, 63, 64 + 7):  # of a shard
        assert torch.equal(round_by_thresholds(values[first:], step, 16, first).view(torch.int32), rounded[first:])
    of_24_bits = torch.from_numpy(compact.rounded_24bit(values.numpy(), turn))
    assert torch.equal(round_by_thresholds(values, step, 8).view(torch.int32), of_24_bits.view(torch.int32))
    assert torch.equal(values.view(torch.int32), before.view(torch.int32))


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("key", ["exp_avg", "exp_avg_sq"])
def test_8_bits_have_those_of_the_oracle(key, step):
    generator = torch.Generator().manual_seed(step)
    values = torch.randn(20 * 64, generator=generator) * 10.0 ** torch.randint(-9, 3, (20 * 64,), generator=generator)
    values = values.square() if key == "exp_avg_sq" else values
    values[:128] = patterns(128)
    turn, has_sign = Coefficients.at_step(USUAL, step).turn, key == "exp_avg"
    codes, exponents = compact.encode_codes(values.numpy(), turn, compact.MANTISSA[key], has_sign=has_sign)
    expected = compact.decode_codes(codes, exponents, compact.MANTISSA[key], has_sign=has_sign)
    rounded = round_to_8_bits(values, step, is_first=has_sign)
    assert torch.equal(rounded.view(torch.int32), torch.from_numpy(expected).view(torch.int32))


def test_values_are_rounded_up_as_often_as_they_are_above_what_is_stored():
    values = torch.full((64,), 1.0 + 0.3 * 2**-7)
    means = [round_by_thresholds(values, step, 16).double().mean().item() for step in range(1, 65)]
    assert set(round_by_thresholds(values, 1, 16).tolist()) == {1.0, 1.0 + 2**-7}
    # Each step spreads 64 thresholds evenly; over steps their fractions are evenly spread, too.
    assert all(abs(mean - values[0].item()) <= 2**-7 / 64 for mean in means)
    assert abs(np.mean(means) - values[0].item()) <= 2**-7 / 1000
