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

from superadam import StepKind
from superadam.cli.train import picture
from superadam.cli.train.loop import Trainer
from superadam.cli.train.verification import Verification

pytestmark = pytest.mark.usefixtures("one_torch_thread")


def run_of(steps: int, nan_steps: set[int], max_grad_norm: float) -> Trainer:
    with tiny_trainer(steps=steps, max_grad_norm=max_grad_norm) as trainer:
        trainer.measure_held_out()
        for number in range(1, steps + 1):
            trainer.step(inject_nan=number in nan_steps)
    return trainer


@pytest.mark.slow
@pytest.mark.parametrize(
    ("steps", "nan_steps", "max_grad_norm"),
    [(6, {3, 5}, 1.3), (6, set(), math.inf), (1, set(), 1.3), (1, {1}, 1.3), (3, {1, 2, 3}, math.inf)],
)
def test_marks_stand_at_clipped_and_skipped_steps(steps: int, nan_steps: set[int], max_grad_norm: float) -> None:
    trainer = run_of(steps, nan_steps, max_grad_norm)
    figure = picture.draw(trainer, None)
    figure.canvas.draw()
    lines = {str(line.get_label()): list(line.get_xdata()) for line in figure.axes[0].get_lines()}
    assert lines[f"skipped, Inf or NaN ({len(nan_steps)})"] == sorted(nan_steps)
    clipped = [number for number, record in enumerate(trainer.history.steps, 1) if record.grad_norm > max_grad_norm]
    assert lines[f"clipped ({len(clipped)})"] == clipped
    assert trainer.history.count(StepKind.CLIPPED) == len(clipped)


def test_file_is_a_png_of_the_stated_size(tmp_path: Path) -> None:
    before = dict(rcParams)
    path = tmp_path / picture.FILE_NAME
    picture.write(run_of(4, {2}, 1.3), Verification(3, 0, 0, 0, 0.0), path)
    content = path.read_bytes()
    assert content[:8] == b"\x89PNG\r\n\x1a\n"
    assert (int.from_bytes(content[16:20], "big"), int.from_bytes(content[20:24], "big")) == (1500, 990)
    assert dict(rcParams) == before


@given(values=st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=60))
def test_running_median_begins_with_the_first_value(values: list[float]) -> None:
    curve = picture.smoothed(values)
    assert len(curve) == max(1, len(values) - 4)
    assert curve[0] == pytest.approx(values[0], abs=1e-9)  # of sums with mirrored values
    for index in range(8, len(values) - 8):
        assert curve[index] == statistics.median(values[index - 8 : index + 9])


def test_running_median_ignores_one_bad_batch() -> None:
    values = [3.0] * 20
    values[10] = values[-1] = 700.0
    assert picture.smoothed(values) == [3.0] * 16
