"""`superadam train`, as a person types it: the files and figures it leaves, and what it refuses."""

from __future__ import annotations

import errno
import json
import logging
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from support.training_runs import OPTIONS, SENTENCES, TINY_SHAPE, are_same, read_report, train, write_text

from superadam import OffloadScheduler
from superadam.cli.train import checkpoint, command, verification
from superadam.cli.train.loop import Trainer
from superadam.cli.train.memory import needed_bytes
from superadam.cli.train.presets import PRESETS, Preset
from superadam.cli.train.settings import Settings
from superadam.cli.train.verification import Reference
from superadam.cli.usage import UsageError
from superadam.host.memory import HostMemory

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_torch_thread")]


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
    assert report["buckets"] == 8 * 3
    assert report["speculated_buckets"] + report["waiting_buckets"] == report["buckets"]
    assert report["given_back_gradients"] == 0
    if dtype == "bf16":
        assert 0 < report["respeculated"] <= report["clipped"] * tensors
        assert 1 <= report["dropped"] <= 2 * tensors
        assert 2 * parameters <= report["shadow_bytes"] < 2 * (parameters + 64 * tensors)  # each tensor is aligned
    else:  # own masters are only summed during backward
        assert (report["respeculated"], report["dropped"], report["shadow_bytes"]) == (0, 0, 0)
        assert report["waiting_buckets"] == report["buckets"]
    assert (report["downloaded_bytes"], report["uploaded_bytes"], report["peak_device_bytes"]) == (0, 0, None)
    assert f"verified: 0 of {3 * parameters:,} fp32 elements" in capsys.readouterr().out


def test_overlap_and_the_size_of_buckets_are_chosen_and_change_no_bit(tmp_path: Path) -> None:
    words = [word for word in OPTIONS if word not in ("--bucket-numel", "2000")]
    found = []
    for options in ((), ("--no-overlap",), ("--bucket-numel", 2000)):
        places = ("--text", write_text(tmp_path), "--out", tmp_path / "run", "--report", tmp_path / "report.json")
        assert train(*words, *places, *options, "--verify", "--inject-nan", 2) == 0
        found.append((read_report(tmp_path / "report.json"), checkpoint.read(tmp_path / "run")))
    (first, whole), *others = found
    for report, run in others:
        assert (report["losses"], report["held_out_loss"]) == (first["losses"], first["held_out_loss"])
        assert all(are_same(whole[key], run[key]) for key in ("model", "optimizer", "batches", "random"))
    assert [report["buckets"] for report, _ in found] == [8, 0, 24]
    plain = found[1][0]
    assert (plain["overlap"], plain["respeculated"], plain["dropped"], plain["hidden_share"]) == (False, 0, 0, 0.0)


def test_trace_holds_the_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "traces" / "trace.json"
    assert train(*OPTIONS, "--text", write_text(tmp_path), "--out", tmp_path / "run", "--trace", path) == 0
    assert str(path) in capsys.readouterr().out
    names = [event["name"] for event in json.loads(path.read_text())["traceEvents"]]
    assert sum(name.startswith("verdict: ") for name in names) == 8
    assert {"backward and step", "adam"} <= set(names)
    assert os.listdir(path.parent) == ["trace.json"]


def test_trace_that_cannot_be_written_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(self: OffloadScheduler, path: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(OffloadScheduler, "export_trace", refuse)
    words = (*OPTIONS, "--text", write_text(tmp_path), "--out", tmp_path / "run", "--trace", tmp_path / "trace.json")
    before = threading.enumerate()
    assert train(*words) == 2
    assert f"cannot write {tmp_path / 'trace.json'}: No space left" in capsys.readouterr().err
    assert threading.enumerate() == before


def test_options_of_overlap_are_refused_without_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_text(tmp_path)
    options = [word for word in (*OPTIONS, "--text", "sentences.txt") if word not in ("--bucket-numel", "2000")]

    def refused(option: str, value: str, *words: str) -> bool:
        sentence = (
            f"{option} needs an overlapped run, and this one is --no-overlap; leave {option} out, or give --overlap"
        )
        return train(*words, option, value) == 2 and sentence in capsys.readouterr().err

    assert refused("--trace", "trace.json", *options, "--no-overlap")
    assert refused("--bucket-numel", "100", *options, "--no-overlap")
    assert refused("--num-threads", "1", *options, "--no-overlap")
    assert os.listdir() == ["sentences.txt"]
    assert train(*options, "--no-overlap", "--out", "run", "--stop-at", 2) == 0
    assert refused("--trace", "trace.json", "--resume", "run")  # a continued run stays as it was
    options = ("--bucket-numel", 100, "--num-threads", 2)
    assert train("--resume", "run", "--overlap", "--trace", "trace.json", *options) == 0


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
    for key in ("settings", "model", "optimizer", "batches", "random"):
        assert are_same(whole[key], parts[key]), key
    reports = [read_report(tmp_path / f"{name}.json") for name in ("whole", "parts")]
    assert reports[0]["losses"] == reports[1]["losses"]
    assert (reports[1]["sessions"], reports[1]["elements_differing"]) == (2, 0)


def test_finished_run_goes_on_with_more_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train(*OPTIONS, "--text", write_text(tmp_path), "--out", tmp_path / "run") == 0
    assert train("--resume", tmp_path / "run") == 2
    assert "complete at step 8; give a larger --steps" in capsys.readouterr().err
    assert train("--resume", tmp_path / "run", "--steps", 10, "--out", tmp_path / "longer", "--verify") == 0
    assert len(checkpoint.read(tmp_path / "longer")["history"]["steps"]) == 10


def test_run_without_a_checkpoint_leaves_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = (*OPTIONS, "--text", write_text(tmp_path), "--out", tmp_path / "run", "--stop-at", 2, "--no-save")
    assert train(*words) == 0
    assert os.listdir(tmp_path / "run") == ["training.png"]
    printed = capsys.readouterr().out
    assert "stopped after step 2 of 8" in printed
    assert "--resume" not in printed


def test_preset_has_defaults_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    preset = Preset(TINY_SHAPE, resembles="nothing", batch=3, seq=24, lr=0.125)
    monkeypatch.setitem(PRESETS, "10m", preset)
    words = ("--model", "10m", "--text", write_text(tmp_path), "--steps", 2, "--threads", 1, "--verify")
    chosen = ("--batch", 2, "--seq", 8, "--lr", 0.5, "--no-checkpointing")
    found = []
    for name, options in (("preset", ()), ("chosen", chosen)):
        report = tmp_path / f"{name}.json"
        assert train(*words, *options, "--out", tmp_path / name, "--report", report) == 0
        settings = checkpoint.settings_of(checkpoint.read(tmp_path / name), tmp_path)
        assert settings.shape == TINY_SHAPE
        found.append((settings.batch, settings.seq, settings.lr, settings.checkpointing))
        assert [read_report(report)[key] for key in ("model", "elements_differing")] == ["tiny", 0]
    assert found == [(3, 24, 0.125, True), (2, 8, 0.5, False)]
    assert train("--resume", tmp_path / "preset", "--steps", 4, "--no-checkpointing", "--verify") == 0
    settings = checkpoint.settings_of(checkpoint.read(tmp_path / "preset"), tmp_path)
    assert (settings.seq, settings.checkpointing) == (24, False)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), MemoryError()])
def test_memory_that_does_not_suffice_is_one_sentence(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(self: Trainer, *, inject_nan: bool = False) -> None:
        raise error

    monkeypatch.setattr(Trainer, "step", refuse)
    assert train(*OPTIONS, "--text", write_text(tmp_path), "--out", tmp_path / "run") == 2
    printed = capsys.readouterr().err
    words = (
        "--model bytes with --batch 2 and --seq 16 does not fit in the memory of cpu; choose --checkpointing, a small"
    )
    assert words in printed
    assert printed.count("\n") == 1


def refusal(available: int, *words: object, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    """Return what a run says that is refused before anything is allocated, or nothing if it is not."""

    def allocate(*arguments: object) -> None:
        raise UsageError("allocated")

    with monkeypatch.context() as patched:
        patched.setattr(HostMemory, "of", lambda host: HostMemory(10**13, available, available))
        patched.setattr(command, "Trainer", allocate)
        assert train(*words) == 2
    printed = capsys.readouterr().err
    assert printed.count("\n") == 1
    return "" if printed == "superadam: allocated\n" else printed


@pytest.mark.parametrize("name", ["bytes", *PRESETS])
def test_run_is_refused_exactly_where_it_does_not_fit(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    preset = PRESETS.get(name)
    changes = {} if preset is None else {"shape": preset.shape, "batch": preset.batch, "seq": preset.seq}
    settings = Settings(**changes, checkpointing=preset is not None)
    (tmp_path / "text").write_bytes(10 * SENTENCES)
    for words in ((), ("--verify",)):
        needed, _ = needed_bytes(settings, is_verified=bool(words))
        asked = ("--model", name, "--text", "text", *words)
        assert refusal(needed, *asked, monkeypatch=monkeypatch, capsys=capsys) == ""
        sentence = refusal(needed - 1, *asked, monkeypatch=monkeypatch, capsys=capsys)
        assert f"--model {name} with --batch {settings.batch} and --seq {settings.seq} needs about " in sentence
        figures = needed / 1e9, (needed - 1) / 1e9
        assert " {:,.2f} GB of host memory, but this process can have {:,.2f} GB at most; ".format(*figures) in sentence
        assert ("no --verify" in sentence) is bool(words)
    assert os.listdir() == ["text"]


def test_checkpoint_is_refused_where_it_and_its_run_do_not_fit(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert train(*OPTIONS, "--text", write_text(tmp_path), "--out", tmp_path / "run", "--stop-at", 2) == 0
    capsys.readouterr()
    size = os.path.getsize(tmp_path / "run" / checkpoint.FILE_NAME)
    resume = ("--resume", tmp_path / "run")
    with monkeypatch.context() as patched:
        patched.setattr(torch, "load", lambda *arguments, **options: pytest.fail("the checkpoint was read"))
        sentence = refusal(2 * size - 1, *resume, monkeypatch=monkeypatch, capsys=capsys)
    assert f"restoring {tmp_path / 'run' / 'checkpoint.pt'} needs about 0.00 GB of host memory" in sentence
    assert "restoring" not in refusal(2 * size, *resume, monkeypatch=monkeypatch, capsys=capsys)
    settings = checkpoint.settings_of(checkpoint.read(tmp_path / "run"), tmp_path)
    needed, _ = needed_bytes(settings, is_verified=False)
    left = needed - size  # the checkpoint, which is let go, is in memory meanwhile
    for limit, available, status, warnings in (
        (needed - 1, left, 2, 0),
        (needed, left, 0, 0),
        (needed, left - 1, 0, 1),
    ):
        memory = HostMemory(10**13, limit, available)
        with monkeypatch.context() as patched, caplog.at_level(logging.WARNING, "superadam"):
            patched.setattr(HostMemory, "of", lambda host, memory=memory: memory)
            assert train(*resume, "--stop-at", 3, "--no-save") == status
        assert ("--model bytes with --batch 2 and --seq 16 needs" in capsys.readouterr().err) is bool(status)
        assert ["--model bytes" in record.getMessage() for record in caplog.records] == [True] * warnings


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
        (["--report", "."], "--report . is no regular file"),
        (["--trace", "short.txt/trace.json"], "short.txt is not a folder"),
        (["--trace", "."], "--trace . is no regular file"),
        (["--bucket-numel", "0"], "--bucket-numel is 0"),
        (["--num-threads", "0"], "--num-threads is 0"),
        (["--gpu-buckets", "1"], "--gpu-buckets is 1; expected auto or 0 where --device is cpu"),
        *(([f"--{name}", str(2**63)], f"--{name} is {2**63}; expected an integer") for name in ("threads", "seed")),
        (["--width", "1" + 400 * "0"], "; expected an integer from 1 to 2147483647"),
        (["--inject-nan", "9"], "--inject-nan is 9; expected a step from 1 to 8"),
        (["--inject-nan", "0"], "--inject-nan is 0; expected a step from 1 to 8"),
        (["--stop-at", "0"], "--stop-at is 0"),
        (["--save-every", "0"], "--save-every is 0"),
        (["--save-every", "2", "--no-save"], "--save-every and --no-save were both given"),
        (["--model", "8b"], "--layers shapes the byte transformer, and this run has --model 8b"),
        (["--resume", "nowhere"], "--resume nowhere holds no checkpoint.pt"),
        (["--resume", "damaged"], "is damaged, changed or no checkpoint"),
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


def test_bucket_numel_is_a_number_or_auto(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        train("--bucket-numel", "some")
    assert "argument --bucket-numel: 'some' is neither auto nor an integer" in capsys.readouterr().err


def test_resumed_run_refuses_to_become_another(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run"
    assert train(*OPTIONS, "--text", write_text(tmp_path), "--out", out, "--stop-at", 2) == 0
    before = (out / "checkpoint.pt").read_bytes()
    capsys.readouterr()
    for words, sentence in (
        (["--width", 32], "--width 16, not 32"),
        (["--model", "10m"], "--model bytes, not 10m"),
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
