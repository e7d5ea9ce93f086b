"""`bench/pace.py --stretched`: the events of a plan are what the real scheduler takes, at the size of a large model."""

import json
import statistics
from pathlib import Path

import pytest

pytest.importorskip("transformers")

import pace
from measures import stretched

from superadam.cli.plan.rates import rates_of
from superadam.plan import machines
from superadam.step.transaction import Transaction


@pytest.mark.slow
def test_events_agree_with_the_scheduler_at_ten_buckets(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Other processes make it slower, never quicker: its quickest iteration is near the events, none is far below."""
    before = Transaction.speculate, Transaction.commit
    file = tmp_path / "found.json"
    words = ["--stretched", "--parameters", "200000000", "--layers", "48", "--ratios", "1", "--json", str(file)]
    assert pace.main(words) == 0
    (row,) = json.loads(file.read_text())["rows"]
    assert row["buckets"] == 10
    assert 0.95 * row["events"] <= row["quickest"] <= 1.15 * row["events"]
    assert f"by events {row['events']:.4f} s" in " ".join(capsys.readouterr().out.split())
    assert before == (Transaction.speculate, Transaction.commit)


@pytest.mark.deep
def test_events_agree_with_the_scheduler_at_a_hundred_buckets() -> None:
    """On a machine that is otherwise idle; this takes minutes."""
    rates = rates_of(machines.read("gh200"))
    rows = [stretched.measure(rates, 14_800_000_000, 280, ratio) for ratio in (0.5, 1.0, 1.5)]
    assert all(90 <= row.buckets <= 140 for row in rows)
    assert statistics.median(abs(row.error) for row in rows) < 0.04
