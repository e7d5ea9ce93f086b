"""Other programs, run within a time limit.

Owns their processes: none survives its limit, nor this process's end by an exception.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
"""The repository."""

SCRIPT = ROOT / "bench" / "gpu_check.py"


@dataclass(frozen=True, slots=True)
class Done:
    """A program that has ended.

    Attributes:
        status: its exit status, negative for a signal; None if its time was over and it was killed.
        output: what it wrote, to either stream.
        seconds: how long it ran.
    """

    status: int | None
    output: str
    seconds: float

    @property
    def last_line(self) -> str:
        """The last line that is not empty: where programs say what went wrong."""
        return next((line.strip() for line in reversed(self.output.splitlines()) if line.strip()), "no output")

    def lines(self, prefix: str) -> list[dict[str, Any]]:
        """Return what `measure` has printed so far."""
        return [json.loads(line.removeprefix(prefix)) for line in self.output.splitlines() if line.startswith(prefix)]


Runner = Callable[[Sequence[str], float, Mapping[str, str]], Done]
"""Runs a command for at most so many seconds, with some environment variables set."""


def run(command: Sequence[str], seconds: float, environment: Mapping[str, str]) -> Done:
    """Run a command in the repository, and kill it and all that it started when its time is over."""
    begin = time.monotonic()
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    status: int | None
    try:
        output, _ = process.communicate(timeout=seconds)
        status = process.returncode
    except subprocess.TimeoutExpired:
        _kill(process)
        output, _ = process.communicate()
        status = None
    except BaseException:
        _kill(process)
        process.wait()
        raise
    return Done(status, output, time.monotonic() - begin)


def _kill(process: subprocess.Popen[str]) -> None:
    os.killpg(process.pid, signal.SIGKILL)


def python(*words: str) -> list[str]:
    """Return a command that runs this Python."""
    return [sys.executable, *words]


MARK = "gpu-check measured: "
"""Begins each line with figures that a measuring process prints."""


def measuring(what: str, request: object) -> list[str]:
    """Return a command that measures in a process of its own, which prints lines for `Done.lines(MARK)`."""
    return python(str(SCRIPT), "--measure", what, json.dumps(request))


def tell(figures: object) -> None:
    """Print one line of figures, from a measuring process."""
    sys.stdout.write(MARK + json.dumps(figures) + "\n")
    sys.stdout.flush()
