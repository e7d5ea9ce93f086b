"""`superadam train`, as a person types it: the files and figures it leaves, and what it refuses."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from training_runs import OPTIONS, are_same, one_torch_thread, read_report, train, write_text

from superadam.training import checkpoint, verification
from superadam.training.verification import Reference


@pytest.fixture(autouse=True)
def _one_torch_thread() -> Iterator[None]:
    with one_torch_thread():
        yield


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_verified_run_leaves_its_files_and_figures(
    dtype: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, report_path = tmp_path / "out", tmp_path / "figures" / "report.json"
    words = (*OPTIONS, "--dtype", dtype, "--text", write_text(tmp_path), "--out", out, "--report", report_path)
    assert train(*words, "--verify", "--inject-nan", 3, "--inject-nan", 5) == 0
    assert sorted(os.listdir(out)) == ["checkpoint.pt", "training.png"]
    report = read_report(report_path)
    assert (report["steps"], report["skipped"], report["threads"], report["dtype"]) == (8, 2, 1, dtype)
    assert min(report["committed"], report["clipped"]) >= 1
    parameters = report["parameters"]
    assert report["elements"] == 3 * parameters
    assert report["elements_differing"] == 0
    assert report["norm_max_relative_difference"] <= 1e-10
    tensors = len(torch.load(out / "checkpoint.pt", weights_only=True)["model"])
    assert report["respeculated"] == report["clipped"] * tensors
    assert report["dropped"] == 2 * tensors
    printed = capsys.readouterr().out
    for word in ("committed", "clipped", "skipped", "respeculated", "dropped", "tokens/s", "isa", "threads"):
        assert word in printed
    assert f"verified: 0 of {3 * parameters:,} fp32 elements" in printed


def test_plain_run_has_the_same_bits_and_speculates_nothing(tmp_path: Path) -> None:
    text = write_text(tmp_path)
    for name in ("speculative", "plain"):
        plain = ["--plain"] if name == "plain" else []
        words = (*OPTIONS, "--text", text, "--out", tmp_path / name, "--report", tmp_path / f"{name}.json", *plain)
        assert train(*words, "--verify", "--inject-nan", 2) == 0
    first, second = (checkpoint.read(tmp_path / name) for name in ("speculative", "plain"))
    assert are_same([first["model"], first["optimizer"]], [second["model"], second["optimizer"]])
    report = read_report(tmp_path / "plain.json")
    assert (report["respeculated"], report["dropped"]) == (0, 0)


def test_stopped_and_continued_run_is_the_run_that_never_stopped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = write_text(tmp_path)
    words = (*OPTIONS, "--text", text, "--inject-nan")
    assert train(*words, 6, "--out", tmp_path / "whole", "--report", tmp_path / "whole.json") == 0
    assert train(*OPTIONS, "--text", text, "--out", tmp_path / "parts", "--stop-at", 3) == 0
    assert f"go on with: superadam train --resume {tmp_path / 'parts'}" in capsys.readouterr().out
    resumed = ("--resume", tmp_path / "parts", "--verify", "--inject-nan", 6, "--report", tmp_path / "parts.json")
    assert train(*resumed) == 0
    whole, parts = (checkpoint.read(tmp_path / name) for name in ("whole", "parts"))
    for key in ("settings", "model", "optimizer", "schedule", "batches", "random"):
        assert are_same(whole[key], parts[key]), key
    one, other = (read_report(tmp_path / f"{name}.json") for name in ("whole", "parts"))
    for key in ("steps", "committed", "clipped", "skipped", "respeculated", "dropped", "losses", "grad_norms"):
        assert one[key] == other[key], key
    assert (other["sessions"], other["elements_differing"]) == (2, 0)


def test_finished_run_goes_on_with_more_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train(*OPTIONS, "--text", write_text(tmp_path), "--out", tmp_path / "run") == 0
    assert train("--resume", tmp_path / "run") == 2
    assert "complete at step 8; give a larger --steps" in capsys.readouterr().err
    assert train("--resume", tmp_path / "run", "--steps", 10, "--out", tmp_path / "longer", "--verify") == 0
    assert len(checkpoint.read(tmp_path / "longer")["history"]["steps"]) == 10


def test_checkpoint_is_also_written_on_the_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved = []
    save = checkpoint.save
    monkeypatch.setattr(
        checkpoint, "save", lambda trainer, out: saved.append(len(trainer.history.steps)) or save(trainer, out)
    )
    assert train(*OPTIONS, "--text", write_text(tmp_path), "--out", tmp_path / "run", "--save-every", 3) == 0
    assert saved == [3, 6, 8]


@pytest.mark.parametrize("fault", ["lr", "norm"])
def test_difference_ends_with_status_one(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if fault == "lr":
        exact = verification._hyperparameters
        monkeypatch.setattr(
            verification, "_hyperparameters", lambda group: {**exact(group), "lr": exact(group)["lr"] * 1.00001}
        )
    else:
        compare = Reference._compare_verdict
        monkeypatch.setattr(
            Reference,
            "_compare_verdict",
            lambda self, outcome, is_finite, norm: compare(self, outcome, is_finite, norm * (1 + 1e-9)),
        )
    words = (*OPTIONS, "--text", write_text(tmp_path), "--out", tmp_path / "run", "--report", tmp_path / "report.json")
    assert train(*words, "--verify") == 1
    assert "NOT verified" in capsys.readouterr().out
    report = read_report(tmp_path / "report.json")
    assert (report["elements_differing"] > 0) is (fault == "lr")
    assert (report["norm_max_relative_difference"] > 1e-10) is (fault == "norm")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--text", "missing.txt"], "cannot read --text missing.txt"),
        (["--text", "short.txt"], "short.txt holds 5 bytes"),
        (["--steps", "0"], "--steps is 0"),
        (["--steps", "-3"], "--steps is -3"),
        (["--lr", "nan"], "--lr is nan"),
        (["--lr", "inf"], "--lr is inf"),
        (["--max-grad-norm", "nan"], "--max-grad-norm is nan"),
        (["--threads", "0"], "--threads is 0"),
        (["--width", "15"], "--width is 15"),
        (["--device", "abacus"], "--device abacus is not available"),
        (["--device", "meta"], "--device meta is not available"),
        (["--device", "cuda:99"], "--device cuda:99 is not available"),
        (["--out", "short.txt"], "short.txt is not a folder"),
        (["--out", "short.txt/below"], "short.txt is not a folder"),
        (["--report", "short.txt/report.json"], "short.txt is not a folder"),
        (["--report", "."], "--report . is a folder"),
        (["--inject-nan", "9"], "--inject-nan is 9; expected a step from 1 to 8"),
        (["--inject-nan", "0"], "--inject-nan is 0; expected a step from 1 to 8"),
        (["--stop-at", "0"], "--stop-at is 0"),
        (["--save-every", "0"], "--save-every is 0"),
        (["--resume", "nowhere"], "--resume nowhere holds no checkpoint.pt"),
        (["--resume", "damaged"], "is damaged or no checkpoint"),
    ],
)
def test_bad_input_is_one_sentence_and_writes_nothing(
    words: list[str],
    sentence: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    write_text(tmp_path)
    (tmp_path / "short.txt").write_text("short")
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "checkpoint.pt").write_bytes(b"PK\x03\x04 and then nothing")
    before = sorted(tmp_path.rglob("*"))
    assert train(*OPTIONS, "--text", "sentences.txt", *words) == 2
    captured = capsys.readouterr()
    assert sentence in captured.err
    assert captured.err.count("\n") == 1
    assert not captured.out
    assert sorted(tmp_path.rglob("*")) == before


def test_resumed_run_refuses_to_become_another(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run"
    assert train(*OPTIONS, "--text", write_text(tmp_path), "--out", out, "--stop-at", 2) == 0
    before = (out / "checkpoint.pt").read_bytes()
    capsys.readouterr()
    for words, sentence in (
        (["--width", 32], "--width 16, not 32"),
        (["--dtype", "fp32"], "--dtype bf16, not fp32"),
        (["--text", __file__], "was trained on other bytes"),
        (["--stop-at", 2], "--stop-at is 2; expected a step after 2"),
        (["--inject-nan", 1], "--inject-nan is 1; expected a step from 3 to 8"),
    ):
        assert train("--resume", out, *words) == 2
        captured = capsys.readouterr()
        assert sentence in captured.err
        assert captured.err.count("\n") == 1
    assert (out / "checkpoint.pt").read_bytes() == before


@pytest.mark.parametrize("module", ["rich", "matplotlib"])
def test_missing_extra_is_one_sentence(
    module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.chdir(tmp_path)
    assert train(*OPTIONS) == 2
    error = capsys.readouterr().err
    assert error == f"superadam: 'superadam train' needs {module}; install it with: pip install 'superadam[cli]'\n"
    assert os.listdir(tmp_path) == []


@pytest.mark.subprocess
def test_ctrl_c_saves_and_the_run_goes_on(tmp_path: Path) -> None:
    script = Path(sys.executable).with_name("superadam")
    environment = {**os.environ, "PYTHONSAFEPATH": "1", "PYTHONUNBUFFERED": "1"}
    options = [*OPTIONS, "--steps", "100000", "--text", str(write_text(tmp_path)), "--out", str(tmp_path / "run")]
    process = subprocess.Popen(
        [str(script), "train", *options, "--inject-nan", "2"],
        stdout=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        env=environment,
    )
    assert process.stdout is not None
    for line in process.stdout:
        if "skipped" in line:  # the second step, which is always told of
            process.send_signal(signal.SIGINT)
            break
    printed = process.stdout.read()
    assert process.wait(timeout=120) == 128 + signal.SIGINT
    history = checkpoint.read(tmp_path / "run")["history"]
    done = len(history["steps"])
    assert 2 <= done < 100000
    assert f"stopped by SIGINT after step {done} of 100000" in printed
    words = ("--resume", tmp_path / "run", "--steps", done + 2, "--report", tmp_path / "report.json")
    assert train(*words) == 0
    assert json.loads((tmp_path / "report.json").read_text())["steps"] == done + 2
