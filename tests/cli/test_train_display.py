"""`superadam.cli.train.display`: the table says what applies to the run, in words that fit it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
from rich.console import Console
from support.training_runs import TINY, tiny_trainer

from superadam.cli.train import display
from superadam.cli.train.loop import Trainer
from superadam.cli.train.verification import Verification

pytestmark = pytest.mark.usefixtures("one_torch_thread")

GOOD = Verification(300, 0, 0, 0, 1e-15)


def printed(
    overlap: bool, change: Callable[[Trainer], object] = lambda trainer: None, found: Verification | None = None
) -> str:
    """Return the table of a short run, with some figures changed, on a wide terminal."""
    with tiny_trainer(overlap=overlap) as trainer:
        trainer.step()
        trainer.measure_held_out()
        change(trainer)
    console = Console(width=200)
    with console.capture() as capture:
        console.print(display.outcome_table(trainer, found))
    return capture.get()


def test_overlapped_run_in_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def change(trainer: Trainer) -> None:
        history = trainer.history
        history.update_seconds = 1.0
        times = {"worker_seconds": 4.0, "waited_seconds": 1.0, "hook_seconds": 0.25, "step_seconds": 0.75}
        history.overlap = dataclasses.replace(history.overlap, **times)

    monkeypatch.setattr(Trainer, "shares_cores", True)
    table = printed(True, change)
    assert "60%" in table
    words = "of 5.00 s of optimizer work: the worker did 3.00 s of it during training, on cores that the model uses"
    assert words in table
    assert "the model is in host memory, where gradients and parameters are used in place" in table
    assert "device GB" not in table
    assert "resident" not in table
    assert "the reference included" not in table


def test_run_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    def change(trainer: Trainer) -> None:
        history = trainer.history
        history.peak_device_bytes = 7 * 10**9
        history.overlap = dataclasses.replace(
            history.overlap, downloaded_bytes=3 * 10**9, uploaded_bytes=5 * 10**9, resident_buckets=2
        )

    monkeypatch.setattr(Trainer, "shares_cores", False)
    table = printed(True, change, GOOD)
    assert "between host and device: 3.00 of gradients down, 5.00 of parameters up" in table
    assert "8.00" in table
    assert "7.00" in table
    assert "held by tensors on the device at most" in table
    assert "never handed over: their state is on the GPU" in table
    assert "cores that the model uses" not in table
    assert "the reference included" in table


def test_run_without_overlap_tells_nothing_of_buckets() -> None:
    table, overlapped = printed(False), printed(True)
    for word in ("buckets", "accepted", "respeculated", "dropped", "waiting", "hidden", "moved", "shadows"):
        assert word in overlapped
        assert word not in table
    for word in ("committed", "clipped", "skipped", "seconds", "in the optimizer", "host GB", "threads", "tokens/s"):
        assert word in table


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({}, "verified: 0 of 300 fp32 elements"),
        ({"elements_differing": 3}, "NOT verified: 3 of 300 fp32"),
        ({"parameters_differing": 2}, "2 elements of the model's parameters differed after a step"),
        ({"verdicts_differing": 1}, "1 steps ended otherwise than in torch"),
    ],
)
def test_verdict_says_what_differs(change: dict[str, int], words: str) -> None:
    assert words in display.verdict(dataclasses.replace(GOOD, **change), TINY).plain  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "stored"),
    [
        ({"moments": "bf16"}, "bf16 moments"),
        ({"master": "24bit"}, "24bit masters"),
        ({"moments": "8bit", "master": "24bit"}, "8bit moments and 24bit masters"),
    ],
)
def test_verdict_says_how_the_reference_stores_state(changes: dict[str, str], stored: str) -> None:
    settings = dataclasses.replace(TINY, **changes)  # type: ignore[arg-type]
    said = f"torch.optim.AdamW(fused=True), rounded after each step to {stored}, in any bit"
    assert "verified: 0 of 300 elements of p, m and v differ from " + said in display.verdict(GOOD, settings).plain
    assert "rounded" not in display.verdict(GOOD, TINY).plain
    assert f"parameters in bf16 with {stored} on cpu" in display.introduction(tiny_trainer(**changes))


@pytest.mark.parametrize(
    ("overlap", "words"), [(True, "overlapped in buckets of 863 elements"), (False, "not overlapped")]
)
def test_introduction_says_what_and_how(overlap: bool, words: str) -> None:
    line = display.introduction(tiny_trainer(overlap=overlap))
    assert line.startswith("tiny: 0.0 M parameters in bf16 on cpu, 2 x 16 bytes a step of sentences")
    assert words in line
