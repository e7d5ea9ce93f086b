"""An attention with the memory of a fused kernel, which computes nothing: for any model on meta tensors, with sinks.

It keeps what FlashAttention keeps for backward: q, k, v, the output, and one fp32 number for each row of scores.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

NAME = "superadam_plan"  # what `attn_implementation` is set to, once `register` was called
calls = 0  # since this was imported


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None) -> Tensor:
        output = torch.empty_like(query)
        if query.shape[-1] != value.shape[-1]:  # as latent attention has it; else it lies as the query does
            sequences, heads, tokens, _ = query.shape
            output = query.new_empty(sequences, tokens, heads, value.shape[-1]).transpose(1, 2)
        rows = query.new_empty(query.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(query, key, value, output, rows, *([] if sinks is None else [sinks]))
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, _, rows, *sinks = ctx.saved_tensors
        sums = torch.empty_like(rows)  # of gradient times output, which the kernel computes first
        found = [torch.empty_like(tensor) for tensor in (query, key, value, *sinks)]
        del sums
        return tuple(found) if sinks else (*found, None)


def _attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, s_aux: Any = None, **options: Any
) -> tuple[Tensor, None]:
    global calls
    calls += 1
    output: Tensor = _Fused.apply(query, key, value, s_aux)  # type: ignore[no-untyped-call]
    return output.transpose(1, 2).contiguous(), None


def register() -> None:
    """Let transformers find it under `NAME`, without a mask."""
    AttentionInterface.register(NAME, _attend)
    AttentionMaskInterface.register(NAME, lambda *arguments, **options: None)
