"""What is to be trained: a preset, a folder with a `config.json`, or a model in the hub's cache.

Nothing is downloaded.
"""

from __future__ import annotations

import functools
import os
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from superadam.plan import UnplannableError

EXPERTS = "grouped_mm"
"""Their implementation: the sizes of its tensors depend on no values."""


@dataclass(frozen=True, slots=True)
class Preset:
    """A published model, and how its preset trains it; `superadam/plan/presets.toml` says what each field is."""

    parameters: int
    source: str
    model_type: str
    ranks: int
    sequences: int
    tokens: int
    dimensions: Mapping[str, Any]
    micro_batches: int = 1
    moments: str = "fp32"
    master: str = "fp32"
    machine: str = "gh200"

    @property
    def config(self) -> PreTrainedConfig:
        """The configuration as it was published, up to what changes no size."""
        found: PreTrainedConfig = AutoConfig.for_model(self.model_type, **self.dimensions)
        return found


@functools.cache
def presets() -> dict[str, Preset]:
    """Return all presets by name."""
    text = resources.files("superadam.plan").joinpath("presets.toml").read_text()
    return {name: Preset(**row) for name, row in tomllib.loads(text).items()}


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
    except (OSError, ValueError, KeyError) as error:
        where = "a folder with a config.json that transformers reads" if is_folder else "a model of the hub's cache"
        reason = str(error).strip().split("\n")[0]
        raise UnplannableError(
            f"{what}, and not {where} ({reason}); name one of these, or put the model's config.json into a folder"
        ) from error
    if hasattr(config, "quantization_config"):
        del config.quantization_config  # it is trained in 16 bits
    return config


def with_layers(config: PreTrainedConfig, layers: int) -> PreTrainedConfig:
    """Return the same architecture with another number of layers."""
    values = config.to_dict() | {"num_hidden_layers": layers}
    if values.get("layer_types"):
        values["layer_types"] = values["layer_types"][:layers]
    changed: PreTrainedConfig = type(config)(**values)
    return changed


def build(config: PreTrainedConfig, attention: str | None = None) -> nn.Module:
    """Return a model in bf16, on the default device, with the default implementation of attention or this one.

    Raises:
        UnplannableError: transformers has no causal language model of that kind, or not with that attention.
    """
    experts = {"experts_implementation": EXPERTS} if experts_of(config) else {}
    try:
        model: nn.Module = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            config, dtype=torch.bfloat16, attn_implementation=attention, **experts
        )
    except (ValueError, ImportError, AttributeError, TypeError) as error:
        reason = str(error).strip().split("\n")[0]
        raise UnplannableError(
            f"a {config.model_type} cannot be planned ({reason}); expected a causal language model of transformers "
            "whose attention can be chosen; measure this one on the machine"
        ) from error
    return model


def on_meta(config: PreTrainedConfig) -> nn.Module:
    """Return the model in bf16, without memory."""
    with torch.device("meta"):
        return build(config)


def experts_of(config: PreTrainedConfig) -> int:
    """Return the number of experts of a layer; 0 for a dense model."""
    return int(getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None) or 0)


def period_of(config: PreTrainedConfig) -> int:
    """Return after how many layers the kinds of layers repeat."""
    kinds: Sequence[str] = getattr(config, "layer_types", None) or ["full_attention"]
    return next(p for p in range(1, len(kinds) + 1) if all(a == b for a, b in zip(kinds, kinds[p:], strict=False)))
