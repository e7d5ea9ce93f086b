"""What overlap costs and hides: whole iterations with the scheduler against iterations with a plain `step()`.

Model and data are synthetic: only their sizes matter.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from measures.contests import MAX_GRAD_NORM
from measures.threads import computing_threads
from superadam import OffloadScheduler, SpeculativeCPUAdamW
from superadam.cli.bench.arrays import ADAMW_OPTIONS
from superadam.cli.bench.pairs import Action, Comparison, compare

WIDTH = 320
LAYERS = 8
HEADS = 5
VOCABULARY = 256
SEQ = 256
SEQUENCES = 8
"""Of an iteration."""

BUCKET_NUMEL = 1 << 20
"""Elements of a bucket: few, so that this model has several."""


@dataclass(frozen=True, slots=True)
class OverlapResult:
    """One comparison of iterations, with overlap against those with a plain step.

    Attributes:
        parameters: elements of the model, fp32.
        tokens, buckets: in an iteration.
        bucket_numel: elements of a bucket.
        hook_seconds: that taking gradients cost the training thread in an iteration; 0 where all is left to `step()`.
        hidden_share: of all of the optimizer's work, see `superadam.OverlapStatistics`.
        threads: of torch and of the kernels.
    """

    parameters: int
    tokens: int
    bucket_numel: int
    buckets: float
    hook_seconds: float
    hidden_share: float
    threads: int
    comparison: Comparison


class _Transformer(nn.Module):
    """A causal transformer of about ten million parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        block = nn.TransformerEncoderLayer(
            WIDTH, HEADS, 4 * WIDTH, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(block, LAYERS, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        logits: Tensor = self.head(self.blocks(self.tokens(tokens), mask, is_causal=True))
        return logits


def _loop() -> tuple[nn.Module, SpeculativeCPUAdamW, Callable[[], None]]:
    """Return a model, its optimizer, and an action that makes one iteration with them."""
    torch.manual_seed(0)
    model = _Transformer()
    optimizer = SpeculativeCPUAdamW(model.parameters(), **ADAMW_OPTIONS, max_grad_norm=MAX_GRAD_NORM)
    windows = torch.randint(VOCABULARY, (SEQUENCES, SEQ + 1), device="cpu")

    def iterate() -> None:
        logits = model(windows[:, :-1])
        loss = functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()  # here, so that neither side holds gradients while the other is timed

    return model, optimizer, iterate


def measure(threads: int, pairs: int) -> OverlapResult:
    """Compare iterations."""
    with computing_threads(threads):
        model, optimizer, overlapped = _loop()
        plain: Action = _loop()[2]
        with OffloadScheduler(optimizer, model, bucket_numel=BUCKET_NUMEL) as scheduler:
            comparison = compare(overlapped, plain, pairs)
            statistics = scheduler.statistics
            steps = optimizer.statistics.steps
    return OverlapResult(
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        tokens=SEQUENCES * SEQ,
        bucket_numel=BUCKET_NUMEL,
        buckets=statistics.buckets / steps,
        hook_seconds=statistics.hook_seconds / steps,
        hidden_share=statistics.hidden_share,
        threads=threads,
        comparison=comparison,
    )
