"""The layers that the trainer's models share: mixed-dtype layers, rotary positions, activation checkpointing."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint


class Linear(nn.Linear):
    """A bias-free linear layer that computes in the dtype of its input, whatever dtype its weight is kept in."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return `x @ weight.T`; `x` is (..., inputs)."""
        return functional.linear(x, self.weight.to(x.dtype))


class Norm(nn.RMSNorm):
    """Root-mean-square normalisation over the last dimension, in the dtype of its input."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the normalised `x`, of the same shape."""
        assert self.weight is not None
        return functional.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), eps=1e-6)


def rotations(seq: int, head_width: int, like: Tensor, base: float = 10000.0) -> Tensor:
    """Return (2, seq, head_width / 2), as `like`: cosine and sine of each position's angles.

    Source: Su et al., arXiv 2104.09864 (rotary position embedding); `base` is the 10000 of its equation 15.
    """
    half = head_width // 2
    frequencies = base ** (-torch.arange(half, device=like.device) / half)
    angles = torch.outer(torch.arange(seq, device=like.device), frequencies)
    return torch.stack((angles.cos(), angles.sin())).to(like.dtype)


def rotated(x: Tensor, rotation: Tensor) -> Tensor:
    """Return queries or keys (batch, heads, seq, head_width) rotated by their positions' angles."""
    cosine, sine = rotation
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cosine - second * sine, first * sine + second * cosine), dim=-1)


def through_block(block: nn.Module, x: Tensor, rotation: Tensor, *, recomputes: bool) -> Tensor:
    """Return `block(x, rotation)`; with `recomputes`, backward recomputes the block instead of keeping its activations.

    The gradients have the same bits wherever the block's operations give the same bits twice.
    """
    if recomputes and torch.is_grad_enabled():
        # No block draws random numbers, so that their state need not be read back from the device.
        kept: Tensor = checkpoint(block, x, rotation, use_reentrant=False, preserve_rng_state=False)
        return kept
    through: Tensor = block(x, rotation)
    return through
