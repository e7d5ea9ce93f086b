"""`distributed_checkpoint.save(wait=False)` on several ranks under `fully_shard`."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed.test_sharded_checkpoint import content, make, train
from support import ranks
from torch import distributed
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from superadam import OffloadScheduler, SpeculativeCPUAdamW
from superadam.host.memory import Claim
from superadam.integrations import background_save, checkpoint_folder
from superadam.integrations.distributed_checkpoint import CheckpointError, load, save, wait

pytestmark = pytest.mark.slow


def save_beside(rank: int, *, kind: Any, folder: str, **options: Any) -> None:
    """Save beside training twice, the second time into memory that was kept; compare with plain training."""
    has_scheduler = kind is SpeculativeCPUAdamW
    model, optimizer = make(kind, 1, **options)
    plain = make(kind, 1, **options)
    scheduler = OffloadScheduler(optimizer, model, num_threads=1) if has_scheduler else None
    for number in range(2):
        train(model, optimizer, number)
        train(*plain, number)
        before = content(*plain)
        path = save(folder, model, optimizer, extra=number, wait=False)
        for seed in (7, 8):
            train(model, optimizer, seed)
            train(*plain, seed)
        wait()
        assert path.exists()
        assert content(model, optimizer) == content(*plain)
        other = make(kind, 5, **options)
        assert load(path, *other) == number
        assert content(*other) == before
    assert len(background_save._groups) == 1
    if scheduler is not None:
        scheduler.close()


@pytest.mark.covering(1)
@pytest.mark.parametrize("kind", [torch.optim.AdamW, SpeculativeCPUAdamW])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("size", "replicas"), [(2, 1), (4, 2)])
def test_content_is_that_of_its_step_and_training_has_the_same_bits(
    kind: Any, dtype: torch.dtype, size: int, replicas: int, tmp_path: Path
) -> None:
    ranks.run(save_beside, size, kind=kind, folder=str(tmp_path), dtype=dtype, replicas=replicas)


def fail(rank: int, *, folder: str) -> list[str]:
    """Let a save fail on one rank; return what the next calls say."""
    model, optimizer = make(SpeculativeCPUAdamW, 1)
    train(model, optimizer, 1)
    words = []
    for call in (wait, lambda: save(folder, model, optimizer)):
        with pytest.MonkeyPatch.context() as context:
            if rank == 1:
                context.setattr(checkpoint_folder, "sha256", lambda path: 1 / 0)
            save(folder, model, optimizer, wait=False)
            train(model, optimizer, 2)
            with pytest.raises(CheckpointError) as error:
                call()
        words.append(str(error.value))
    save(folder, model, optimizer, wait=False)
    wait()
    return words


def test_failure_on_one_rank_is_one_sentence_on_all(tmp_path: Path) -> None:
    first, second = ranks.run(fail, 2, folder=str(tmp_path))
    assert first == second
    for sentence in first:
        assert "ZeroDivisionError: division by zero (on rank 1)" in sentence
        assert "\n" not in sentence
    assert (tmp_path / "save-00000001").exists()


def lack_memory(rank: int, *, folder: str, left: list[dict[str, int]]) -> str | None:
    """Save where each rank takes 10 GB of what is left; return what that was refused with."""
    model, optimizer = make(SpeculativeCPUAdamW, 1)
    train(model, optimizer, 1)
    save(folder, model, optimizer)
    before, files = content(model, optimizer), sorted(os.listdir(folder))
    words = None
    with pytest.MonkeyPatch.context() as context:
        context.setattr(Claim, "of", lambda host, size: Claim(10 * 10**9, left[rank]))
        try:
            save(folder, model, optimizer, wait=False)
        except CheckpointError as error:
            words = str(error)
            distributed.barrier()
            assert sorted(os.listdir(folder)) == files
    wait()
    assert content(model, optimizer) == before
    other = make(SpeculativeCPUAdamW, 5)
    load(folder, *other)
    assert content(*other) == before
    return words


GB = 10**9


@pytest.mark.parametrize(
    ("left", "words"),
    [
        ([{"a": 11 * GB}, {"b": 11 * GB}], None),
        ([{"a": 21 * GB}, {"a": 21 * GB}], None),
        ([{"a": 11 * GB}, {"b": 9 * GB}], "10.00 GB of host memory, of which 9.00 GB are left"),
        (
            [{"a": 11 * GB}, {"a": 11 * GB, "a group": 11 * GB}],
            "10.00 GB of host memory, with those of other ranks 20.00 GB, of which 11.00 GB are left",
        ),
    ],
    ids=["on two machines", "enough", "one has less", "on one machine"],
)
def test_ranks_without_memory_for_copies_are_one_sentence_on_all(
    left: list[dict[str, int]], words: str | None, tmp_path: Path
) -> None:
    first, second = ranks.run(lack_memory, 2, folder=str(tmp_path), left=left)
    assert first == second
    if words is None:
        assert first is None
    else:
        assert f"copies of what it writes take {words}: pass wait=True" in first


def die(rank: int, *, folder: str, victim: int) -> str:
    """Kill a rank while it saves beside training; return what the next call of the other one says."""
    model, optimizer = make(SpeculativeCPUAdamW, 1)
    save(folder, model, optimizer)
    if rank == victim:
        checkpoint_folder.sha256 = lambda path: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment,return-value]
    save(folder, model, optimizer, wait=False)
    with pytest.raises(CheckpointError) as error:
        wait()
    return str(error.value)


@pytest.mark.parametrize("victim", [0, 1])
def test_rank_that_is_killed_is_one_sentence_and_leaves_the_older_one(victim: int, tmp_path: Path) -> None:
    words = ranks.run(die, 2, folder=str(tmp_path), victim=victim)[1 - victim]
    assert words.startswith("cannot end a save beside training: ")
    assert "see whether a rank has ended" in words
    assert "\n" not in words
    assert [path.name for path in tmp_path.glob("save-*")] == ["save-00000001"]


MOMENTS: dict[str, Any] = {
    "_run": background_save._Save,
    "write_data": FileSystemWriter,
    "sha256": checkpoint_folder,
}


def destroy(rank: int, *, folder: str, late: list[int], moment: str) -> None:
    """End the process group while some ranks are before a moment of a save."""
    model, optimizer = make(SpeculativeCPUAdamW, 1)
    save(folder, model, optimizer)
    goes_on = threading.Event()
    with pytest.MonkeyPatch.context() as context:
        if rank in late:
            owner = MOMENTS[moment]
            reach = getattr(owner, moment)
            context.setattr(owner, moment, lambda *given: (goes_on.wait(), reach(*given))[1])
        save(folder, model, optimizer, wait=False)
        distributed.destroy_process_group()
        goes_on.set()
        wait()


@pytest.mark.covering(1)
@pytest.mark.parametrize("late", [[0], [1], [0, 1]])
@pytest.mark.parametrize("moment", MOMENTS)
def test_save_outlives_the_process_group(moment: str, late: list[int], tmp_path: Path) -> None:
    """gloo's lives for as long as the save refers to it."""
    ranks.run(destroy, 2, folder=str(tmp_path), late=late, moment=moment)
    assert (tmp_path / "save-00000002").exists()
    ranks.run(load_newest, 2, folder=str(tmp_path))


def load_newest(rank: int, *, folder: str) -> None:
    load(folder, *make(SpeculativeCPUAdamW, 2))


def use_part_of_the_ranks(rank: int, *, folder: str) -> None:
    group = distributed.new_group([1, 2])
    if rank == 0:
        return
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    optimizer = SpeculativeCPUAdamW(model.parameters())
    for _ in range(2):
        save(folder, model, optimizer, process_group=group, wait=False)
    wait()
    assert load(folder, model, optimizer, process_group=group) is None


def test_process_group_may_be_a_part_of_the_ranks(tmp_path: Path) -> None:
    ranks.run(use_part_of_the_ranks, 3, folder=str(tmp_path))
    assert len(list(tmp_path.glob("save-*"))) == 2
