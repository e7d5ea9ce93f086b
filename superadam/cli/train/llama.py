"""A decoder of any `Shape`, as in Llama and Qwen, in plain `torch.nn`.

It knows nothing of superadam: any script's model would do in its place.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from superadam.cli.train.layers import Linear, Norm, rotated, rotations, through_block
from superadam.cli.train.presets import Shape

LOGITS_AT_ONCE = 1 << 28
"""Logits that the loss holds at once: 1 GiB of them in fp32, where a batch of 16 Ki tokens over 128 Ki ids has 8 GiB.
Fewer would make the products with the output matrix too small for a GPU."""

_INITIAL_STD = 0.02


class Block(nn.Module):
    """Causal attention whose heads share keys and values in groups, and a gated feed-forward layer (SwiGLU)."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        inside, shared = shape.heads * shape.head_width, shape.key_value_heads * shape.head_width
        self.attention_norm = Norm(shape.width)
        self.query = Linear(shape.width, inside)
        self.key = Linear(shape.width, shared)
        self.value = Linear(shape.width, shared)
        self.query_norm = Norm(shape.head_width) if shape.query_key_norm else None
        self.key_norm = Norm(shape.head_width) if shape.query_key_norm else None
        self.attention_output = Linear(inside, shape.width)
        self.feed_forward_norm = Norm(shape.width)
        self.gate = Linear(shape.width, shape.feed_forward)
        self.expand = Linear(shape.width, shape.feed_forward)
        self.contract = Linear(shape.feed_forward, shape.width)

    def forward(self, x: Tensor, rotation: Tensor) -> Tensor:
        """Return the residual stream after this block; `x` is (batch, seq, width), `rotation` from `rotations()`."""
        normalised = self.attention_norm(x)
        query, key, value = (self._heads(layer(normalised)) for layer in (self.query, self.key, self.value))
        if self.query_norm is not None and self.key_norm is not None:
            query, key = self.query_norm(query), self.key_norm(key)
        query, key = rotated(query, rotation), rotated(key, rotation)
        # Repeated, because not every fused attention of torch takes fewer keys than queries.
        group = self.shape.heads // self.shape.key_value_heads
        key, value = key.repeat_interleave(group, dim=1), value.repeat_interleave(group, dim=1)
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.attention_output(attended.transpose(1, 2).flatten(2))
        normalised = self.feed_forward_norm(x)
        contracted: Tensor = self.contract(functional.silu(self.gate(normalised)) * self.expand(normalised))
        return x + contracted

    def _heads(self, x: Tensor) -> Tensor:
        """Return (batch, heads, seq, head_width) of (batch, seq, heads * head_width)."""
        batch, seq, _ = x.shape
        return x.view(batch, seq, -1, self.shape.head_width).transpose(1, 2)


class Decoder(nn.Module):
    """A transformer that predicts the next token.

    With `checkpointing`, backward recomputes each block instead of keeping its activations. `compute_dtype` is the
    dtype of activations; weights of another dtype are converted where they are used.
    """

    def __init__(self, shape: Shape, *, checkpointing: bool = False) -> None:
        super().__init__()
        self.shape = shape
        self.checkpointing = checkpointing
        self.compute_dtype = torch.float32
        self.tokens = nn.Embedding(shape.vocabulary, shape.width)
        self.blocks = nn.ModuleList([Block(shape) for _ in range(shape.layers)])
        self.norm = Norm(shape.width)
        self.head = None if shape.tied else Head(shape.width, shape.vocabulary)

    @property
    def embedding(self) -> nn.Embedding:
        """The token embedding."""
        return self.tokens

    def draw(self, name: str, weight: Tensor, generator: torch.Generator) -> None:
        """Draw the initial values of the parameter `name`; what joins the residual stream is scaled with depth."""
        if weight.dim() == 1:
            weight.fill_(1.0)
        else:
            joins = name.endswith(("attention_output.weight", "contract.weight"))
            std = _INITIAL_STD / math.sqrt(2 * self.shape.layers) if joins else _INITIAL_STD
            weight.normal_(0.0, std, generator=generator)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """Return fp32 logits (batch, seq, vocabulary) for what follows `tokens`, int64 (batch, seq).

        With `targets`, int64 (batch, seq), return the mean cross-entropy in nats of predicting those instead.
        """
        x: Tensor = self.tokens(tokens).to(self.compute_dtype)
        rotation = rotations(tokens.shape[1], self.shape.head_width, like=x, base=self.shape.rotation_base)
        for block in self.blocks:
            x = through_block(block, x, rotation, recomputes=self.checkpointing)
        x = self.norm(x)
        outcome: Tensor = _output(x, self.tokens.weight, targets) if self.head is None else self.head(x, targets)
        return outcome


class Head(Linear):
    """The output matrix; all that is computed with it is within its `forward`, around which FSDP2 gathers it."""

    def forward(self, x: Tensor, targets: Tensor | None = None) -> Tensor:
        """Return what the decoder returns, of the normalised residual stream."""
        return _output(x, self.weight, targets)


def _output(x: Tensor, weight: Tensor, targets: Tensor | None) -> Tensor:
    weight = weight.to(x.dtype)
    if targets is None:
        return functional.linear(x, weight).float()
    return _mean_loss(x.flatten(0, 1), weight, targets.flatten())


def _mean_loss(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy of the logits `x @ weight.T`, computing part of the logits at a time.

    Backward recomputes each part's logits, which adds a third to the output matrix's work. The parts' gradients of the
    matrix are added up in the dtype of `x`.
    """
    rows = max(1, LOGITS_AT_ONCE // len(weight))
    total = x.new_zeros((), dtype=torch.float32)
    for part, expected in zip(torch.split(x, rows), torch.split(targets, rows), strict=True):
        lost: Tensor = checkpoint(_summed_loss, part, weight, expected, use_reentrant=False, preserve_rng_state=False)
        total = total + lost
    return total / len(x)


def _summed_loss(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(functional.linear(x, weight).float(), targets, reduction="sum")
