"""Runs of `superadam train` small enough for tests, and the comparison of what they leave."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from superadam.cli.main import main
from superadam.cli.train.loop import Trainer
from superadam.cli.train.presets import Shape
from superadam.cli.train.settings import Settings
from superadam.cli.train.text import Text

TINY = Settings(
    steps=8, layers=1, width=16, heads=2, batch=2, seq=16, warmup=2, lr=1e-2, max_grad_norm=0.75, bucket_numel=2000
)
"""A model of about 11 thousand parameters, in three buckets. This limit clips its first step, then commits two, then
clips again."""

TINY_SHAPE = Shape(
    name="tiny",
    vocabulary=300,
    width=24,
    layers=2,
    heads=4,
    key_value_heads=2,
    head_width=8,
    feed_forward=40,
    tied=True,
    query_key_norm=True,
)
"""A decoder of about 18 thousand parameters, with everything that a shape may have."""

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
"""Where runs can be tested here."""

OPTIONS = (
    *("--steps", "8", "--layers", "1", "--width", "16", "--heads", "2", "--batch", "2", "--seq", "16"),
    *("--warmup", "2", "--lr", "1e-2", "--max-grad-norm", "0.75", "--threads", "1", "--bucket-numel", "2000"),
)
"""`TINY` as a person types it."""

SENTENCES = b"".join(b"%d bottles of milk on the wall, and %d on the floor.\n" % (n, n * n % 97) for n in range(200))


def tiny_trainer(**changes: Any) -> Trainer:
    """Return a fresh trainer of a tiny run, with some settings changed."""
    settings = dataclasses.replace(TINY, **changes)
    return Trainer(settings, Text.of_bytes("sentences", SENTENCES, settings.seq))


def write_text(folder: Path) -> Path:
    """Write a text to learn and return its path."""
    path = folder / "sentences.txt"
    path.write_bytes(SENTENCES)
    return path


def train(*words: object) -> int:
    """Run `superadam train` in this process and return its exit status."""
    return main(["train", *map(str, words)])


def read_report(path: Path) -> dict[str, Any]:
    """Return a report as a program reads it."""
    report: dict[str, Any] = json.loads(path.read_text())
    return report


def are_same(a: object, b: object) -> bool:
    """Return whether two nests of dicts and lists hold the same values, tensors bit for bit."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        is_alike = a.dtype == b.dtype and a.shape == b.shape
        return is_alike and torch.equal(
            a.contiguous().flatten().view(torch.uint8), b.contiguous().flatten().view(torch.uint8)
        )
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(are_same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(are_same(x, y) for x, y in zip(a, b, strict=True))
    return a == b or (a != a and b != b)  # NaN is a value like any other here
