"""The model of a run: a small decoder-only transformer over bytes, in plain `torch.nn`, or a preset's decoder.

It knows nothing of superadam: any script's model would do in its place.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from superadam.cli.train.layers import Linear, Norm, rotated, rotations, through_block
from superadam.cli.train.llama import Decoder
from superadam.cli.train.presets import BYTE_VALUES
from superadam.cli.train.ranks import ALONE, Ranks
from superadam.cli.train.settings import Settings

_INITIAL_STD = 0.02

_EMBEDDING_STD = 0.5
"""Large compared with what the blocks add at first, so that the stream starts as the byte's embedding."""


class Block(nn.Module):
    """Causal self-attention and a feed-forward layer, each on a normalised residual stream."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = Norm(width)
        self.query_key_value = Linear(width, 3 * width)
        self.attention_output = Linear(width, width)
        self.feed_forward_norm = Norm(width)
        self.expand = Linear(width, 4 * width)
        self.contract = Linear(4 * width, width)

    def forward(self, x: Tensor, rotation: Tensor) -> Tensor:
        """Return the residual stream after this block; `x` is (batch, seq, width), `rotation` from `rotations()`."""
        batch, seq, width = x.shape
        projected = self.query_key_value(self.attention_norm(x)).view(batch, seq, 3, self.heads, width // self.heads)
        query, key, value = projected.permute(2, 0, 3, 1, 4)
        query, key = rotated(query, rotation), rotated(key, rotation)
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.attention_output(attended.transpose(1, 2).reshape(batch, seq, width))
        contracted: Tensor = self.contract(functional.gelu(self.expand(self.feed_forward_norm(x))))
        return x + contracted


class ByteTransformer(nn.Module):
    """A transformer that predicts the next byte.

    On the CPU it computes in fp32 from weights of either dtype, because bf16 products are slow where the CPU lacks
    instructions for them: one step of four blocks of width 256 over 2048 bytes took 7.7 s against 0.3 s on two cores
    with torch restricted to AVX2. On a GPU it computes in the dtype of its weights.
    """

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self.compute_dtype = torch.float32
        self.checkpointing = settings.checkpointing
        self.head_width = settings.width // settings.heads
        self.bytes = nn.Embedding(BYTE_VALUES, settings.width)
        self.blocks = nn.ModuleList([Block(settings.width, settings.heads) for _ in range(settings.layers)])
        self.norm = Norm(settings.width)
        self.head = Linear(settings.width, BYTE_VALUES)

    @property
    def embedding(self) -> nn.Embedding:
        """The byte embedding."""
        return self.bytes

    def draw(self, name: str, weight: Tensor, generator: torch.Generator) -> None:
        """Draw the initial values of the parameter `name`; what joins the residual stream is scaled down with depth."""
        if weight.dim() == 1:
            weight.fill_(1.0)
        elif name == "head.weight":
            weight.zero_()
        else:
            joins = name.endswith(("attention_output.weight", "contract.weight"))
            residual_std = _INITIAL_STD / math.sqrt(2 * len(self.blocks))
            std = _EMBEDDING_STD if name == "bytes.weight" else residual_std if joins else _INITIAL_STD
            weight.normal_(0.0, std, generator=generator)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return fp32 logits (batch, seq, 256) for the byte after each of `tokens`, int64 (batch, seq)."""
        x: Tensor = self.bytes(tokens).to(self.compute_dtype)
        rotation = rotations(tokens.shape[1], self.head_width, like=x)
        for block in self.blocks:
            x = through_block(block, x, rotation, recomputes=self.checkpointing)
        logits: Tensor = self.head(self.norm(x))
        return logits.float()


Model = ByteTransformer | Decoder
"""What a run trains."""


def next_byte_loss(model: nn.Module, windows: Tensor) -> Tensor:
    """Return the mean cross-entropy in nats of predicting each byte of `windows` from those before it."""
    inputs, targets = windows[:, :-1], windows[:, 1:]
    if isinstance(model, Decoder):  # its vocabulary is too large to hold the logits of a whole batch
        loss: Tensor = model(inputs, targets)
        return loss
    logits: Tensor = model(inputs)
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, object]]:
    """Return two `torch.optim` parameter groups: matrices, which decay, and vectors, which do not."""
    parameters = list(model.parameters())
    return [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0},
    ]


def _gathered_groups(model: Model) -> list[Any]:
    """Return modules whose weights are needed together, the model last, which has what is in none of the others.

    A tied embedding is needed first and last.
    """
    if model.head is None:
        return [*model.blocks, model]
    return [model.embedding, *model.blocks, [model.norm, model.head], model]


def build_model(settings: Settings, ranks: Ranks = ALONE) -> Model:
    """Return the initial model of a run, on its device, or this process's shards of it, which are fp32.

    The weights are the same for any number of processes, and those of the byte transformer, which are drawn on the CPU
    in fp32, on every device. A preset's decoder is drawn on its device in its dtype. No more than one whole parameter
    is drawn at a time, because a model may be larger than the host's memory.
    """
    device = ranks.device(settings.device)
    dtype = torch.bfloat16 if settings.dtype == "bf16" else torch.float32
    model: Model
    with torch.device("meta"):
        if settings.shape is None:
            model, drawn = ByteTransformer(settings), torch.empty(0, device="cpu")
        else:
            model = Decoder(settings.shape, checkpointing=settings.checkpointing)
            drawn = torch.empty(0, dtype=dtype, device=device)
    if ranks.are_several:
        ranks.shard(model, _gathered_groups(model), dtype, device)
    else:
        model.to(dtype=dtype)
    model.to_empty(device=device)
    generator = torch.Generator(drawn.device).manual_seed(settings.seed)
    for name, parameter in model.named_parameters():
        whole = drawn.new_empty(parameter.shape)
        model.draw(name, whole, generator)
        ranks.fill(parameter, whole.to(dtype))
    if device.type != "cpu":
        model.compute_dtype = dtype
    return model
