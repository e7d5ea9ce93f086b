"""Folders of checkpoints among several processes: two jobs in one folder, and a folder that ranks do not share."""

import contextlib
import json
import os
import shutil
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from support import ranks
from support.waiting import wait_until
from torch import distributed, nn
from torch.distributed.fsdp import fully_shard

from superadam import SpeculativeCPUAdamW
from superadam.integrations.distributed_checkpoint import CheckpointError, latest, load, save

pytestmark = pytest.mark.slow

ranks.preload("superadam.integrations.distributed_checkpoint")


def make() -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    fully_shard(model)
    return model, SpeculativeCPUAdamW(model.parameters(), lr=1e-2)


def be_a_job(rank: int, folder: str, job: str, other: str, saves: int) -> tuple[Any, list[str], str]:
    """Resume or start, and save so often, together with the other job; return what was resumed, saved and refused."""
    model, optimizer = make()
    path = latest(Path(folder, "run"))
    extra = None if path is None else load(path, model, optimizer)
    Path(folder, f"{job}-{rank}").touch()
    for one in (0, 1):
        wait_until(Path(folder, f"{other}-{one}").exists)
    saved = []
    for number in range(saves):
        model(torch.full((2, 4), number + 1.0)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        try:
            saved.append(save(Path(folder, "run"), model, optimizer, extra={"job": job, "number": number}).name)
        except CheckpointError as error:
            return extra, saved, str(error)
    return extra, saved, ""


@pytest.mark.parametrize("begins", ["fresh", pytest.param("continued", marks=pytest.mark.deep)])
def test_of_two_jobs_in_one_folder_one_is_refused_and_nothing_of_the_other_deleted(begins, tmp_path):
    earlier = None
    if begins == "continued":
        for rank in (0, 1):
            (tmp_path / f"none-{rank}").touch()
        earlier = {"job": "first", "number": 0}
        assert ranks.run(be_a_job, 2, folder=str(tmp_path), job="first", other="none", saves=1)[0][1]
    cases = [{"folder": str(tmp_path), "job": one, "other": other, "saves": 4} for one, other in ("ab", "ba")]
    endings = ranks.run_apart(be_a_job, 2, cases)
    results = []
    for of_ranks in endings:
        assert [ending.status for ending in of_ranks] == [0, 0], endings
        assert of_ranks[0].result == of_ranks[1].result
        results.append(of_ranks[0].result)
    assert [extra for extra, _, _ in results] == [earlier, earlier]
    lost, won = sorted(results, key=lambda result: len(result[1]))
    first = 1 + (begins == "continued")
    assert won[1:] == ([f"save-{number:08}" for number in range(first, first + 4)], "")
    assert lost[1] == []
    assert lost[2].startswith(f"cannot save a checkpoint to {tmp_path / 'run'}: it holds save-")
    assert "which was neither loaded into this optimizer nor saved from it" in lost[2]
    winner = "ab"[results.index(won)]
    for number, loaded in enumerate(ranks.run(load_all, 2, folder=str(tmp_path / "run"))[0]):
        assert loaded == {"job": winner, "number": number + 2}
    runs = [json.loads(path.read_bytes())["run"] for path in (tmp_path / "run").glob("save-*/manifest.json")]
    assert len(runs) == 2
    assert len(set(runs)) == 1


def load_all(rank: int, *, folder: str) -> list[Any]:
    return [load(path, *make()) for path in sorted(Path(folder).glob("save-*"))]


HERE = "/proc/self/cwd/run"
"""A path that leads each process to a folder of its own, as on nodes that share no file system."""


def told(work: Any, *arguments: Any) -> str:
    """Return what a call is refused with."""
    with pytest.raises(CheckpointError) as error:
        work(*arguments)
    return str(error.value)


def save_alone(rank: int, path: Any) -> None:
    """Save a model of this rank's own."""
    plain = nn.Linear(4, 3)
    alone = distributed.new_group([rank], use_local_synchronization=True)
    save(path, plain, torch.optim.AdamW(plain.parameters()), process_group=alone)


def use_folders_of_their_own(rank: int, *, folder: str) -> list[str]:
    """Return what `latest`, `save` and `load` say, first in empty folders, and then where each rank holds a run."""
    own = Path(folder, str(rank))
    own.mkdir()
    words = []

    def files() -> list[Path]:
        return [path for path in sorted(own.rglob("*")) if path.name not in ("run", ".lock")]

    def refused(work: Any, *arguments: Any) -> None:
        before = files()
        distributed.barrier()
        words.append(told(work, *arguments))
        assert files() == before
        distributed.barrier()

    with contextlib.chdir(own):
        model, optimizer = make()
        for _ in range(2):  # on other ranks, the folder is absent first
            refused(latest, HERE)
            refused(save, HERE, model, optimizer)
            Path(HERE).mkdir(exist_ok=True)
            distributed.barrier()
        save_alone(rank, HERE)
        distributed.barrier()
        refused(latest, HERE)
        refused(load, HERE, model, optimizer)
        refused(load, Path(HERE, "save-00000001"), model, optimizer)
        refused(save, HERE, model, optimizer)
    return words


def test_folder_that_ranks_do_not_share_is_found_when_the_run_begins(tmp_path):
    results = ranks.run(use_folders_of_their_own, 3, folder=str(tmp_path))
    assert results[0] == results[1] == results[2]
    fault = f"{HERE} is another folder on ranks [1, 2] than on rank 0: choose one that all ranks share"
    begins = f"cannot continue or begin a run in {HERE}: {fault}; nothing was changed"
    saves = f"cannot save a checkpoint to {HERE}: {fault}; earlier ones are as they were"
    loads = f"cannot load a checkpoint from {{}}: {fault}; nothing was loaded"
    *found, last = results[0]
    assert found == [begins, saves, begins, saves, begins, loads.format(HERE), loads.format(f"{HERE}/save-00000001")]
    assert "it holds save-00000001, which was neither loaded into this optimizer nor saved from it" in last


def use_copies(rank: int, *, folder: str) -> list[str]:
    """Return what `latest` and `load` say where each rank holds a copy of one run; what lies there stays the same."""
    own = Path(folder, str(rank))
    if rank == 0:
        save_alone(rank, own / "run")
        shutil.copytree(own, own.with_name("1"))
    distributed.barrier()
    before = sorted(own.rglob("*"))
    with contextlib.chdir(own):
        words = [told(latest, HERE), told(load, HERE, *make()), told(load, Path(HERE, "save-00000001"), *make())]
    assert sorted(own.rglob("*")) == before
    return words


def test_copies_of_a_run_are_not_one_folder(tmp_path):
    results = ranks.run(use_copies, 2, folder=str(tmp_path))
    fault = f"{HERE} is another folder on ranks [1] than on rank 0: choose one that all ranks share"
    assert results[0] == results[1]
    assert results[0][0] == f"cannot continue or begin a run in {HERE}: {fault}; nothing was changed"
    assert [fault in word and "cannot load" in word for word in results[0][1:]] == [True, True]


def use_a_shared_folder(rank: int, *, folder: str) -> tuple[list[str], Any, str]:
    """Return what asking for the newest leaves, what is loaded where nothing can be written, and what is refused."""
    found = []
    path = Path(folder, "new", "run")
    for _ in range(2):
        assert latest(path) is None
        distributed.barrier()
        found.append(" ".join(os.listdir(path)))
        distributed.barrier()
    model, optimizer = make()
    newest = save(path, model, optimizer, extra=7)
    assert latest(path) == newest
    found.append(" ".join(sorted(os.listdir(path))))
    distributed.barrier()
    with pytest.MonkeyPatch.context() as patch:
        refuse = Mock(side_effect=PermissionError("read-only"))  # root may write anywhere
        patch.setattr("tempfile.NamedTemporaryFile", refuse)
        loaded = load(latest(path), *make())
    return found, loaded, told(latest, Path(folder, "file", "run"))


def test_folder_that_is_shared_is_left_as_it_was_and_can_be_read_only(tmp_path):
    (tmp_path / "file").touch()
    one, other = ranks.run(use_a_shared_folder, 2, folder=str(tmp_path))
    assert one == other
    found, loaded, words = one
    assert found == ["", "", ".lock latest save-00000001"]
    assert loaded == 7
    assert words.startswith(f"cannot continue or begin a run in {tmp_path}/file/run: NotADirectoryError: ")
    assert words.endswith("(on rank 0): choose another folder that all ranks share; nothing was changed")
