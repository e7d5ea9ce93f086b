"""Decoder shapes by name, from ten million to eight billion parameters, with default batch and learning rate.

`superadam.cli.train.llama` builds a model from a shape, with random weights.
"""

from __future__ import annotations

import dataclasses
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
        head_width: features of a head.
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
    tied: bool
    query_key_norm: bool = False
    rotation_base: float = 10_000.0

    def __post_init__(self) -> None:
        for name in ("width", "layers", "heads", "key_value_heads", "head_width", "feed_forward"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} of shape {self.name} is {getattr(self, name)}; expected at least 1")
        if self.vocabulary < BYTE_VALUES:
            raise ValueError(f"vocabulary of shape {self.name} is {self.vocabulary}; expected at least {BYTE_VALUES}")
        if self.heads % self.key_value_heads:
            raise ValueError(
                f"heads of shape {self.name} are {self.heads}; expected a multiple of its key_value_heads, "
                f"which are {self.key_value_heads}"
            )
        if self.head_width % 2:
            raise ValueError(f"head_width of shape {self.name} is {self.head_width}; expected an even number")

    def __str__(self) -> str:
        return self.name

    @property
    def parameters(self) -> int:
        """Elements of all parameters."""
        attention = 2 * self.width * self.head_width * (self.heads + self.key_value_heads)
        norms = 2 * self.width + (2 * self.head_width if self.query_key_norm else 0)
        block = attention + 3 * self.width * self.feed_forward + norms
        embeddings = self.vocabulary * self.width * (1 if self.tied else 2)
        return embeddings + self.layers * block + self.width


@dataclass(frozen=True, slots=True)
class Preset:
    """A shape, and its default settings for training.

    Attributes:
        resembles: the published model that has this shape, or after which it was made.
        batch, seq: sequences in a step, and bytes in a sequence.
        lr: peak learning rate.
    """

    shape: Shape
    resembles: str
    batch: int
    seq: int
    lr: float


_LLAMA_1B = Shape(
    name="1b",
    vocabulary=128_256,
    width=2048,
    layers=16,
    heads=32,
    key_value_heads=8,
    head_width=64,
    feed_forward=8192,
    tied=True,
    rotation_base=500_000.0,
)

_PRESETS = (
    Preset(
        Shape(
            name="10m",
            vocabulary=4096,
            width=384,
            layers=6,
            heads=6,
            key_value_heads=2,
            head_width=64,
            feed_forward=1024,
            tied=True,
        ),
        resembles="stories15M of llama2.c, made wider, with grouped keys and values and a smaller vocabulary",
        batch=8,
        seq=512,
        lr=1e-3,
    ),
    Preset(
        Shape(
            name="125m",
            vocabulary=32_000,
            width=576,
            layers=30,
            heads=9,
            key_value_heads=3,
            head_width=64,
            feed_forward=1536,
            tied=True,
        ),
        resembles="MobileLLM-125M",
        batch=8,
        seq=1024,
        lr=1e-3,
    ),
    Preset(_LLAMA_1B, resembles="Llama-3.2-1B", batch=8, seq=2048, lr=3e-4),
    Preset(
        Shape(
            name="4b",
            vocabulary=151_936,
            width=2560,
            layers=36,
            heads=32,
            key_value_heads=8,
            head_width=128,
            feed_forward=9728,
            tied=True,
            query_key_norm=True,
            rotation_base=1_000_000.0,
        ),
        resembles="Qwen3-4B",
        batch=8,
        seq=2048,
        lr=2e-4,
    ),
    Preset(
        dataclasses.replace(
            _LLAMA_1B, name="8b", width=4096, layers=32, head_width=128, feed_forward=14_336, tied=False
        ),
        resembles="Llama-3.1-8B",
        batch=4,
        seq=2048,
        lr=1e-4,
    ),
)

PRESETS = {preset.shape.name: preset for preset in _PRESETS}
"""By name, the smallest first."""
