"""`superadam.cli.main`: output that nothing takes is one sentence; without a reader, commands end quietly."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import IO

import pytest
from training_runs import OPTIONS, write_text

TRAIN = ["train", *OPTIONS, "--text", "sentences.txt", "--out", "run"]
BENCH = ["bench", "passes", "--numel", "4096", "--pairs", "1", "--dtype", "f32", "--threads", "1"]

pytestmark = [pytest.mark.slow, pytest.mark.subprocess]


@pytest.fixture(autouse=True)
def _text(tmp_path: Path) -> None:
    write_text(tmp_path)


@pytest.mark.parametrize("words", [["--help"], ["doctor"], BENCH, TRAIN], ids=" ".join)
def test_full_output_is_a_sentence(words: list[str], tmp_path: Path) -> None:
    with open("/dev/full", "wb") as full:
        done = run(words, tmp_path, stdout=full)
    sentence = "superadam: cannot write the output: No space left on device; free some space or choose another place\n"
    assert (done.returncode, done.stderr) == (2, sentence)


@pytest.mark.parametrize(
    ("words", "unbuffered"),
    [(["--version"], ""), (["--version"], "1"), (["doctor", "--json"], ""), (["doctor", "--json"], "1"), (TRAIN, "")],
)
def test_output_that_nobody_reads_ends_quietly(words: list[str], unbuffered: str, tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = run(words, tmp_path, stdout=writer, unbuffered=unbuffered)
    finally:
        os.close(writer)
    assert (done.returncode, done.stderr) == (1, "")


@pytest.mark.parametrize("words", [["fly"], ["train", "--steps", "0"], ["--help"]], ids=" ".join)
def test_status_is_the_same_where_sentences_cannot_be_written(words: list[str], tmp_path: Path) -> None:
    with open("/dev/full", "wb") as full:
        assert run(words, tmp_path, stdout=full, stderr=full).returncode == 2


@pytest.mark.parametrize("words", [["--help"], ["doctor", "--json"], TRAIN], ids=" ".join)
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


@pytest.mark.parametrize(
    ("path", "why"), [("/dev/full", "write the output: No space left on device"), (".", "use .: Is a directory")]
)
def test_json_that_cannot_be_written_is_a_sentence(path: str, why: str, tmp_path: Path) -> None:
    done = run([*BENCH, "--json", path], tmp_path)
    sentence = f"superadam: cannot {why}; free some space or choose another place\n"
    assert (done.returncode, done.stderr) == (2, sentence)


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
