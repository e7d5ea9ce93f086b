"""`superadam.cli.train.presets`: parameters are counted as the model has them, and as the models they resemble do."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.training_runs import TINY_SHAPE

from superadam.cli.train.llama import Decoder
from superadam.cli.train.presets import PRESETS, Shape

PUBLISHED = {"Llama-3.2-1B": 1_235_814_400, "Qwen3-4B": 4_022_468_096, "Llama-3.1-8B": 8_030_261_248}
"""Parameters, without biases, as the published checkpoints hold them; a tied output matrix counts once."""


def parameters_of(shape: Shape) -> int:
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in Decoder(shape).parameters())


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_what_they_are_called(name: str) -> None:
    preset = PRESETS[name]
    assert preset.shape.name == str(preset.shape) == name
    assert preset.shape.parameters == parameters_of(preset.shape)
    nominal = float(name[:-1]) * {"m": 1e6, "b": 1e9}[name[-1]]
    assert preset.shape.parameters == pytest.approx(nominal, rel=0.25)  # names are round numbers
    if preset.resembles in PUBLISHED:
        assert preset.shape.parameters == PUBLISHED[preset.resembles]


def test_presets_grow() -> None:
    sizes = [preset.shape.parameters for preset in PRESETS.values()]
    assert sizes == sorted(sizes)
    assert {preset.resembles for preset in PRESETS.values()} >= PUBLISHED.keys()


@given(
    layers=st.integers(1, 3),
    groups=st.integers(1, 3),
    shared=st.integers(1, 3),
    half=st.integers(1, 4),
    width=st.integers(1, 40),
    flags=st.tuples(st.booleans(), st.booleans()),
)
def test_every_shape_is_counted_as_its_model_is(
    layers: int, groups: int, shared: int, half: int, width: int, flags: tuple[bool, bool]
) -> None:
    shape = Shape("any", 256, width, layers, groups * shared, shared, 2 * half, 3 * width, *flags)
    assert shape.parameters == parameters_of(shape)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"vocabulary": 255}, "vocabulary of shape tiny is 255"),
        ({"layers": 0}, "layers of shape tiny is 0"),
        ({"heads": 3}, "heads of shape tiny are 3; expected a multiple"),
        ({"head_width": 7}, "head_width of shape tiny is 7"),
    ],
)
def test_impossible_shape_is_refused(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        dataclasses.replace(TINY_SHAPE, **change)
