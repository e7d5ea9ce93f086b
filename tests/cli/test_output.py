"""`superadam.cli.main`: output that nothing takes is one sentence; without a reader, commands end quietly.

What was trained until then is saved. What happens when the interpreter ends needs a process of its own.
"""

from __future__ import annotations

import errno
import io
import itertools
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import pytest
from support.training_runs import OPTIONS, write_text

from superadam.cli.console import Console
from superadam.cli.doctor import memory
from superadam.cli.main import PIPE_STATUS, main

TRAIN = ["train", *OPTIONS, "--text", "sentences.txt", "--out", "run"]

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_torch_thread")]


@pytest.fixture(autouse=True)
def _text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_text(tmp_path)


@contextmanager
def stdout_into(stream: IO[bytes], encoding: str = "utf-8") -> Iterator[None]:
    """Let what is printed in this process go to a binary stream."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdout", io.TextIOWrapper(stream, encoding=encoding))
        yield


FULL = "superadam: cannot write the output: No space left on device; free some space or choose another place\n"


@pytest.mark.parametrize("words", [["--help"], TRAIN], ids=" ".join)
def test_full_output_is_a_sentence(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with open("/dev/full", "wb") as full, stdout_into(full):
        assert main(words) == 2
    assert capsys.readouterr().err == FULL


def test_status_is_the_same_where_sentences_cannot_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", open("/dev/full", "w"))  # noqa: SIM115
    assert main(["train", "--steps", "0"]) == 2


def test_closed_streams_take_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, None)
    assert main(TRAIN) == 0


def test_output_that_nobody_reads_ends_quietly(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory.bandwidth, "__defaults__", (4 << 20,))  # over few bytes, which takes no time
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "wb", buffering=0) as pipe, stdout_into(pipe):
        assert main(["doctor", "--json"]) == PIPE_STATUS
    assert capsys.readouterr().err == ""


@pytest.mark.subprocess
def test_output_that_nobody_reads_ends_quietly_when_the_interpreter_ends() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "superadam", "--version"]
    with os.fdopen(writer, "wb") as pipe:
        done = subprocess.run(command, stdout=pipe, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr) == (PIPE_STATUS, "")


@pytest.mark.subprocess
def test_training_without_a_reader_stops_and_is_saved() -> None:
    command = [sys.executable, "-m", "superadam", *TRAIN, "--steps", "400"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        stderr = process.stderr.read()
    assert process.returncode == PIPE_STATUS
    stopped = re.fullmatch(
        r"superadam: cannot write the output: Broken pipe; stopped after step (\d+) of 400; "
        r"go on with: superadam train --resume run\n",
        stderr,
    )
    assert stopped is not None, stderr
    assert main(["train", "--resume", "run", "--steps", str(int(stopped[1]) + 1)]) == 0


@pytest.mark.parametrize(
    ("fails_at", "ending"), [(3, "; stopped after step 3 of 8; go on with: "), (8, "; free some ")]
)
def test_training_whose_output_fails_is_saved(
    fails_at: int, ending: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    numbers = itertools.count()

    def fill_the_disk(console: Console, *arguments: Any, **options: Any) -> None:
        if next(numbers) == fails_at:  # after the introduction, a line for each step
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Console, "print", fill_the_disk)
    assert main(TRAIN) == 2
    stderr = capsys.readouterr().err
    assert stderr.startswith(f"superadam: cannot write the output: No space left on device{ending}")
    assert stderr.count("\n") == 1
    assert set(os.listdir("run")) == {".lock", "checkpoint.pt", "training.png"}
    if fails_at < 8:
        assert main(["train", "--resume", "run"]) == 0


@pytest.mark.subprocess
def test_any_text_can_be_printed_without_a_locale() -> None:
    name = "l\u00e4ufe"
    Path("sentences.txt").rename(f"{name}.txt")
    words = [*TRAIN, "--text", f"{name}.txt", "--out", name, "--report", f"{name}/report.json"]
    command = [sys.executable, "-m", "superadam", *words]
    extra = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "FORCE_COLOR": "1"}
    done = subprocess.run(command, env={**os.environ, **extra}, capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"wrote %b/checkpoint.pt" % os.fsencode(name) in done.stdout


@pytest.mark.parametrize(
    ("encoding", "name", "shown"), [("ascii", "l\u00e4ufe", b"l?ufe"), ("utf-8", os.fsdecode(b"\xff"), b"\xff")]
)
def test_any_text_can_be_printed(
    encoding: str, name: str, shown: bytes, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    text, stream = Path("sentences.txt").rename(f"{name}.txt"), io.BytesIO()
    with stdout_into(stream, encoding):
        assert main([*TRAIN, "--text", text.name, "--out", name, "--report", f"{name}/report.json"]) == 0
        assert b"wrote %b/checkpoint.pt" % shown in stream.getvalue()
    assert capsys.readouterr().err == ""
