"""`superadam.cli.main`: output that nothing takes is one sentence; without a reader, commands end quietly.

What was trained until then is saved.
"""

from __future__ import annotations

import errno
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import IO

import pytest
from support.training_runs import OPTIONS, write_text

from superadam.cli.main import PIPE_STATUS, main
from superadam.cli.train import display
from superadam.cli.train.history import StepRecord

TRAIN = ["train", *OPTIONS, "--text", "sentences.txt", "--out", "run"]

pytestmark = [pytest.mark.slow, pytest.mark.subprocess]


@pytest.fixture(autouse=True)
def _text(tmp_path: Path) -> None:
    write_text(tmp_path)


@pytest.mark.parametrize("words", [["--help"], TRAIN], ids=" ".join)
def test_full_output_is_a_sentence(words: list[str], tmp_path: Path) -> None:
    with open("/dev/full", "wb") as full:
        done = run(words, tmp_path, stdout=full)
    sentence = "superadam: cannot write the output: No space left on device; free some space or choose another place\n"
    assert (done.returncode, done.stderr) == (2, sentence)


@pytest.mark.parametrize(
    ("words", "unbuffered"),
    [(["--version"], ""), (["doctor", "--json"], "1"), (TRAIN, "")],
)
def test_output_that_nobody_reads_ends_quietly(words: list[str], unbuffered: str, tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = run(words, tmp_path, stdout=writer, unbuffered=unbuffered)
    finally:
        os.close(writer)
    assert (done.returncode, done.stderr) == (PIPE_STATUS, "")
    assert not (tmp_path / "run").exists()


def test_training_without_a_reader_stops_and_is_saved(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "superadam", *TRAIN, "--steps", "2000"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        stderr = process.stderr.read()
    assert process.returncode == PIPE_STATUS
    stopped = re.fullmatch(
        r"superadam: cannot write the output: Broken pipe; stopped after step (\d+) of 2000; "
        r"go on with: superadam train --resume run\n",
        stderr,
    )
    assert stopped is not None, stderr
    further = run(["train", "--resume", "run", "--stop-at", str(int(stopped[1]) + 1)], tmp_path)
    assert further.returncode == 0, further.stderr


@pytest.mark.parametrize(
    ("fails_at", "ending"), [(3, "; stopped after step 3 of 8; go on with: "), (8, "; free some ")]
)
def test_training_whose_output_fails_is_saved(
    fails_at: int, ending: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    show = display.StepProgress.show

    def fill_the_disk(progress: display.StepProgress, number: int, record: StepRecord) -> None:
        if number == fails_at:
            raise OSError(errno.ENOSPC, "No space left on device")
        show(progress, number, record)

    monkeypatch.setattr(display.StepProgress, "show", fill_the_disk)
    monkeypatch.chdir(tmp_path)
    assert main(TRAIN) == 2
    stderr = capsys.readouterr().err
    assert stderr.startswith(f"superadam: cannot write the output: No space left on device{ending}")
    assert stderr.count("\n") == 1
    assert {path.name for path in (tmp_path / "run").iterdir()} == {"checkpoint.pt", "training.png"}
    if fails_at < 8:
        assert main(["train", "--resume", "run"]) == 0


@pytest.mark.parametrize(
    ("encoding", "looks"), [("C locale", "as on a terminal"), ("ascii", "otherwise"), ("utf-8", "as on a terminal")]
)
def test_any_text_can_be_printed(encoding: str, looks: str, tmp_path: Path) -> None:
    name = os.fsdecode(b"\xff") if encoding == "utf-8" else "l\u00e4ufe"
    text = (tmp_path / "sentences.txt").rename(tmp_path / f"{name}.txt")
    extra = {"PYTHONIOENCODING": encoding}
    if encoding == "C locale":
        extra = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    if looks == "as on a terminal":
        extra["FORCE_COLOR"] = "1"
    words = [*TRAIN, "--text", text.name, "--out", name, "--report", f"{name}/report.json"]
    command = [sys.executable, "-m", "superadam", *words]
    done = subprocess.run(command, cwd=tmp_path, env={**os.environ, **extra}, capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
    shown = b"l?ufe" if encoding == "ascii" else os.fsencode(name)
    assert b"wrote %b/checkpoint.pt" % shown in done.stdout


@pytest.mark.parametrize("words", [["train", "--steps", "0"], ["--help"]], ids=" ".join)
def test_status_is_the_same_where_sentences_cannot_be_written(words: list[str], tmp_path: Path) -> None:
    with open("/dev/full", "wb") as full:
        assert run(words, tmp_path, stdout=full, stderr=full).returncode == 2


@pytest.mark.parametrize("words", [["--help"], TRAIN], ids=" ".join)
def test_closed_streams_take_everything(words: list[str], tmp_path: Path) -> None:
    assert run(words, tmp_path, shell='"$@" >&- 2>&-').returncode == 0


@pytest.mark.parametrize("option", ["--report", "--trace"])
def test_file_that_is_a_device_is_refused_and_stays(option: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    done = run([*TRAIN, option, "pipe"], tmp_path)
    sentence = f"superadam: {option} pipe is no regular file; give the name of a file\n"
    assert (done.returncode, done.stderr) == (2, sentence)
    assert (tmp_path / "pipe").is_fifo()
    assert not (tmp_path / "run").exists()


def run(
    words: list[str],
    folder: Path,
    *,
    stdout: IO[bytes] | int = subprocess.PIPE,
    stderr: IO[bytes] | int = subprocess.PIPE,
    shell: str = 'exec "$@"',
    unbuffered: str = "",
) -> subprocess.CompletedProcess[str]:
    command = ["sh", "-c", shell, "sh", sys.executable, "-m", "superadam", *words]
    environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    return subprocess.run(command, cwd=folder, env=environment, stdout=stdout, stderr=stderr, text=True, check=False)
