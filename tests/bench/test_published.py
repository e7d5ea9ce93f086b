"""Published figures: every row is in the table, and documents and presets have what the commands print."""

from pathlib import Path

import pytest

pytest.importorskip("transformers")

import published
from support.presets import PRESETS, peaks_found_once  # noqa: F401

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "plan.md").read_text()

pytestmark = pytest.mark.slow


def test_every_row_is_predicted_or_says_what_it_lacks() -> None:
    names = [row["id"] for row in published.rows()]
    predicted = set(published.predictions())
    missing = {row["id"] for row in published.rows() if row["not_predicted"]}
    assert len(names) == len(set(names)) >= 55
    assert predicted | missing == set(names)
    assert not predicted & missing
    assert len(predicted) >= 16


@pytest.mark.parametrize("what", ["figures", "gains"])
def test_the_page_has_what_the_command_prints(what: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert published.main([what]) == 0
    assert capsys.readouterr().out in PAGE


@pytest.mark.parametrize("name", PRESETS)
def test_presets_say_what_a_plan_expects(name: str) -> None:
    row, line = published.expectation(name)
    assert row in PAGE
    assert line in (ROOT / "examples" / "presets" / f"{name}.yaml").read_text()


def test_bounds_that_no_schedule_can_break() -> None:
    """The floor of memory lies below every published Adam, and a step without overlap above one with it."""
    for name, seconds in {"graceadam-1b": 0.082, "graceadam-4b": 0.316, "graceadam-8b": 0.608}.items():
        assert float(published.predictions()[name]().predicted.split()[0]) < seconds
