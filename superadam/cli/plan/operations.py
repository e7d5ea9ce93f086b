"""Floating-point operations of a model's forward and backward."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from superadam.plan.memory import Setting, Subject
from superadam.plan.models import experts_of


@dataclass(frozen=True, slots=True)
class Operations:
    """Floating-point operations of one micro-batch of one rank; a multiplication and an addition are two.

    Attributes:
        forward: 2 for each parameter that a token is multiplied with, and 4 for each of the pairs of positions that
            attention looks at, times the width of all heads. Backward has twice as many, and those are the model's.
        repeated: what the hardware computes again: every layer with checkpointing, logits of a chunked loss, and the
            scores of attention, which a fused kernel does not keep.
        by_parameter: work of backward behind each parameter's gradient, by name, as a share of all.
    """

    forward: float
    repeated: float
    by_parameter: Mapping[str, float]

    @property
    def model(self) -> float:
        """Forward and backward, nothing counted twice."""
        return 3 * self.forward

    @property
    def hardware(self) -> float:
        """What the GPU computes."""
        return self.model + self.repeated


def operations(subject: Subject, setting: Setting) -> Operations:
    """Count what a micro-batch computes."""
    config, model, tokens, experts = subject.config, subject.model, setting.tokens, experts_of(subject.config)
    visited = (getattr(config, "num_experts_per_tok", 0) or 0) / experts if experts else 1.0
    inner, outer = model.get_input_embeddings(), model.get_output_embeddings()  # type: ignore[operator]
    is_tied = inner.weight is outer.weight
    work = {
        name: parameter.numel() * (visited if ".experts." in name else 1.0) * (parameter.dim() > 1)
        for name, parameter in model.named_parameters()
        if parameter is not inner.weight or is_tied
    }
    heads = getattr(config, "num_attention_heads", 0)
    usual = getattr(config, "head_dim", None) or config.hidden_size // max(1, heads)
    width = heads * sum(getattr(config, name, None) or usual for name in ("qk_head_dim", "v_head_dim")) / 2
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * config.num_hidden_layers  # if it has one
    window = min(tokens, getattr(config, "sliding_window", None) or tokens)
    seen = [window if "sliding" in kind else tokens for kind in kinds]  # at most, of a token
    scores = setting.sequences * width * 4.0 * sum(most * (tokens - most / 2) for most in seen)
    linear = 2.0 * sum(work.values()) * setting.sequences * tokens
    head = 2.0 * outer.weight.numel() * setting.sequences * tokens
    chunked = setting.loss == "chunked"
    again = (linear - head + scores) * setting.checkpointing + head * chunked + 0.5 * scores
    for name, parameter in model.named_parameters():
        if parameter is outer.weight and not is_tied:
            work[name] *= (2 + chunked) / (2 + setting.checkpointing)
    every = sum(work.values())
    return Operations(linear + scores, again, {name: count / every for name, count in work.items()})
