"""`superadam.cli.train.presets`: parameters are counted as the model has them, and as the models they resemble do."""

from __future__ import annotations

import pytest
import torch

from superadam.cli.train.model import Decoder
from superadam.cli.train.presets import PRESETS

PUBLISHED = {"Llama-3.2-1B": 1_235_814_400, "Qwen3-4B": 4_022_468_096}
"""Parameters, without biases, as the published checkpoints hold them; a tied output matrix counts once."""


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_what_they_are_called(name: str) -> None:
    preset = PRESETS[name]
    assert preset.shape.name == name
    with torch.device("meta"):
        assert preset.shape.parameters == sum(parameter.numel() for parameter in Decoder(preset.shape).parameters())
    if name[0].isdigit():
        nominal = float(name[:-1]) * {"m": 1e6, "b": 1e9}[name[-1]]
        assert preset.shape.parameters == pytest.approx(nominal, rel=0.25)  # names are round numbers
    assert preset.shape.parameters == PUBLISHED.get(preset.resembles, preset.shape.parameters)


def test_presets_grow() -> None:
    sizes = [preset.shape.parameters for preset in PRESETS.values()]
    assert sizes == sorted(sizes)
    assert {preset.resembles for preset in PRESETS.values()} >= PUBLISHED.keys()
