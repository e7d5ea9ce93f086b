"""`superadam.cli.train.report`: the figures add up, are valid JSON, and a difference is a failure."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest
from support.training_runs import read_report, tiny_trainer

from superadam.cli.train.report import Report
from superadam.cli.train.verification import NORM_TOLERANCE, Verification

pytestmark = pytest.mark.usefixtures("one_torch_thread")


GOOD = Verification(300, 0, 0, 0, 1e-15)


def report_of(verification: Verification | None, *, overlap: bool = True) -> Report:
    with tiny_trainer(max_grad_norm=math.inf, overlap=overlap) as trainer:
        trainer.measure_held_out()
        for number in range(4):
            trainer.step(inject_nan=number == 2)
        trainer.measure_held_out()
    return Report.of(trainer, verification)


def test_unverified_report_says_so_and_is_no_failure(tmp_path: Path) -> None:
    report = report_of(None)
    assert not report.is_failed
    report.write(tmp_path / "report.json")
    values = read_report(tmp_path / "report.json")
    checks = ("elements", "elements_differing", "norm_max_relative_difference")
    assert [values[key] for key in checks] == [None] * 3
    assert values["steps"] == values["committed"] + values["clipped"] + values["skipped"] == 4
    assert values["max_grad_norm"] is None  # JSON has no infinity
    assert values["grad_norms"][2] is None  # nor NaN
    assert values["final_loss"] == values["losses"][-1]
    assert values["held_out_loss"] < values["held_out_loss_before"]
    assert values["seconds"] > 0.0
    assert {"isa", "threads", "dtype", "parameters", "tokens_per_second", "versions"} <= values.keys()
    assert [values[key] for key in ("model", "checkpointing", "batch", "seq")] == ["bytes", False, 2, 16]


def test_overlap_is_told_in_buckets_and_seconds() -> None:
    report = report_of(None)
    assert (report.overlap, report.buckets, report.resident_buckets) == (True, 4 * 3, 0)
    assert report.placement == {"gpu_buckets": 0, "bucket_numel": 2000, "transfer_dtype": None, "num_threads": 1}
    outcomes = (report.speculated_buckets, report.waiting_buckets)
    assert outcomes == (9, 3)  # the first step makes the state, and is not speculated on
    assert report.given_back_gradients == 0
    assert 2 * report.parameters <= report.shadow_bytes < 2 * (report.parameters + 64 * 9)  # each tensor is aligned
    assert report.hidden_seconds >= 0.0
    assert report.hidden_share == report.hidden_seconds / (report.hidden_seconds + report.optimizer_seconds)
    assert report.peak_host_bytes > 0
    assert report.peak_device_bytes is None


def test_report_without_overlap_has_nothing_hidden() -> None:
    report = report_of(None, overlap=False)
    assert (report.overlap, report.placement, report.buckets) == (False, None, 0)
    assert (report.respeculated, report.dropped) == (0, 0)
    assert (report.hidden_seconds, report.hidden_share) == (0.0, 0.0)
    assert 0.0 < report.optimizer_seconds < report.seconds


def test_verified_report_holds_what_was_found() -> None:
    report = report_of(GOOD)
    assert not report.is_failed
    for name, value in dataclasses.asdict(GOOD).items():
        assert getattr(report, name) == value


@pytest.mark.parametrize(
    "change",
    [
        {"elements_differing": 1},
        {"parameters_differing": 1},
        {"verdicts_differing": 1},
        {"norm_max_relative_difference": 2 * NORM_TOLERANCE},
        {"norm_max_relative_difference": math.nan},
    ],
)
def test_any_difference_is_a_failure(change: dict[str, float]) -> None:
    assert report_of(dataclasses.replace(GOOD, **change)).is_failed  # type: ignore[arg-type]
