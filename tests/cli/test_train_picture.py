"""`superadam.cli.train.picture`: every clipped and skipped step is marked, whatever the run looked like."""

from __future__ import annotations

import math
import statistics
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib import rcParams
from support.training_runs import tiny_trainer

from superadam.cli.train import picture
from superadam.cli.train.history import History
from superadam.cli.train.report import Report

pytestmark = pytest.mark.usefixtures("one_torch_thread")


def run_of(steps: int, nan_steps: frozenset[int], max_grad_norm: float) -> tuple[History, Report]:
    with tiny_trainer(steps=steps, max_grad_norm=max_grad_norm) as trainer:
        trainer.measure_held_out()
        for number in range(1, steps + 1):
            trainer.step(inject_nan=number in nan_steps)
    return trainer.history, Report.of(trainer, None)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("steps", "nan_steps", "max_grad_norm"),
    [(6, {3, 5}, 0.75), (6, set(), math.inf), (1, set(), 0.75), (1, {1}, 0.75), (3, {1, 2, 3}, math.inf)],
)
def test_marks_stand_at_clipped_and_skipped_steps(steps: int, nan_steps: set[int], max_grad_norm: float) -> None:
    history, report = run_of(steps, frozenset(nan_steps), max_grad_norm)
    figure = picture.draw(history, report)
    figure.canvas.draw()
    lines = {str(line.get_label()): list(line.get_xdata()) for line in figure.axes[0].get_lines()}
    assert lines[f"skipped, Inf or NaN ({report.skipped})"] == sorted(nan_steps)
    clipped = [number for number, record in enumerate(history.steps, 1) if record.grad_norm > max_grad_norm]
    assert lines[f"clipped ({report.clipped})"] == clipped
    assert report.clipped == len(clipped)


def test_file_is_a_png_of_the_stated_size(tmp_path: Path) -> None:
    before = dict(rcParams)
    path = picture.write(*run_of(4, frozenset({2}), 0.75), tmp_path)
    content = path.read_bytes()
    assert content[:8] == b"\x89PNG\r\n\x1a\n"
    assert (int.from_bytes(content[16:20], "big"), int.from_bytes(content[20:24], "big")) == (1500, 990)
    assert dict(rcParams) == before


@given(values=st.lists(st.floats(-1e3, 1e3), max_size=60))
def test_running_median_keeps_the_beginning_and_stays_within_the_values(values: list[float]) -> None:
    curve = picture.smoothed(values)
    assert len(values) - 4 <= len(curve) <= len(values)
    if values:
        assert curve[0] == values[0]
    if len(values) > 16:
        assert curve[-1] == statistics.median(values[-9:])
        assert all(min(values) <= value <= max(values) for value in curve)
    if len(values) == 3:
        assert curve[1] == statistics.median(values)


def test_running_median_ignores_one_bad_batch() -> None:
    values = [3.0] * 20
    values[10] = values[-1] = 700.0
    assert picture.smoothed(values) == [3.0] * 16
