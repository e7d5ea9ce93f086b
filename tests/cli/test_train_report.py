"""`superadam.cli.train.report`: the figures add up, are valid JSON, and say what was verified."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
from support.training_runs import BUCKETS, read_report, tiny_trainer

from superadam.cli.train import report
from superadam.cli.train.verification import Verification

pytestmark = pytest.mark.usefixtures("one_torch_thread")

GOOD = Verification(300, 0, 0, 0, 1e-15)


def report_of(folder: Path, found: Verification | None, *, overlap: bool = True) -> dict[str, Any]:
    with tiny_trainer(max_grad_norm=math.inf, overlap=overlap) as trainer:
        trainer.measure_held_out()
        for number in range(4):
            trainer.step(inject_nan=number == 2)
        trainer.measure_held_out()
        report.write(trainer, found, folder / "report.json")
    return read_report(folder / "report.json")


def test_unverified_report_says_so(tmp_path: Path) -> None:
    values = report_of(tmp_path, None)
    assert [values[field.name] for field in dataclasses.fields(Verification)] == [None] * 5
    assert values["steps"] == values["committed"] + values["clipped"] + values["skipped"] == 4
    assert values["max_grad_norm"] is None  # JSON has no infinity
    assert values["grad_norms"][2] is None  # nor NaN
    assert values["final_loss"] == values["losses"][-1]
    assert values["held_out_loss"] < values["held_out_loss_before"]
    assert values["seconds"] > 0.0
    assert {"isa", "dtype", "tokens_per_second", "versions", "device"} <= values.keys()
    assert [values[key] for key in ("model", "checkpointing", "batch", "seq", "text")] == [
        *("tiny", False, 2, 16, "sentences")
    ]


def test_overlap_is_told_in_buckets_and_seconds(tmp_path: Path) -> None:
    values = report_of(tmp_path, GOOD)
    for name, value in dataclasses.asdict(GOOD).items():
        assert values[name] == value
    assert (values["overlap"], values["buckets"], values["resident_buckets"]) == (True, 4 * BUCKETS, 0)
    assert values["placement"] == {"gpu_buckets": 0, "bucket_numel": 863, "transfer_dtype": None, "num_threads": 1}
    outcomes = (values["speculated_buckets"], values["waiting_buckets"])
    # Neither the first step, which makes the state, nor the piece that comes after that with a NaN is speculated on.
    assert outcomes == (3 * BUCKETS - 1, BUCKETS + 1)
    assert 2 * values["parameters"] <= values["shadow_bytes"] < 2 * (values["parameters"] + 64 * 13)  # aligned
    hidden, work = values["hidden_seconds"], values["work_seconds"]
    assert work == hidden + values["waited_seconds"] + values["hook_seconds"] + values["step_seconds"]
    assert values["hidden_share"] == hidden / work < 1.0
    assert values["peak_host_bytes"] > 0
    assert values["peak_device_bytes"] is None


def test_report_without_overlap_has_nothing_hidden(tmp_path: Path) -> None:
    values = report_of(tmp_path, None, overlap=False)
    assert [values[key] for key in ("overlap", "placement", "buckets", "respeculated", "dropped")] == [
        *(False, None, 0, 0, 0)
    ]
    assert (values["hidden_seconds"], values["hidden_share"]) == (0.0, 0.0)
    assert 0.0 < values["optimizer_seconds"] < values["seconds"]
