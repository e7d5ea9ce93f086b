"""`superadam.cli.main`: output that nothing takes is one sentence; without a reader, commands end quietly.

What happens when the interpreter ends needs a process of its own.
"""

import io
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO

import pytest

from superadam.cli.doctor import memory, software
from superadam.cli.doctor.diagnosis import PROBES
from superadam.cli.main import PIPE_STATUS, main

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def _little_memory(monkeypatch):
    monkeypatch.setattr(memory.bandwidth, "__defaults__", (4 << 20,))  # over few bytes, which takes no time
    monkeypatch.setattr(memory.measure_bandwidth, "__defaults__", (0.0,))


@contextmanager
def stdout_into(stream: IO[bytes], encoding: str = "utf-8") -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdout", io.TextIOWrapper(stream, encoding=encoding))
        yield


@pytest.mark.parametrize("words", [["--help"], ["doctor"]], ids=" ".join)
def test_full_output_is_a_sentence(words, capsys):
    with open("/dev/full", "wb") as full, stdout_into(full):
        assert main(words) == 2
    sentence = "cannot write the output: No space left on device; free some space or choose another place"
    assert capsys.readouterr().err == f"superadam: {sentence}\n"


def test_status_is_the_same_where_sentences_cannot_be_written(monkeypatch):
    monkeypatch.setattr(sys, "stderr", open("/dev/full", "w"))  # noqa: SIM115
    assert main(["bench", "--threads", "0"]) == 2


def test_closed_streams_take_everything(monkeypatch):
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, None)
    assert main(["doctor"]) in (0, 1)


def test_output_that_nobody_reads_ends_quietly(capsys):
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "wb", buffering=0) as pipe, stdout_into(pipe):
        assert main(["doctor", "--json"]) == PIPE_STATUS
    assert capsys.readouterr().err == ""


@pytest.mark.subprocess
def test_output_that_nobody_reads_ends_quietly_when_the_interpreter_ends():
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "superadam", "--version"]
    with os.fdopen(writer, "wb") as pipe:
        done = subprocess.run(command, stdout=pipe, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr) == (PIPE_STATUS, "")


@pytest.mark.parametrize("columns", [0, 20])
def test_a_narrow_terminal_loses_no_finding(columns, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", str(columns))
    assert main(["doctor"]) in (0, 1)
    printed = capsys.readouterr().out
    assert all(word in printed for word in (*PROBES, "Python"))


def test_characters_that_the_output_lacks_are_replaced(monkeypatch, capsys):
    monkeypatch.setattr(software, "version", lambda name: "l\u00e4ufe")
    stream = io.BytesIO()
    with stdout_into(stream, "ascii"):
        assert main(["doctor"]) in (0, 1)
        assert b"l?ufe, Python" in stream.getvalue()
        assert all(name.encode() in stream.getvalue() for name in PROBES)
    assert capsys.readouterr().err == ""
