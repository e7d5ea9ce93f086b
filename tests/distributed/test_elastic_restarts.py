"""Ranks that are killed at random under the documented commands: the run ends with an uninterrupted one's bits."""

from __future__ import annotations

import os
import random
import shlex
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
from support import elastic_run, ranks
from torch.distributed.elastic.utils.distributed import get_free_port

pytestmark = [pytest.mark.slow, pytest.mark.subprocess]

ranks.preload("superadam.integrations.distributed_checkpoint")

STEPS, EVERY = 12, 2

IS_DEEP = os.environ.get("SUPERADAM_DEEP") == "1"

PAGE = Path(__file__).resolve().parents[2] / "docs" / "ranks.md"
ONE_NODE, TWO_NODES = (
    shlex.split(line.removeprefix("$ "))
    for line in PAGE.read_text().splitlines()
    if line.startswith("$ ") and "--max-restarts" in line
)
"""The documentation's commands: variables, torchrun, its options, and the program."""

Note = tuple[int, str, list[str]]
"""Rank, what was done, and with what."""


def notes_of(log: Path) -> list[Note]:
    """Return all whole lines of a log."""
    text = log.read_text() if log.exists() else ""
    lines = [line.split() for line in text.splitlines(keepends=True) if line.endswith("\n")]
    return [(int(rank), what, words) for rank, what, *words in lines]


def pids_of(notes: list[Note], rank: int) -> list[int]:
    """Return the processes that were this rank, one for each attempt."""
    return [int(words[0]) for own, what, words in notes if (own, what) == (rank, "pid")]


def train_once(rank: int, *, folder: str, log: str) -> None:
    elastic_run.train(folder, log, STEPS, EVERY)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    ranks.run(train_once, 2, folder=str(folder / "run"), log=str(folder / "log"))
    return notes_of(folder / "log")


def start(command: list[str], port: int, program: list[str], output: Path) -> subprocess.Popen[bytes]:
    """Run a documented command with two ranks in all, on this machine."""
    begin = command.index("torchrun")
    variables = dict(word.split("=") for word in command[:begin])
    meant = {"8": "1" if "--nnodes" in command else "2", "FIRST_NODE:29500": f"localhost:{port}"}
    *options, own_program = (meant.get(word, word) for word in command[begin + 1 :])
    assert own_program == "program.py"
    options += ["--monitor-interval", "0.1"]
    environment = {**os.environ, **variables}
    environment["PET_MASTER_PORT"] = str(port)  # with which torchrun's default is the static rendezvous, as of old
    with output.open("ab") as file:
        return subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", *options, *program],
            stdout=file,
            stderr=file,
            env=environment,
        )


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("command", "nodes", "seed"),
    [
        (ONE_NODE, 1, 0),
        *(pytest.param(ONE_NODE, 1, seed, marks=pytest.mark.deep) for seed in range(1, 16)),
        *(pytest.param(TWO_NODES, 2, seed, marks=pytest.mark.deep) for seed in range(4)),
    ],
)
def test_run_ends_with_the_same_bits_and_no_step_is_made_over_a_newer_checkpoint(
    command, nodes, seed, uninterrupted, tmp_path
):
    draws = random.Random(seed)
    restarts = int(command[command.index("--max-restarts") + 1])
    kills = draws.randint(1, restarts) if IS_DEEP else 1
    log, output = tmp_path / "log", tmp_path / "output"
    program = [str(Path(elastic_run.__file__)), str(tmp_path / "run"), str(log), str(STEPS), str(EVERY)]
    port = get_free_port()
    with ExitStack() as stack:
        launchers = []
        for _ in range(nodes):
            launchers.append(start(command, port, program, output))
            stack.callback(launchers[-1].wait)
            stack.callback(launchers[-1].terminate)  # its ranks, too
        made = 0
        while made < kills:
            notes = notes_of(log)
            most = max(3, len(uninterrupted) - 3 * sum(what == "saved" for _, what, _ in notes) - 4)
            lines, victim, seconds = draws.randint(2, most), draws.randrange(2), draws.uniform(0, 0.03)
            lines, deadline = lines + len(notes), time.monotonic() + 200
            while all(launcher.poll() is None for launcher in launchers):
                notes = notes_of(log)
                if len(notes) >= lines and len(pids_of(notes, victim)) > made:
                    break
                assert time.monotonic() < deadline, "the run hangs"
                time.sleep(0.002)
            time.sleep(seconds)
            if any(launcher.poll() is not None for launcher in launchers):
                break
            os.kill(pids_of(notes, victim)[-1], signal.SIGKILL)
            made += 1
        statuses = [launcher.wait(200) for launcher in launchers]
    assert statuses == [0] * nodes, output.read_text()
    notes = notes_of(log)
    assert made >= 1
    for rank in (0, 1):
        here = [note for note in notes if note[0] == rank]
        whole = [note for note in uninterrupted if note[0] == rank]
        assert here[-1][1:] == whole[-1][1:]  # the bits
        assert {words[1] for _, what, words in here if what == "pid"} == {"False"}  # a store for each attempt
        losses = {words[0]: words[1] for _, what, words in whole if what == "step"}
        assert all(losses[words[0]] == words[1] for _, what, words in here if what == "step")
        newest = 0
        for _, what, words in here:
            if what == "begin":
                assert int(words[0]) >= newest
                newest = int(words[0])
            elif what == "saved":
                assert int(words[0]) == newest + EVERY
                newest = int(words[0])
    aborted = output.read_text().count("terminate called without an active exception")  # docs/ranks.md says why
    for rank in (0, 1):
        assert 2 <= len(pids_of(notes, rank)) <= 1 + made + aborted
    assert sorted(os.listdir(tmp_path / "run")) == [".lock", "latest", f"save-{number_of_last(tmp_path / 'run'):08}"]


def number_of_last(folder: Path) -> int:
    return int((folder / "latest").read_text().split()[0].partition("-")[2])
