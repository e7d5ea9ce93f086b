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
from superadam.cli.train.settings import Settings
from superadam.cli.train.text import Text

TINY = Settings.new({"model": "tiny", "steps": 8, "warmup": 2, "max_grad_norm": 1.3})
"""A run of the smallest preset, in several buckets, of which some steps are clipped and some are not."""

BUCKETS = 4
"""Of a step of `TINY`, whose embedding is cut; in fp32, where it is its own master, one fewer."""

OPTIONS = ("--model", "tiny", "--steps", "8", "--warmup", "2", "--max-grad-norm", "1.3", "--threads", "1")
"""`TINY` as a person types it."""

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
"""Where runs can be tested here."""

SENTENCES = b"".join(b"%d bottles of milk on the wall, and %d on the floor.\n" % (n, n * n % 97) for n in range(200))


def tiny_trainer(*, is_verified: bool = False, **changes: Any) -> Trainer:
    """Return a fresh trainer of a tiny run, with some settings changed."""
    settings = dataclasses.replace(TINY, **changes)
    return Trainer(settings, Text.of_bytes("sentences", SENTENCES, settings.seq), is_verified=is_verified)


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
