"""`superadam train`, as a person types it: the files and figures it leaves, what stops it, and what it refuses."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from support.children import exit_code_of_child
from support.training_runs import BUCKETS, OPTIONS, SENTENCES, are_same, read_report, train, write_text

from superadam import OffloadScheduler
from superadam.cli.train import checkpoint, command, session, verification
from superadam.cli.train.loop import Trainer
from superadam.cli.train.presets import PRESETS
from superadam.cli.train.verification import Reference
from superadam.cli.usage import UsageError
from superadam.host.files import locked
from superadam.host.memory import HostMemory

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_torch_thread")]


def content_of(folder: Path) -> dict[str, Any]:
    """Return what is alike in the checkpoints of two runs with the same bits."""
    _, content = checkpoint.read(folder)
    return {key: content[key] for key in ("model", "optimizer", "batches")}


@pytest.mark.parametrize(("dtype", "moments"), [("bf16", "fp32"), ("fp32", "fp32"), ("bf16", "bf16")])
def test_verified_run_leaves_its_files_and_figures(
    dtype: str, moments: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, report_path = tmp_path / "out", tmp_path / "figures" / "report.json"
    words = (*OPTIONS, "--dtype", dtype, "--moments", moments, "--text", write_text(tmp_path), "--out", out)
    assert train(*words, "--report", report_path, "--verify", "--inject-nan", 3, "--inject-nan", 5) == 0
    assert sorted(os.listdir(out)) == [".lock", "checkpoint.pt", "training.png"]
    report = read_report(report_path)
    assert (report["steps"], report["skipped"], report["threads"], report["dtype"]) == (8, 2, 1, dtype)
    assert report["moments"] == moments
    assert min(report["committed"], report["clipped"]) >= 1
    parameters = report["parameters"]
    assert report["elements"] == 3 * parameters
    assert report["elements_differing"] == 0
    assert report["norm_max_relative_difference"] <= 1e-10
    saved = torch.load(out / "checkpoint.pt", weights_only=True)
    kinds = {(entry["exp_avg"].dtype, entry["exp_avg_sq"].dtype) for entry in saved["optimizer"]["state"].values()}
    assert kinds == {(torch.bfloat16 if moments == "bf16" else torch.float32,) * 2}
    tensors = len(saved["model"])
    assert report["buckets"] == 8 * (BUCKETS - (dtype == "fp32"))
    assert report["speculated_buckets"] + report["waiting_buckets"] == report["buckets"]
    assert report["given_back_gradients"] == 0
    if dtype == "bf16":
        assert report["accepted"] > 0
        assert 1 <= report["dropped"] <= 2 * tensors
    else:  # own masters are only summed during backward
        assert (report["respeculated"], report["dropped"], report["shadow_bytes"]) == (0, 0, 0)
        assert report["waiting_buckets"] == report["buckets"]
    assert (report["downloaded_bytes"], report["uploaded_bytes"], report["peak_device_bytes"]) == (0, 0, None)
    kind = "fp32 " if moments == "fp32" else ""
    assert f"verified: 0 of {3 * parameters:,} {kind}elements" in capsys.readouterr().out


def test_overlap_changes_no_bit(tmp_path: Path) -> None:
    found = []
    for options in ((), ("--no-overlap",)):
        out, report = tmp_path / f"run{len(found)}", tmp_path / "report.json"
        places = ("--text", write_text(tmp_path), "--out", out, "--report", report)
        assert train(*OPTIONS, *places, *options, "--verify", "--inject-nan", 2) == 0
        found.append((read_report(report), content_of(out)))
    (first, whole), (plain, run) = found
    assert (plain["losses"], plain["held_out_loss"]) == (first["losses"], first["held_out_loss"])
    assert are_same(whole, run)
    assert (first["buckets"], first["overlap"], plain["buckets"], plain["overlap"]) == (8 * BUCKETS, True, 0, False)
    assert (plain["respeculated"], plain["dropped"], plain["hidden_share"]) == (0, 0, 0.0)


def test_trace_holds_the_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "traces" / "trace.json"
    assert train(*OPTIONS, "--text", write_text(tmp_path), "--out", tmp_path / "run", "--trace", path) == 0
    assert str(path) in capsys.readouterr().out
    names = [event["name"] for event in json.loads(path.read_text())["traceEvents"]]
    assert sum(name.startswith("verdict: ") for name in names) == 8
    assert {"backward and step", "adam"} <= set(names)
    assert os.listdir(path.parent) == ["trace.json"]


def test_file_that_cannot_be_written_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(self: OffloadScheduler, path: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(OffloadScheduler, "export_trace", refuse)
    words = (*OPTIONS, "--text", write_text(tmp_path), "--out", tmp_path / "run", "--trace", tmp_path / "trace.json")
    before = threading.enumerate()
    assert train(*words) == 2
    sentence = f"superadam: cannot write {tmp_path / 'trace.json'}: No space left on device; free some space or choose"
    assert capsys.readouterr().err.startswith(sentence)
    assert threading.enumerate() == before


def killed_in(step: int, words: tuple[object, ...]) -> None:
    """Train, and kill this process in the middle of a step."""
    begin = Trainer.step

    def step_or_die(trainer: Trainer, *, inject_nan: bool = False) -> Any:
        if len(trainer.history.steps) + 1 == step:
            trainer.model.tokens.weight.register_hook(lambda _: os.kill(os.getpid(), signal.SIGKILL))  # type: ignore[no-untyped-call]
        return begin(trainer, inject_nan=inject_nan)

    Trainer.step = step_or_die  # type: ignore[method-assign]
    train(*words)


@pytest.mark.parametrize("moments", ["fp32", "bf16"])
def test_killed_and_continued_run_is_the_run_that_never_stopped(moments: str, tmp_path: Path) -> None:
    text = write_text(tmp_path)
    words, whole, parts = (*OPTIONS, "--text", text, "--moments", moments), tmp_path / "whole", tmp_path / "parts"
    assert train(*words, "--inject-nan", 6, "--out", whole, "--report", tmp_path / "whole.json") == 0
    child = (*words, "--out", parts, "--save-every", 2)
    assert exit_code_of_child(lambda: killed_in(6, child)) == -signal.SIGKILL
    assert sorted(os.listdir(parts)) == [".lock", "checkpoint.pt"]
    assert len(checkpoint.read(parts)[1]["history"]["steps"]) == 4
    resumed = ("--resume", parts, "--verify", "--inject-nan", 6, "--report", tmp_path / "parts.json")
    assert train(*resumed) == 0
    assert are_same(content_of(whole), content_of(parts))
    reports = [read_report(tmp_path / f"{name}.json") for name in ("whole", "parts")]
    for key in ("losses", "held_out_loss_before", "held_out_loss", "steps", "skipped"):
        assert reports[0][key] == reports[1][key]
    assert (reports[1]["sessions"], reports[1]["elements_differing"]) == (2, 0)


def test_resume_auto_starts_and_continues_and_ends(tmp_path: Path) -> None:
    """With the same words each time, as a scheduler repeats them."""
    whole, out = tmp_path / "whole", tmp_path / "run"
    words = (*OPTIONS, "--text", write_text(tmp_path))
    assert train(*words, "--out", whole) == 0
    again = (*words, "--out", out, "--save-every", 2, "--resume", "auto")
    for step, done in ((2, 0), (4, 2), (8, 6)):  # before the first save; after it; and again
        assert exit_code_of_child(lambda: killed_in(step, again)) == -signal.SIGKILL  # noqa: B023
        assert (len(checkpoint.read(out)[1]["history"]["steps"]) if done else 0) == done
    assert train(*again) == 0
    assert are_same(content_of(whole), content_of(out))
    assert checkpoint.read(out)[1]["history"]["sessions"] == 3
    assert train(*again) == 2  # it is complete


def test_folder_called_auto_is_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = (*OPTIONS, "--text", write_text(tmp_path))
    assert train(*words, "--out", "auto") == 0
    assert train(*words, "--resume", "./auto", "--steps", 10) == 0
    assert len(checkpoint.read(tmp_path / "auto")[1]["history"]["steps"]) == 10
    assert not (tmp_path / "superadam-run").exists()


def test_folder_that_holds_another_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words, out, other = (*OPTIONS, "--text", write_text(tmp_path)), tmp_path / "run", tmp_path / "other"
    assert train(*words, "--out", out) == 0
    assert train(*words, "--out", other) == 0
    saved = (out / "checkpoint.pt").read_bytes()
    capsys.readouterr()
    for more in ([], ["--resume", other, "--steps", 10]):
        assert train(*words, "--out", out, *more) == 2
        printed = capsys.readouterr()
        sentence = (
            f"superadam: --out {out} holds another run; continue it with --resume {out}, or choose another folder\n"
        )
        assert printed == ("", sentence)
    assert train(*words, "--out", out, "--no-save") == 0
    assert (out / "checkpoint.pt").read_bytes() == saved
    assert train(*words, "--out", out, "--resume", tmp_path / "other" / ".." / "run", "--steps", 10) == 0


def test_folder_in_which_another_run_is_at_work_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "LOCK_SECONDS", 0.2)
    out = tmp_path / "run"
    out.mkdir()
    words = (*OPTIONS, "--text", write_text(tmp_path), "--out", out, "--resume", "auto")
    with locked(out / ".lock", 0):
        assert train(*words) == 2
        assert f"another run is at work in --out {out}; end it, or choose another folder" in capsys.readouterr().err
        assert train(*words, "--no-save") == 0
    assert train(*words) == 0


def test_run_that_was_overtaken_before_its_first_step_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out, words = tmp_path / "run", (*OPTIONS, "--text", write_text(tmp_path))
    assert train(*words, "--out", tmp_path / "other") == 0
    read = command.Text.read

    def read_late(*arguments: Any) -> Any:
        shutil.copytree(tmp_path / "other", out)
        return read(*arguments)

    monkeypatch.setattr(command.Text, "read", read_late)
    assert train(*words, "--out", out) == 2
    assert capsys.readouterr().err.endswith(
        f"superadam: another run has just saved in --out {out}; continue it with --resume {out}\n"
    )


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_finishes_the_step_saves_and_the_run_goes_on(
    number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    step, out = Trainer.step, tmp_path / "run"

    def acting(trainer: Trainer, *, inject_nan: bool = False) -> Any:
        if len(trainer.history.steps) == 2:
            os.kill(os.getpid(), number)
        return step(trainer, inject_nan=inject_nan)

    before = [signal.getsignal(one) for one in session.SIGNALS]
    with monkeypatch.context() as patched:
        patched.setattr(Trainer, "step", acting)
        assert train(*OPTIONS, "--text", write_text(tmp_path), "--out", out) == 128 + number
    assert [signal.getsignal(one) for one in session.SIGNALS] == before
    printed = capsys.readouterr().out.replace("\n", " ")
    assert f"stopped by {number.name} after step 3 of 8; go on with: superadam train --resume {out}" in printed
    assert train("--resume", out, "--verify") == 0
    assert len(checkpoint.read(out)[1]["history"]["steps"]) == 8


def test_second_signal_ends_the_process() -> None:
    def work() -> None:
        with session._signals():
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGTERM)

    assert exit_code_of_child(work) == -signal.SIGTERM


@pytest.mark.subprocess
def test_ctrl_c_to_the_command_stops_and_saves(tmp_path: Path) -> None:
    script = Path(sys.executable).with_name("superadam")
    options = [*OPTIONS, "--steps", "100000", "--text", str(write_text(tmp_path)), "--out", "run", "--inject-nan", "2"]
    environment = {**os.environ, "PYTHONSAFEPATH": "1", "PYTHONUNBUFFERED": "1"}
    words = [str(script), "train", *options]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, cwd=tmp_path, env=environment) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if "skipped" in line:  # the second step, which is always told of
                process.send_signal(signal.SIGINT)
                break
        printed = process.stdout.read()
    assert process.returncode == 128 + signal.SIGINT
    done = len(checkpoint.read(tmp_path / "run")[1]["history"]["steps"])
    assert 2 <= done < 100000
    assert f"stopped by SIGINT after step {done} of 100000" in printed


def test_finished_run_goes_on_with_more_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train(*OPTIONS, "--text", write_text(tmp_path), "--out", tmp_path / "run") == 0
    assert train("--resume", tmp_path / "run") == 2
    assert "complete at step 8; give a larger --steps" in capsys.readouterr().err
    assert train("--resume", tmp_path / "run", "--steps", 10, "--out", tmp_path / "longer", "--verify") == 0
    assert len(checkpoint.read(tmp_path / "longer")[1]["history"]["steps"]) == 10


def test_run_without_a_checkpoint_leaves_none(tmp_path: Path) -> None:
    assert train(*OPTIONS, "--text", write_text(tmp_path), "--out", tmp_path / "run", "--no-save") == 0
    assert os.listdir(tmp_path / "run") == ["training.png"]


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), MemoryError()])
def test_memory_that_does_not_suffice_is_one_sentence(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(self: Trainer, *, inject_nan: bool = False) -> None:
        raise error

    monkeypatch.setattr(Trainer, "step", refuse)
    assert train(*OPTIONS, "--text", write_text(tmp_path), "--out", tmp_path / "run") == 2
    printed = capsys.readouterr().err
    assert "--model tiny with --batch 2 and --seq 16 does not fit in the memory of cpu; choose a smaller" in printed
    assert printed.count("\n") == 1


@pytest.mark.parametrize("name", ["bytes", "4b"])
def test_run_whose_state_does_not_fit_is_refused_before_anything_is_allocated(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def allocate(*arguments: object, **options: object) -> None:
        raise UsageError("allocated")

    monkeypatch.setattr(command, "Trainer", allocate)
    (tmp_path / "text").write_bytes(10 * SENTENCES)
    for verify, each in (((), 14), (("--verify",), 30)):
        needed = each * PRESETS[name].shape.parameters
        for available in (needed, needed - 1):
            memory = HostMemory(10**13, available, available)
            monkeypatch.setattr(HostMemory, "of", lambda host, memory=memory: memory)
            assert train("--model", name, "--text", tmp_path / "text", "--out", tmp_path, *verify) == 2
            printed = capsys.readouterr().err
            refused = f"superadam: --model {name} needs about {needed / 1e9:,.2f} GB of host memory, but"
            assert printed.startswith("superadam: allocated" if available == needed else refused)
            assert printed.count("\n") == 1


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


BAD = [
    (["--text", "missing.txt"], "cannot read --text missing.txt"),
    (["--text", "short.txt"], "short.txt holds 5 bytes"),
    (["--steps", "0"], "argument --steps: 0 is not an integer from 1 to 2147483647"),
    (["--steps", "many"], "argument --steps: many is not an integer"),
    (["--lr", "nan"], "argument --lr: nan is not a finite number above 0"),
    (["--lr", "inf"], "argument --lr: inf is not a finite number above 0"),
    (["--lr", "0"], "argument --lr: 0 is not a finite number above 0"),
    (["--max-grad-norm", "nan"], "argument --max-grad-norm: nan is not a number above 0"),
    (["--seed", str(2**63)], f"argument --seed: {2**63} is not an integer from 0"),
    (["--model", "8b"], "argument --model: invalid choice: '8b'"),
    (["--device", "abacus"], "--device abacus is not available"),
    (["--device", "meta"], "--device meta is not available"),
    (["--device", "cuda:99"], "--device cuda:99 is not available"),
    (["--out", "short.txt"], "--out needs the folder short.txt, but short.txt is not a folder"),
    (["--out", "short.txt/below"], "short.txt is not a folder"),
    (["--report", "short.txt/report.json"], "--report needs the folder short.txt, but short.txt is not a folder"),
    (["--report", "."], "--report . is no regular file"),
    (["--trace", "pipe"], "--trace pipe is no regular file"),
    (["--trace", "trace.json", "--no-overlap"], "--trace needs an overlapped run"),
    (["--inject-nan", "9"], "--inject-nan is 9; expected a step from 1 to 8"),
    (["--save-every", "0"], "argument --save-every: 0 is not an integer from 1"),
    (["--save-every", "2", "--no-save"], "--save-every and --no-save were both given"),
    (["--resume", "nowhere"], "--resume nowhere holds no checkpoint.pt"),
    (["--resume", "damaged"], "is damaged or no checkpoint"),
]


@pytest.mark.parametrize(("words", "sentence"), BAD, ids=[" ".join(words)[:40] for words, _ in BAD])
def test_bad_input_is_one_sentence_and_writes_nothing(
    words: list[str], sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_text(tmp_path)
    (tmp_path / "short.txt").write_text("short")
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "checkpoint.pt").write_bytes(b"PK\x03\x04 and then nothing")
    os.mkfifo("pipe")
    before = sorted(tmp_path.rglob("*"))
    try:
        status: object = train(*OPTIONS, "--text", "sentences.txt", *words)
    except SystemExit as error:  # of argparse
        status = error.code
    captured = capsys.readouterr()
    assert status == 2
    assert sentence in captured.err
    assert captured.err.count("\n") == 1
    assert not captured.out
    assert sorted(tmp_path.rglob("*")) == before


def test_folder_without_write_permission_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # permissions do not bind root, who may run this test
    assert train(*OPTIONS, "--text", write_text(tmp_path), "--out", tmp_path / "new") == 2
    assert f"--out needs the folder {tmp_path / 'new'}, but {tmp_path} is not writable" in capsys.readouterr().err


def test_several_ranks_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.chdir(tmp_path)
    assert train(*OPTIONS) == 2
    assert capsys.readouterr().err == (
        "superadam: 'superadam train' is one process, and WORLD_SIZE is 2; on several ranks, train with "
        "examples/finetune.py under 'accelerate launch'\n"
    )
    assert os.listdir(tmp_path) == []


def test_resumed_run_refuses_to_become_another(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, saved = tmp_path / "run", tmp_path / "run" / "checkpoint.pt"
    assert train(*OPTIONS, "--text", write_text(tmp_path), "--out", out) == 0
    before = saved.read_bytes()
    capsys.readouterr()
    for words, sentence in (
        (["--model", "10m"], "--model tiny, not 10m"),
        (["--dtype", "fp32"], "--dtype bf16, not fp32"),
        (["--text", __file__], "was trained on other bytes"),
        (["--steps", 9, "--inject-nan", 1], "--inject-nan is 1; expected a step from 9 to 9"),
    ):
        assert train("--resume", out, *words) == 2
        captured = capsys.readouterr()
        assert sentence in captured.err
        assert captured.err.count("\n") == 1
    assert saved.read_bytes() == before
