"""The model of a run: a decoder of any `Shape`, as in Llama and Qwen, in plain `torch.nn`.

It knows nothing of superadam: any script's model would do in its place.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from superadam.cli.train.presets import Shape

LOGITS_AT_ONCE = 1 << 28
"""Logits that the loss holds at once: 1 GiB of them in fp32, where a batch of 16 Ki tokens over 128 Ki ids has 8 GiB.
Fewer would make the products with the output matrix too small for a GPU."""

_INITIAL_STD = 0.02


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


def rotations(seq: int, head_width: int, like: Tensor, base: float) -> Tensor:
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
        self.query_norm = Norm(shape.head_width) if shape.query_key_norm else nn.Identity()
        self.key_norm = Norm(shape.head_width) if shape.query_key_norm else nn.Identity()
        self.attention_output = Linear(inside, shape.width)
        self.feed_forward_norm = Norm(shape.width)
        self.gate = Linear(shape.width, shape.feed_forward)
        self.expand = Linear(shape.width, shape.feed_forward)
        self.contract = Linear(shape.feed_forward, shape.width)

    def forward(self, x: Tensor, rotation: Tensor) -> Tensor:
        """Return the residual stream after this block; `x` is (batch, seq, width), `rotation` from `rotations()`."""
        normalised = self.attention_norm(x)
        query, key, value = (self._heads(layer(normalised)) for layer in (self.query, self.key, self.value))
        query, key = rotated(self.query_norm(query), rotation), rotated(self.key_norm(key), rotation)
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
        return x.view(*x.shape[:2], -1, self.shape.head_width).transpose(1, 2)


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
        self.head = None if shape.tied else Linear(shape.width, shape.vocabulary)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """Return fp32 logits (batch, seq, vocabulary) for what follows `tokens`, int64 (batch, seq).

        With `targets`, int64 (batch, seq), return the mean cross-entropy in nats of predicting those instead.
        """
        x: Tensor = self.tokens(tokens).to(self.compute_dtype)
        rotation = rotations(tokens.shape[1], self.shape.head_width, like=x, base=self.shape.rotation_base)
        for block in self.blocks:
            # No block draws random numbers, so that their state need not be read back from the device.
            again = self.checkpointing and torch.is_grad_enabled()
            x = (
                checkpoint(block, x, rotation, use_reentrant=False, preserve_rng_state=False)
                if again
                else block(x, rotation)
            )
        x = self.norm(x)
        weight = (self.head or self.tokens).weight.to(x.dtype)
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


def next_byte_loss(model: nn.Module, windows: Tensor) -> Tensor:
    """Return the mean cross-entropy in nats of predicting each byte of `windows` from those before it."""
    loss: Tensor = model(windows[:, :-1], windows[:, 1:])
    return loss


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, object]]:
    """Return two `torch.optim` parameter groups: matrices, which decay, and vectors, which do not."""
    parameters = list(model.parameters())
    return [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0},
    ]


@torch.no_grad()
def build_model(
    shape: Shape, dtype: torch.dtype, device: torch.device, *, seed: int = 0, checkpointing: bool = False
) -> Decoder:
    """Return an initial model, drawn on its device in its dtype, because it may be larger than the host's memory.

    On the CPU it computes in fp32 from weights of either dtype, because bf16 products are slow where the CPU lacks
    instructions for them: one step of four blocks of width 256 over 2048 bytes took 7.7 s against 0.3 s on two cores
    with torch restricted to AVX2. On a GPU it computes in the dtype of its weights.
    """
    with torch.device("meta"):
        model = Decoder(shape, checkpointing=checkpointing)
    model.to(dtype=dtype).to_empty(device=device)
    generator = torch.Generator(device).manual_seed(seed)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            parameter.fill_(1.0)
        else:  # what joins the residual stream is scaled with depth
            joins = name.endswith(("attention_output.weight", "contract.weight"))
            std = _INITIAL_STD / math.sqrt(2 * shape.layers) if joins else _INITIAL_STD
            parameter.normal_(0.0, std, generator=generator)
    if device.type != "cpu":
        model.compute_dtype = dtype
    return model
