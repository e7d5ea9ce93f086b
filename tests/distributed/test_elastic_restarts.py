"""Ranks that are killed at random under the documented commands: the run ends with an uninterrupted one's bits."""

import os
import random
import shlex
import signal
import socket
from contextlib import ExitStack, suppress
from datetime import timedelta
from pathlib import Path
from threading import Timer
from typing import Any
from unittest import mock

import pytest
import torch
from support import ranks
from support.overlap import ThreadDevice
from support.shards import ROUNDED, digest_of, wrap
from torch import distributed, nn
from torch.distributed import run as torchrun
from torch.distributed.fsdp import MixedPrecisionPolicy

from superadam import OffloadScheduler, SpeculativeCPUAdamW
from superadam.integrations.distributed_checkpoint import latest, load, save

pytestmark = [pytest.mark.slow, pytest.mark.subprocess]

ranks.preload("superadam.integrations.distributed_checkpoint")
ranks.preload("torch.distributed.run")

STEPS, EVERY = 12, 2

ONE_NODE, TWO_NODES = (
    shlex.split(line.removeprefix("$ "))
    for line in (Path(__file__).resolve().parents[2] / "docs" / "ranks.md").read_text().splitlines()
    if line.startswith("$ ") and "--max-restarts" in line
)
"""The documentation's commands: variables, torchrun, its options, and the program."""


def train(rank: int, *, folder: str, seed: int = 0, kills: int = 0) -> None:
    """Train to the end, from the newest checkpoint, and note all that is done; last a digest of this rank's parts.

    In so many attempts, one of two ranks is killed at a random moment, at the latest when the other one has trained.
    """
    attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))
    draws = random.Random(f"{seed} {attempt}")
    is_victim, due = attempt < kills and rank == draws.randrange(2), draws.randint(-1, STEPS)
    killer = Timer(draws.uniform(0, 0.03), os.kill, (os.getpid(), signal.SIGKILL))

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
    if is_victim and due < 0:
        killer.start()
    done = 0 if path is None else load(path, model, optimizer)["step"]
    note("begin", done)
    with OffloadScheduler(optimizer, model, num_threads=1, bucket_numel=64, device=ThreadDevice()):
        for step in range(done, STEPS):
            if is_victim and step >= due and killer.ident is None:
                killer.start()
            inputs = torch.randn(4, 7, generator=torch.Generator().manual_seed(1000 * rank + step)).bfloat16()
            loss = (model(inputs) - 1).float().square().sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            note("step", step, loss.item().hex())
            if (step + 1) % EVERY == 0:
                save(f"{folder}/run", model, optimizer, extra={"step": step + 1}, keep=1)
                note("saved", step + 1)
    if is_victim:
        if killer.ident is None:
            killer.start()
        killer.join()
    distributed.barrier()
    note("end", digest_of(model, optimizer))


def notes_of(folder: Path) -> list[tuple[int, str, list[str]]]:
    """Return all whole lines of a log: a rank, what it did, and with what."""
    text = (folder / "log").read_text() if (folder / "log").exists() else ""
    lines = [line.split() for line in text.splitlines(keepends=True) if line.endswith("\n")]
    return [(int(rank), what, words) for rank, what, *words in lines]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    ranks.run(train, 2, folder=str(folder))
    return notes_of(folder)


def be_a_rank(options: dict[str, Any]) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the launcher's is inherited
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", timeout=timedelta(seconds=120))
    train(distributed.get_rank(), **options)
    distributed.destroy_process_group()


def be_torchrun(variables: dict[str, str], words: list[str], options: dict[str, Any]) -> None:
    """Do as torchrun, but fork the ranks instead of starting Python anew for each."""
    os.environ.update(variables)
    output = os.open(f"{options['folder']}/output", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    launch = torchrun.elastic_launch
    with mock.patch.object(
        torchrun, "elastic_launch", lambda config, entrypoint: lambda *_: launch(config, be_a_rank)(options)
    ):
        torchrun.main(words)


def port_for_nobody() -> int:
    """Return a free port, of those that the system does not give to ranks of other tests, which ask for any."""
    first, last = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    others = [*range(10_000, first), *range(last + 1, 1 << 16)]
    while True:
        port = random.SystemRandom().choice(others)
        with socket.socket() as one, suppress(OSError):
            one.bind(("", port))
            return port


def start(command: list[str], port: int, options: dict[str, Any]) -> Any:
    """Run a documented command with two ranks in all, on this machine."""
    begin = command.index("torchrun")
    # With a port of its own, torchrun's default is the static rendezvous, as of old.
    variables = {**dict(word.split("=") for word in command[:begin]), "PET_MASTER_PORT": str(port)}
    meant = {"8": "1" if "--nnodes" in command else "2", "FIRST_NODE:29500": f"localhost:{port}"}
    words = [meant.get(word, word) for word in command[begin + 1 :]]
    assert words[-1] == "program.py"
    words = ["--monitor-interval", "0.1", "--start-method", "fork", *words]
    return ranks.start(be_torchrun, variables, words, options)


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
    restarts = int(command[command.index("--max-restarts") + 1])
    kills = 1 + seed % restarts if nodes == 1 else 1  # launchers of several count restarts each for itself
    port, options = port_for_nobody(), {"folder": str(tmp_path), "seed": seed, "kills": kills}
    with ExitStack() as stack:
        launchers = []
        for _ in range(nodes):
            launchers.append(start(command, port, options))
            stack.callback(launchers[-1].join)
            stack.callback(launchers[-1].terminate)  # its ranks, too
        for launcher in launchers:
            launcher.join(200)
        assert [launcher.exitcode for launcher in launchers] == [0] * nodes, (tmp_path / "output").read_text()
    notes = notes_of(tmp_path)
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
        attempts = sum(what == "pid" for _, what, _ in here)
        assert attempts == 1 + kills if nodes == 1 else attempts > 1
    last = (tmp_path / "run" / "latest").read_text().split()[0].partition("-")[2]
    assert sorted(os.listdir(tmp_path / "run")) == [".lock", "latest", f"save-{int(last):08}"]
