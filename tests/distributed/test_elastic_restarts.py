"""Ranks that are killed at random under `torchrun --max-restarts`: the run ends with an uninterrupted one's bits."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support import elastic_run, ranks

pytestmark = [pytest.mark.slow, pytest.mark.subprocess]

ranks.preload("superadam.integrations.distributed_checkpoint")

STEPS, EVERY, RESTARTS = 12, 2, 3

RUNS = 20 if os.environ.get("SUPERADAM_DEEP") == "1" else 1

ENVIRONMENT = {**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
"""torchrun's agent would keep one store for all attempts, in which gloo finds addresses of ranks that have ended."""

Note = tuple[int, int, str, list[str]]
"""Attempt, rank, what was done, and with what."""


def notes_of(log: Path) -> list[Note]:
    """Return all whole lines of a log."""
    text = log.read_text() if log.exists() else ""
    lines = [line.split() for line in text.splitlines(keepends=True) if line.endswith("\n")]
    return [(int(attempt), int(rank), what, words) for attempt, rank, what, *words in lines]


def train_once(rank: int, *, folder: str, log: str) -> None:
    elastic_run.train(folder, log, STEPS, EVERY)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> list[Note]:
    folder = tmp_path_factory.mktemp("whole")
    ranks.run(train_once, 2, folder=str(folder / "run"), log=str(folder / "log"))
    return notes_of(folder / "log")


def wait_for(process: subprocess.Popen[str], log: Path, attempt: int, lines: int) -> list[Note]:
    """Return the notes of an attempt once there are so many, or the run has ended."""
    deadline = time.monotonic() + 200
    while True:
        notes = [note for note in notes_of(log) if note[0] == attempt]
        if len(notes) >= lines or process.poll() is not None:
            return notes
        assert time.monotonic() < deadline, "the run hangs"
        time.sleep(0.002)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", range(RUNS))
def test_run_ends_with_the_same_bits_and_no_step_is_made_over_a_newer_checkpoint(
    seed: int, uninterrupted: list[Note], tmp_path: Path
) -> None:
    draws = random.Random(seed)
    kills = 1 if RUNS == 1 else draws.randint(1, RESTARTS)
    log = tmp_path / "log"
    program = [str(Path(elastic_run.__file__)), str(tmp_path / "run"), str(log), str(STEPS), str(EVERY)]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    torchrun += ["--max-restarts", str(RESTARTS), "--monitor-interval", "0.1"]
    with (tmp_path / "output").open("w+") as output:
        process = subprocess.Popen([*torchrun, *program], stdout=output, stderr=output, text=True, env=ENVIRONMENT)
        try:
            made = 0
            for attempt in range(kills):
                most = max(3, len(uninterrupted) - 3 * sum(note[2] == "saved" for note in notes_of(log)) - 4)
                lines, victim, seconds = draws.randint(2, most), draws.randrange(2), draws.uniform(0, 0.03)
                notes = wait_for(process, log, attempt, lines)
                time.sleep(seconds)
                pids = [int(words[0]) for _, rank, what, words in notes if (rank, what) == (victim, "pid")]
                if pids and process.poll() is None:
                    os.kill(pids[0], signal.SIGKILL)
                    made += 1
            status = process.wait(200)
        finally:
            process.terminate()  # its ranks, too
            process.wait()
        output.seek(0)
        assert status == 0, output.read()
    notes = notes_of(log)
    assert made >= 1
    for rank in (0, 1):
        here = [note for note in notes if note[1] == rank]
        whole = [note for note in uninterrupted if note[1] == rank]
        assert here[-1][2:] == whole[-1][2:]  # the bits
        losses = {words[0]: words[1] for _, _, what, words in whole if what == "step"}
        assert all(losses[words[0]] == words[1] for _, _, what, words in here if what == "step")
        newest = 0
        for _, _, what, words in here:
            if what == "begin":
                assert int(words[0]) >= newest
                newest = int(words[0])
            elif what == "saved":
                assert int(words[0]) == newest + EVERY
                newest = int(words[0])
    assert 1 <= max(note[0] for note in notes) <= made
    assert sorted(os.listdir(tmp_path / "run")) == [".lock", "latest", f"save-{number_of_last(tmp_path / 'run'):08}"]


def number_of_last(folder: Path) -> int:
    return int((folder / "latest").read_text().split()[0].partition("-")[2])
