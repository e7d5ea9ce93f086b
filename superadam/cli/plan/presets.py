"""What is to be trained: a preset, a folder with a `config.json`, or a model in the hub's cache.

Nothing is downloaded.
"""

from __future__ import annotations

import functools
import os
import tomllib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from transformers import AutoConfig, PreTrainedConfig

from superadam.plan import UnplannableError
from superadam.plan.memory import Setting

MOST_LAYERS = 1000
"""More than any model has; each is run for every setting that is tried, without memory."""

COUNTS = (
    *("num_hidden_layers", "num_attention_heads", "hidden_size", "head_dim", "sliding_window"),
    *("num_local_experts", "num_experts", "num_experts_per_tok"),
)
"""What a plan computes with; transformers checks those that it knows for a kind of model."""


@dataclass(frozen=True, slots=True)
class Preset:
    """A published model, and how its preset trains it; `presets.toml` says what each field is."""

    parameters: int
    source: str
    model_type: str
    setting: Setting
    dimensions: Mapping[str, Any]
    machine: str = "gh200"

    @property
    def config(self) -> PreTrainedConfig:
        """The configuration as it was published, up to what changes no size."""
        found: PreTrainedConfig = AutoConfig.for_model(self.model_type, **self.dimensions)
        return found


@functools.cache
def presets() -> dict[str, Preset]:
    """Return all presets by name."""
    text = resources.files("superadam.cli.plan").joinpath("presets.toml").read_text()
    return {name: Preset(**row | {"setting": Setting(**row["setting"])}) for name, row in tomllib.loads(text).items()}


def config_of(model: str) -> PreTrainedConfig:
    """Return the configuration of a preset, a folder, or a model of the hub's cache.

    Raises:
        UnplannableError: there is none.
    """
    if model in presets():
        return presets()[model].config
    is_folder = Path(model).is_dir() or model.startswith((".", os.sep))
    what = f"{model} is no preset ({', '.join(presets())})"
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(model, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # of any class, where a value has a wrong type
        where = "a folder with a config.json" if is_folder else "a model of the hub's cache"
        if is_folder or not isinstance(error, OSError):  # else it is not there
            where += f" that transformers reads ({str(error).strip().partition(chr(10))[0]})"
        raise UnplannableError(
            f"{what}, and not {where}; name one of these, or put the model's config.json into a folder"
        ) from error
    for name in COUNTS:
        value = None
        with suppress(Exception):  # that it differs between layers
            value = getattr(config, name, None)
        if value is not None and (type(value) is not int or value < 0):
            raise UnplannableError(f"{name} of {model} is {value!r}, expected a whole number; correct its config.json")
    if not 0 < (layers := getattr(config, "num_hidden_layers", None) or 0) <= MOST_LAYERS:
        raise UnplannableError(
            f"{model}, a {config.model_type}, has {layers} layers, expected 1 to {MOST_LAYERS}; correct its "
            "config.json, or plan its text_config alone"
        )
    if hasattr(config, "quantization_config"):
        del config.quantization_config  # it is trained in 16 bits
    return config
