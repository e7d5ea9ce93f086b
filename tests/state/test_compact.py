"""What is shown of state in fewer bits has the kernels' bits, and so has what is written to it."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import compact as oracle
from support.kernel_arrays import differing
from support.strategies import Magnitudes, random_array

from superadam.state import compact

ENCODINGS = {"exp_avg": compact.EXP_AVG, "exp_avg_sq": compact.EXP_AVG_SQ, "master": compact.MASTERS[torch.bfloat16]}
DTYPES = {"exp_avg": torch.bfloat16, "exp_avg_sq": torch.bfloat16, "master": torch.float32}
"""In which every value is exact."""
TURNS = st.integers(0, 2**32 - 1)
VALUES = st.tuples(TURNS, st.sampled_from(Magnitudes), st.sampled_from(["any", "positive", "zeros"]))


def values_of(drawn: tuple[int, Magnitudes, str], numel: int) -> torch.Tensor:
    seed, kind, signs = drawn
    values = random_array(np.random.default_rng(seed), numel, kind, np.float32)
    if signs == "positive":
        values = np.abs(values)
    elif signs == "zeros":
        values = np.copysign(np.float32(0), values)
    return torch.from_numpy(values)


def planes(encoding: compact.Encoding, numel: int) -> tuple[torch.Tensor, torch.Tensor]:
    first, second = encoding.dtypes
    return torch.zeros(numel, dtype=first), torch.zeros(numel // encoding.numel_per_second, dtype=second)


def expected_of(key: str, values: torch.Tensor, turn: int) -> tuple[np.ndarray, np.ndarray]:
    if key == "master":
        bits = oracle.rounded_24bit(values.numpy(), turn).view(np.uint32)
        return (bits >> 16).astype(np.uint16), (bits >> 8).astype(np.uint8)
    return oracle.encode_codes(values.numpy(), turn, oracle.MANTISSA[key], has_sign=key == "exp_avg")


@pytest.mark.parametrize("key", ENCODINGS)
@given(drawn=VALUES, blocks=st.integers(0, 3), turn=TURNS)
def test_encodes_and_decodes_as_the_kernels(key: str, drawn: Any, blocks: int, turn: int) -> None:
    encoding, values = ENCODINGS[key], values_of(drawn, 64 * blocks)
    first, second = planes(encoding, 64 * blocks)
    encoding.encode(values, first, second, turn)
    high, low = expected_of(key, values, turn)
    assert np.array_equal(first.numpy().view(high.dtype), high)
    assert np.array_equal(second.numpy(), low)
    decoded = encoding.decode(first, second)
    if key == "master":
        shown = oracle.rounded_24bit(values.numpy(), turn)
    else:
        shown = oracle.decode_codes(high, low, oracle.MANTISSA[key], has_sign=key == "exp_avg")
    assert differing(decoded.numpy(), shown) == 0
    assert differing(decoded.to(DTYPES[key]).float().numpy(), shown) == 0


@pytest.mark.parametrize("key", ENCODINGS)
@settings(max_examples=settings.default.max_examples // 4)
@given(drawn=VALUES, turn=TURNS)
def test_what_was_shown_is_stored_as_it_was(key: str, drawn: Any, turn: int) -> None:
    """Also where more than one part is converted."""
    encoding, values = ENCODINGS[key], values_of(drawn, compact._PART + 128)
    first, second = planes(encoding, len(values))
    encoding.encode(values, first, second, turn)
    shown = torch.empty(len(values), dtype=DTYPES[key])
    compact.decode(encoding, first, second, shown)
    assert not compact.encode(encoding, shown, first, second)


def test_what_is_written_to_a_master_is_rounded_to_nearest() -> None:
    values = torch.tensor([1.0, 1.0 + 2**-16, 1.0 + 2**-16 - 2**-20, -1.0 - 2**-16])
    first, second = planes(compact.MASTERS[torch.bfloat16], 4)
    assert compact.encode(compact.MASTERS[torch.bfloat16], values, first, second)
    assert compact.MASTERS[torch.bfloat16].decode(first, second).tolist() == [1.0, 1.0 + 2**-15, 1.0, -1.0 - 2**-15]


@pytest.mark.parametrize("dtype", compact.MASTERS, ids=str)
def test_a_master_to_nearest_keeps_its_rounding(dtype: torch.dtype) -> None:
    """Else the parameter would count where a master is loaded, and all of the master's further bits were lost."""
    bits = torch.arange(1 << 18, dtype=torch.int32) + torch.tensor(1.0).view(torch.int32)
    for values in (bits.view(torch.float32), -bits.view(torch.float32)):
        first, second = planes(compact.MASTERS[dtype], len(values))
        compact.encode(compact.MASTERS[dtype], values, first, second)
        stored = compact.Planes.decode(first, second)
        assert torch.equal(stored.to(dtype), values.to(dtype))
        assert (stored.view(torch.int32) - values.view(torch.int32)).abs().max() <= 256


def test_a_change_of_the_exponents_alone_is_a_change() -> None:
    """Twice the values have the same codes."""
    values, arrays = torch.rand(64) + 1, planes(compact.EXP_AVG, 64)
    assert compact.encode(compact.EXP_AVG, values, *arrays)
    codes = arrays[0].clone()
    assert compact.encode(compact.EXP_AVG, 2 * values, *arrays)
    assert arrays[0].equal(codes)
    assert not compact.encode(compact.EXP_AVG, 2 * values, *arrays)


def test_the_least_negative_number_has_no_square_root() -> None:
    values = torch.zeros(64)
    values[3] = -(2.0**-149)
    for number, is_nan in ((values, True), (-0.0 * values, False)):
        arrays = planes(compact.EXP_AVG_SQ, 64)
        compact.encode(compact.EXP_AVG_SQ, number, *arrays)
        assert bool(compact.EXP_AVG_SQ.decode(*arrays).isnan().all()) is is_nan
        first, exponents = oracle.encode_codes(number.numpy(), 0, oracle.MANTISSA["exp_avg_sq"], has_sign=False)
        assert is_nan == (exponents.max() == 255), first
