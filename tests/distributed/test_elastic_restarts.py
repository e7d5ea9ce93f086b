"""Ranks that are killed at random under the documented commands: the run ends with an uninterrupted one's bits."""

import os
import random
import shlex
import signal
import socket
import time
from contextlib import ExitStack, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from support import ranks
from support.overlap import ThreadDevice
from support.shards import ROUNDED, digest_of, wrap
from support.waiting import wait_until
from torch import distributed, nn
from torch.distributed import run as torchrun
from torch.distributed.fsdp import MixedPrecisionPolicy

from superadam import OffloadScheduler, SpeculativeCPUAdamW
from superadam.integrations.distributed_checkpoint import latest, load, save

pytestmark = [pytest.mark.slow, pytest.mark.subprocess]

ranks.preload("superadam.integrations.distributed_checkpoint")
ranks.preload("torch.distributed.run")

STEPS, EVERY = 12, 2

IS_DEEP = os.environ.get("SUPERADAM_DEEP") == "1"

PAGE = Path(__file__).resolve().parents[2] / "docs" / "ranks.md"
ONE_NODE, TWO_NODES = (
    shlex.split(line.removeprefix("$ "))
    for line in PAGE.read_text().splitlines()
    if line.startswith("$ ") and "--max-restarts" in line
)
"""The documentation's commands: variables, torchrun, its options, and the program."""


# ---- what each rank does ---------------------------------------------------------------------------------------------

Note = tuple[int, str, list[str]]
"""Rank, what was done, and with what."""


def train(rank: int, *, folder: str) -> None:
    """Train to the end, from the newest checkpoint, and note all that is done; last a digest of this rank's parts."""

    def note(*words: object) -> None:
        descriptor = os.open(f"{folder}/log", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(descriptor, " ".join(map(str, (rank, *words))).encode() + b"\n")
        os.close(descriptor)

    note("pid", os.getpid(), os.environ.get("TORCHELASTIC_USE_AGENT_STORE"))
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(7, 16), nn.Tanh(), nn.Linear(16, 7)).bfloat16()
    wrap((model[0], model[2], model), mp_policy=MixedPrecisionPolicy(**ROUNDED))
    optimizer = SpeculativeCPUAdamW(model.parameters(), lr=1e-2, max_grad_norm=1.0)
    path = latest(f"{folder}/run")
    done = 0 if path is None else load(path, model, optimizer)["step"]
    note("begin", done)
    with OffloadScheduler(optimizer, model, num_threads=1, bucket_numel=64, device=ThreadDevice()):
        for step in range(done, STEPS):
            inputs = torch.randn(4, 7, generator=torch.Generator().manual_seed(1000 * rank + step)).bfloat16()
            loss = (model(inputs) - 1).float().square().sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            note("step", step, loss.item().hex())
            if (step + 1) % EVERY == 0:
                save(f"{folder}/run", model, optimizer, extra={"step": step + 1}, keep=1)
                note("saved", step + 1)
    note("trained")  # and is there for the last one who kills it
    wait_until(Path(folder, "may-end").exists)
    note("end", digest_of(model, optimizer))


def notes_of(folder: Path) -> list[Note]:
    """Return all whole lines of a log."""
    text = (folder / "log").read_text() if (folder / "log").exists() else ""
    lines = [line.split() for line in text.splitlines(keepends=True) if line.endswith("\n")]
    return [(int(rank), what, words) for rank, what, *words in lines]


def pids_of(notes: list[Note], rank: int) -> list[int]:
    """Return the processes that were this rank, one for each attempt."""
    return [int(words[0]) for own, what, words in notes if (own, what) == (rank, "pid")]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    (folder / "may-end").touch()
    ranks.run(train, 2, folder=str(folder))
    return notes_of(folder)


# ---- what starts them ------------------------------------------------------------------------------------------------


def be_a_rank(folder: str) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the launcher's is inherited
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", timeout=timedelta(seconds=120))
    train(distributed.get_rank(), folder=folder)
    distributed.destroy_process_group()


def be_torchrun(variables: dict[str, str], options: list[str], folder: str) -> None:
    """Do as torchrun, but fork the ranks instead of starting Python anew for each."""
    os.environ.update(variables)
    output = os.open(f"{folder}/output", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    launch = torchrun.elastic_launch
    with mock.patch.object(
        torchrun, "elastic_launch", lambda config, entrypoint: lambda *_: launch(config, be_a_rank)(folder)
    ):
        torchrun.main(options)


def port_for_nobody() -> int:
    """Return a free port, of those that the system does not give to ranks of other tests, which ask for any."""
    first, last = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    others = [*range(10_000, first), *range(last + 1, 1 << 16)]
    while True:
        port = random.SystemRandom().choice(others)
        with socket.socket() as one, suppress(OSError):
            one.bind(("", port))
            return port


def start(command: list[str], port: int, folder: Path) -> Any:
    """Run a documented command with two ranks in all, on this machine."""
    begin = command.index("torchrun")
    # With a port of its own, torchrun's default is the static rendezvous, as of old.
    variables = {**dict(word.split("=") for word in command[:begin]), "PET_MASTER_PORT": str(port)}
    meant = {"8": "1" if "--nnodes" in command else "2", "FIRST_NODE:29500": f"localhost:{port}"}
    options = [meant.get(word, word) for word in command[begin + 1 :]]
    assert options[-1] == "program.py"
    options = ["--monitor-interval", "0.1", "--start-method", "fork", *options]
    return ranks.start(be_torchrun, variables, options, str(folder))


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
    port = port_for_nobody()
    with ExitStack() as stack:
        launchers = []
        for _ in range(nodes):
            launchers.append(start(command, port, tmp_path))
            stack.callback(launchers[-1].join)
            stack.callback(launchers[-1].terminate)  # its ranks, too
        made = 0
        while made < kills:
            notes = notes_of(tmp_path)
            most = max(3, len(uninterrupted) - 3 * sum(what == "saved" for _, what, _ in notes) - 4)
            lines, victim, seconds = len(notes) + draws.randint(2, most), draws.randrange(2), draws.uniform(0, 0.03)
            deadline = time.monotonic() + 200
            while all(launcher.is_alive() for launcher in launchers):
                notes = notes_of(tmp_path)
                is_due = len(notes) >= lines or any(what == "trained" for _, what, _ in notes[-2:])
                if is_due and len(pids_of(notes, victim)) > made:
                    break
                assert time.monotonic() < deadline, "the run hangs"
                time.sleep(0.002)
            time.sleep(seconds)
            if not all(launcher.is_alive() for launcher in launchers):
                break
            os.kill(pids_of(notes, victim)[-1], signal.SIGKILL)
            made += 1
        (tmp_path / "may-end").touch()
        for launcher in launchers:
            launcher.join(200)
        assert [launcher.exitcode for launcher in launchers] == [0] * nodes, (tmp_path / "output").read_text()
    notes = notes_of(tmp_path)
    assert made >= 1
    for rank in (0, 1):
        here = [note for note in notes if note[0] == rank]
        whole = [note for note in uninterrupted if note[0] == rank]
        assert here[-1][1:] == whole[-1][1:]  # the bits
        assert {words[1] for _, what, words in here if what == "pid"} == {"False"}  # a store for each attempt
        losses = {words[0]: words[1] for _, what, words in whole if what == "step"}
        assert all(losses[words[0]] == words[1] for _, what, words in here if what == "step")
        newest = 0
        for what, step in [(what, int(words[0])) for _, what, words in here if what in ("begin", "saved")]:
            assert step >= newest if what == "begin" else step == newest + EVERY
            newest = step
        assert 2 <= len(pids_of(notes, rank)) <= 1 + made
    last = (tmp_path / "run" / "latest").read_text().split()[0].partition("-")[2]
    assert sorted(os.listdir(tmp_path / "run")) == [".lock", "latest", f"save-{int(last):08}"]
