"""Models by name, from seven thousand to four billion parameters, with default batch and learning rate.

`superadam.cli.train.model` builds a model from a shape, with random weights.
"""

from __future__ import annotations

from dataclasses import dataclass

BYTE_VALUES = 256
"""Tokens of the trainer are bytes, so a vocabulary has at least these ids, and a larger one has ids that never come."""


@dataclass(frozen=True, slots=True)
class Shape:
    """What determines the parameters of a decoder as in Llama and Qwen.

    Attributes:
        vocabulary: rows of the embedding; the text's bytes are the ids 0 to 255.
        width: features in the residual stream.
        layers: number of blocks.
        heads, key_value_heads: attention heads, and the keys and values that groups of them share.
        head_width: features of a head, an even number.
        feed_forward: features inside a block's gated feed-forward layer (SwiGLU).
        tied: whether the embedding is the output matrix as well.
        query_key_norm: whether queries and keys are normalised in each head, as in Qwen3.
        rotation_base: of the rotary positions.
    """

    name: str
    vocabulary: int
    width: int
    layers: int
    heads: int
    key_value_heads: int
    head_width: int
    feed_forward: int
    tied: bool = True
    query_key_norm: bool = False
    rotation_base: float = 10_000.0

    @property
    def parameters(self) -> int:
        """Elements of all parameters."""
        attention = 2 * self.width * self.head_width * (self.heads + self.key_value_heads)
        norms = 2 * self.width + (2 * self.head_width if self.query_key_norm else 0)
        block = attention + 3 * self.width * self.feed_forward + norms
        return self.vocabulary * self.width * (2 - self.tied) + self.layers * block + self.width


@dataclass(frozen=True, slots=True)
class Preset:
    """A shape, and how it is trained.

    Attributes:
        resembles: the model that has this shape, or after which it was made.
        batch, seq, lr: defaults of the options of the same names.
        checkpointing: whether backward computes each block again instead of keeping its activations; no bit changes.
    """

    shape: Shape
    resembles: str
    batch: int
    seq: int
    lr: float
    checkpointing: bool = True


_PRESETS = (
    Preset(
        Shape("tiny", 260, 16, 1, 4, 2, 4, 40, query_key_norm=True),
        resembles="the others, but so small that a run takes a second",
        batch=2,
        seq=16,
        lr=1e-2,
        checkpointing=False,
    ),
    Preset(
        Shape("bytes", BYTE_VALUES, 256, 4, 4, 4, 64, 688, tied=False),
        resembles="Llama with a byte for a token",
        batch=16,
        seq=128,
        lr=1.5e-3,
        checkpointing=False,
    ),
    Preset(
        Shape("10m", 4096, 384, 6, 6, 2, 64, 1024),
        resembles="stories15M of llama2.c, made wider, with grouped keys and values and a smaller vocabulary",
        batch=8,
        seq=512,
        lr=1e-3,
    ),
    Preset(
        Shape("1b", 128_256, 2048, 16, 32, 8, 64, 8192, rotation_base=500_000.0),
        resembles="Llama-3.2-1B",
        batch=8,
        seq=2048,
        lr=3e-4,
    ),
    Preset(
        Shape("4b", 151_936, 2560, 36, 32, 8, 128, 9728, query_key_norm=True, rotation_base=1_000_000.0),
        resembles="Qwen3-4B",
        batch=8,
        seq=2048,
        lr=2e-4,
    ),
)

PRESETS = {preset.shape.name: preset for preset in _PRESETS}
"""By name, the smallest first."""
