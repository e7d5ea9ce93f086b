"""`superadam.cli.train.text`: which bytes are learnt, which are held out, and how windows are drawn."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from superadam.cli.train.text import HELD_OUT_SHARE, Text
from superadam.cli.usage import UsageError


@pytest.mark.slow
def test_standard_library_is_megabytes_of_python_and_always_the_same() -> None:
    first, second = Text.read(None, 128), Text.read(None, 128)
    assert first.sha256 == second.sha256
    assert len(first.training) > 2_000_000
    content = bytes(first.training.numpy()) + bytes(first.held_out.numpy())
    assert b"class OrderedDict(dict):" in content  # collections
    assert b"class TextTestRunner" in content  # unittest is a part of the library, its tests are not
    assert b"class Test_TestCase" not in content


@given(content=st.binary(min_size=400, max_size=2000), seq=st.integers(1, 20), seed=st.integers(0, 2**32))
def test_windows_come_from_their_own_part(content: bytes, seq: int, seed: int) -> None:
    text = Text.of_bytes("bytes", content, seq)
    training, held_out = bytes(text.training.numpy()), bytes(text.held_out.numpy())
    assert training + held_out == content
    for window in text.draw(5, seq, torch.Generator().manual_seed(seed)):
        assert len(window) == seq + 1
        assert bytes(window.tolist()) in training
    for window in text.held_out_windows(5, seq):
        assert bytes(window.tolist()) in held_out


def test_draws_reach_the_first_and_the_last_byte() -> None:
    text = Text.of_bytes("bytes", bytes(range(64)), 3)
    drawn = text.draw(2000, 3, torch.Generator().manual_seed(0))
    assert {int(drawn.min()), int(drawn.max())} == {0, len(text.training) - 1}


@given(seq=st.integers(1, 300))
def test_shortest_text_is_taken_and_a_shorter_one_refused(seq: int) -> None:
    shortest = (seq + 1) * HELD_OUT_SHARE
    text = Text.of_bytes("bytes", bytes(shortest), seq)
    assert text.draw(2, seq, torch.Generator()).shape == text.held_out_windows(2, seq).shape == (2, seq + 1)
    with pytest.raises(UsageError, match=f"{shortest - 1} bytes; expected at least {shortest}"):
        Text.of_bytes("bytes", bytes(shortest - 1), seq)


@pytest.mark.parametrize("name", ["missing.txt", "."])
def test_unreadable_file_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--text"):
        Text.read(str(tmp_path / name), 16)
