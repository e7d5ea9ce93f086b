"""Published figures: every row is in the table, and documents and presets have what the commands print."""

import dataclasses
import json
from pathlib import Path

import pytest

pytest.importorskip("transformers")

import published
from support.presets import PRESETS, peaks_found_once  # noqa: F401

from superadam.cli.plan.answer import answer_for
from superadam.cli.plan.presets import presets
from superadam.plan import machines
from superadam.plan.memory import Subject

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


def test_the_page_has_the_other_end_of_clipping() -> None:
    preset, machine = presets()["phi-4"], machines.read("gh200")
    subject, setting = Subject.of(preset.config), dataclasses.replace(preset.setting, clipped=1.0)
    (timing,) = answer_for("phi-4", subject, setting, machine, published.EFFICIENCY, looks_for_gains=False).timings
    assert f"(`phi-4`: {timing.step.hidden:.2f} hidden, {timing.tokens_per_second:,.0f} tokens/s)" in PAGE


def over_clock(pattern: str) -> list[tuple[float, ...]]:
    """Return iterations over the clock, each with "auto", with no state on the device, and with torch's Adam.

    Of rows whose backward lasts within a fifth of Adam's time, as the step without overlap of their own turns shows it.
    """
    found = []
    for path in (ROOT / "bench" / "results").glob(pattern):
        results = json.loads(path.read_text())
        for row in results["rows"]:
            sides = row["after_backward"], row["clock"]
            after, alone = (side.get("typical_seconds") or side["seconds"]["median"] for side in sides)
            copies = 2 * row["parameters"] * sum(1 / results["rates"][way] for way in ("download", "upload"))
            if 0.8 < row["backward_seconds"] / (after - alone - copies) < 1.2:
                zero = next(side for side in row["placements"] if side["placement"] == "0 16Mi 2")
                found.append([side["over_clock"] for side in (row["auto"], zero, row["torch"])])
    return [*zip(*found, strict=True)]


def test_first_figures_of_the_readme_are_those_of_all_machines() -> None:
    words = " ".join((ROOT / "README.md").read_text().split())
    plain, clipped = (over_clock(pattern) for pattern in ("*-pace.json", "*-pace-clipped.json"))
    told = [f"{min(each):.2f} to {max(each):.2f}" for each in (plain[0], clipped[0], plain[1], clipped[1])]
    torchs = [f"{choose(plain[2] + clipped[2]):.1f}" for choose in (min, max)]
    torchs_own = (
        f"torch's Adam follows it, an iteration takes {' to '.join(torchs)} times as long as forward and backward"
    )
    ours = f"With superadam it takes {told[0]} times as long, or {told[1]} if every step is clipped"
    assert f"{torchs_own} alone. {ours}; with no state on the GPU {told[2]}, or {told[3]}." in words


def test_bounds_that_no_schedule_can_break() -> None:
    """The floor of memory lies below every published Adam, and a step without overlap above one with it."""
    for name, seconds in {"graceadam-1b": 0.082, "graceadam-4b": 0.316, "graceadam-8b": 0.608}.items():
        assert float(published.predictions()[name]().predicted.split()[0]) < seconds
