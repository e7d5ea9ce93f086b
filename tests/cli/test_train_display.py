"""`superadam.cli.train.display`: the table says what applies to the run, in words that fit it."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from rich.console import Console
from support.training_runs import TINY_SHAPE, tiny_trainer

from superadam.cli.train import display
from superadam.cli.train.report import Report

pytestmark = pytest.mark.usefixtures("one_torch_thread")


def printed(overlap: bool, **changes: Any) -> str:
    """Return the table of a short run, with some figures changed, on a wide terminal."""
    with tiny_trainer(overlap=overlap) as trainer:
        trainer.step()
        report = dataclasses.replace(Report.of(trainer, None), **changes)
    console = Console(width=200)
    with console.capture() as capture:
        console.print(display.outcome_table(report))
    return capture.get()


def test_overlapped_run_in_host_memory() -> None:
    table = printed(True, shares_cores=True, hidden_seconds=3.0, optimizer_seconds=1.0, hidden_share=0.75)
    assert "75%" in table
    assert (
        "of 4.00 s of optimizer work: the worker did 3.00 s of it during training, on cores that the model uses"
        in table
    )
    assert "the model is in host memory, where gradients and parameters are used in place" in table
    assert "device GB" not in table
    assert "the reference included" not in table


def test_run_on_a_device() -> None:
    figures = {
        "device": "cuda",
        "shares_cores": False,
        "downloaded_bytes": 3 * 10**9,
        "uploaded_bytes": 5 * 10**9,
        "elements": 1,
    }
    table = printed(True, **figures, peak_device_bytes=7 * 10**9)
    assert "between host and device: 3.00 of gradients down, 5.00 of parameters up" in table
    assert "8.00" in table
    assert "7.00" in table
    assert "held by tensors on the device at most" in table
    assert "cores that the model uses" not in table
    assert "the reference included" in table


def test_run_without_overlap_tells_nothing_of_buckets() -> None:
    table, overlapped = printed(False), printed(True)
    for word in ("buckets", "accepted", "respeculated", "dropped", "waiting", "hidden", "moved", "shadows"):
        assert word in overlapped
        assert word not in table
    for word in ("committed", "clipped", "skipped", "seconds", "in the optimizer", "host GB", "threads", "tokens/s"):
        assert word in table


def test_introduction_names_the_model_and_what_it_computes_again() -> None:
    words = display.introduction(tiny_trainer(shape=TINY_SHAPE, checkpointing=True))
    assert words.startswith("tiny: 0.0 M parameters in bf16 on cpu, blocks computed again in backward, 2 x 16 bytes")
    assert "again" not in display.introduction(tiny_trainer())


@pytest.mark.parametrize(("overlap", "words"), [(True, "overlapped in buckets of 2,000"), (False, "not overlapped")])
def test_introduction_says_how(overlap: bool, words: str) -> None:
    assert words in display.introduction(tiny_trainer(overlap=overlap))
