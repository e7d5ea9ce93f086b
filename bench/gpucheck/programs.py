"""Other programs, run within a time limit.

Owns their processes: none survives its limit, nor this process's end by an exception.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
"""The repository."""

SCRIPT = ROOT / "bench" / "gpu_check.py"

MOST_OUTPUT = 20_000
"""Characters of either end of an output that results keep: after an error of CUDA's everything else fails, too."""

LAST_SECONDS = 2.0
"""For a program whose time is over to tell where its threads are."""

_DUMP = "Fatal Python error: Aborted"
_RAISED = re.compile(r"^Traceback \(most recent call last\):\n(?:[ \t].*\n|\n)*(\S.*)", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Done:
    """A program that has ended.

    Attributes:
        status: its exit status, negative for a signal; None if its time was over and it was killed.
        output: what it wrote, to either stream; of Python that was killed, where all of its threads were in the end.
        seconds: how long it ran.
    """

    status: int | None
    output: str
    seconds: float

    @property
    def last_line(self) -> str:
        """The line in which a program says what went wrong.

        That is the first line of the error that Python raised last, as others of CUDA's errors, and libraries at the
        end of a program, say nothing of it. Without one it is the last that is not empty.
        """
        raised = _RAISED.findall(self._told)
        return raised[-1] if raised else next(filter(None, map(str.strip, self._told.splitlines()[::-1])), "no output")

    @property
    def ends(self) -> str:
        """The output without its middle where that is long, as what failed first and last is at its ends."""
        first, last = self.output[:MOST_OUTPUT], self.output[MOST_OUTPUT:]
        middle = len(last) - MOST_OUTPUT
        return f"{first}\n[{middle:,} characters]\n{last[middle:]}" if middle > 0 else first + last

    def lines(self, prefix: str) -> list[dict[str, Any]]:
        """Return what `measure` has printed so far, without a line that it was killed in."""
        return [json.loads(line) for line in re.findall(rf"^{re.escape(prefix)}(.*)\n", self._told, re.MULTILINE)]

    @property
    def _told(self) -> str:
        """The output until the program was killed."""
        before, dump, _ = self.output.rpartition(_DUMP)
        return before if dump and self.status is None else self.output


Runner = Callable[[Sequence[Sequence[str]], float, Mapping[str, str]], list[Done]]
"""Runs commands at once, for at most a number of seconds, with environment variables set; one result for each."""


def run(commands: Sequence[Sequence[str]], seconds: float, environment: Mapping[str, str]) -> list[Done]:
    """Run commands at once in the repository, and kill them and all that they started when their time is over.

    They import the wheel that is installed, never the sources that lie in the repository.
    """
    begin = time.monotonic()
    done: list[Done] = []
    variables = {**os.environ, "PYTHONSAFEPATH": "1", "PYTHONFAULTHANDLER": "1", **environment}
    with contextlib.ExitStack() as stack:
        started = []
        for command in commands:
            output = stack.enter_context(tempfile.TemporaryFile("w+", errors="replace"))
            process = subprocess.Popen(
                command, cwd=ROOT, env=variables, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
            )
            stack.callback(_end, process)
            started.append((process, output))
        for process, output in started:
            status: int | None = None
            with contextlib.suppress(subprocess.TimeoutExpired):
                status = process.wait(max(0.0, begin + seconds - time.monotonic()))
            if status is None:
                _end_late(process)
            output.seek(0)
            done.append(Done(status, output.read(), time.monotonic() - begin))
    return done


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill a process and all that it started, if it has not ended."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _end_late(process: subprocess.Popen[bytes]) -> None:
    """Do the same where its time is over, once Python has told where its threads are: they may wait forever."""
    with contextlib.suppress(OSError):
        resource.prlimit(process.pid, resource.RLIMIT_CORE, (0, 0))  # which would be as large as its memory
        os.kill(process.pid, signal.SIGABRT)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(LAST_SECONDS)
    with contextlib.suppress(ProcessLookupError):  # nothing is left of it
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


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
