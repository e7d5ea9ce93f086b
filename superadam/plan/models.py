"""Models of transformers' configurations, without memory."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig

from superadam.plan import UnplannableError

EXPERTS = "grouped_mm"  # their implementation: the sizes of its tensors depend on no values


def build(config: PreTrainedConfig, attention: str | None = None) -> nn.Module:
    """Return a model in bf16 on the default device, with this attention; raises `UnplannableError` if there is none."""
    experts = {"experts_implementation": EXPERTS} if experts_of(config) else {}
    try:
        model: nn.Module = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            config, dtype=torch.bfloat16, attn_implementation=attention, **experts
        )
    except Exception as error:  # of any class, where a size makes no sense
        reason = f"{type(error).__name__}: {error}".strip().split("\n")[0]
        raise UnplannableError(
            f"a {config.model_type} cannot be planned ({reason}); expected a causal language model of transformers "
            "whose attention can be chosen; measure this one on the machine"
        ) from error
    return model


def on_meta(config: PreTrainedConfig, attention: str | None = None) -> nn.Module:
    """As `build`, without memory."""
    with torch.device("meta"):
        return build(config, attention)


def experts_of(config: PreTrainedConfig) -> int:
    """Return the number of experts of a layer; 0 for a dense model."""
    return int(getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None) or 0)


def layers_of(model: Any) -> list[nn.Module]:
    """Return the layers, whatever their list is called; none where no list has as many as the configuration says."""
    lists = (module for module in model.modules() if isinstance(module, nn.ModuleList))
    return next(([*found] for found in lists if len(found) == model.config.num_hidden_layers), [])
