"""Checkpoints of sharded models: the same state on any number of ranks, one fate for all, and folders that jobs share.

Also of saves beside training.
"""

import contextlib
import gc
import itertools
import os
import resource
import shutil
import signal
import threading
import weakref
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from support import ranks
from support.shards import gathered, model_of, wrap
from support.visible import content
from torch import distributed, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, distribute_tensor

from superadam import OffloadScheduler, SpeculativeCPUAdamW
from superadam.host.memory import Claim
from superadam.integrations import background_save, checkpoint_folder, deepspeed, distributed_checkpoint
from superadam.integrations.distributed_checkpoint import CheckpointError, latest, load, save, wait
from superadam.kernels.torch_private import timeout_of

pytestmark = pytest.mark.slow

ranks.preload("superadam.integrations.distributed_checkpoint")


def make(
    kind: Any = SpeculativeCPUAdamW, seed: int = 0, replicas: int = 1, dtype: torch.dtype = torch.float32
) -> tuple[Any, Any]:
    shape = replicas, distributed.get_world_size() // replicas
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicas", "shards"))
    model = model_of(dtype, seed, mesh=mesh if replicas > 1 else mesh["shards"])
    return model, kind([{"params": [p for p in model.parameters() if p.requires_grad]}], lr=0.01)


def train(model: nn.Module, optimizer: Any, seed: int) -> None:
    torch.manual_seed(seed)
    inputs: Any = torch.randn(2, 4, 6).to(next(model.parameters()).dtype)
    model(inputs[0]).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    with torch.no_grad():
        model(inputs[1])  # leaves the root with other parameters than the optimizer's


def told(work: Any, *arguments: Any) -> str:
    """Return what a call is refused with."""
    with pytest.raises(CheckpointError) as error:
        work(*arguments)
    return str(error.value)


def resume(rank: int, *, kind: Any, folder: str, seed: int, waits: bool = True, **options: Any) -> tuple[Any, ...]:
    """Load a checkpoint, train, and save; return what was loaded, what was saved, and `extra`.

    Where it does not wait, training goes on meanwhile, and has the bits of training alone.
    """
    model, optimizer = make(kind, seed, **options)
    extra = load(folder, model, optimizer) if seed else []
    loaded = content(model, optimizer)
    train(model, optimizer, seed)
    names = [name for name, _ in model.named_parameters() if not name.startswith(("frozen", "unused"))]
    assert len(optimizer.state) == len(names)
    saved = content(model, optimizer)
    path = save(folder, model, optimizer, extra=[*extra, {"seed": seed, "rank": rank}], wait=waits)
    if not waits:
        scheduler = OffloadScheduler(optimizer, model, num_threads=1) if kind is SpeculativeCPUAdamW else None
        for one in (7, 8):
            train(model, optimizer, one)
        wait()
        assert path.exists()
        assert distributed.group.WORLD in background_save._groups
        plain = make(kind, 5, **options)
        load(path, *plain)
        for one in (7, 8):
            train(*plain, one)
        assert content(model, optimizer) == content(*plain)
        if scheduler is not None:
            scheduler.close()
    return loaded, saved, extra


@pytest.mark.covering(1)
@pytest.mark.parametrize("kind", [torch.optim.AdamW, SpeculativeCPUAdamW])
@pytest.mark.parametrize(("dtype", "waits"), [(torch.float32, True), (torch.bfloat16, False)])
def test_state_is_the_same_on_any_number_of_ranks(kind, dtype, waits, tmp_path):
    saved = []
    for seed, (size, replicas) in enumerate([(3, 1), (1, 1), (4, 2)]):
        options = {"replicas": replicas, "dtype": dtype, "waits": waits}
        results = ranks.run(resume, size, kind=kind, folder=str(tmp_path), seed=seed, **options)
        for loaded, _, extra in results:
            assert extra == [{"seed": before, "rank": 0} for before in range(seed)]
            assert seed == 0 or loaded == saved[-1]
        saved.append(results[0][1])
        assert all(result[1] == saved[-1] for result in results)
        assert seed == 0 or saved[-1] != saved[-2]
    assert [path.name for path in sorted(tmp_path.glob("save-*"))] == ["save-00000002", "save-00000003"]


def save_beside_training(folder: Any, model: Any, optimizer: Any) -> None:
    save(folder, model, optimizer, wait=False)
    wait()


@ranks.on_ranks(2)
def test_failure_on_one_rank_is_one_sentence_on_all_and_changes_nothing(rank, tmp_path):
    model, optimizer = make()
    train(model, optimizer, 0)
    save(tmp_path, model, optimizer, extra="older")
    newest = save(tmp_path, model, optimizer, extra="newer")
    train(model, optimizer, 1)
    before, files = content(model, optimizer), sorted(tmp_path.rglob("*"))
    distributed.barrier()
    words = []

    def refused(work: Any, *replaced: Any) -> None:
        with pytest.MonkeyPatch.context() as context:
            if rank == 1 and replaced:
                context.setattr(*replaced)
            words.append(told(work, tmp_path, model, optimizer))
        assert content(model, optimizer) == before
        distributed.barrier()
        assert sorted(tmp_path.rglob("*")) == files
        distributed.barrier()

    for victim in (0, 1):
        if rank == victim:
            resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.RLIM_INFINITY))
        refused(save)
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    refused(save, optimizer, "state_dict", lambda: 1 / 0)
    refused(save, checkpoint_folder, "sha256", lambda path: path.read_text("ascii"))
    refused(save_beside_training, checkpoint_folder, "sha256", lambda path: path.read_text("ascii"))
    refused(load, checkpoint_folder, "sha256", lambda path: path.read_text("ascii"))
    for damaged in sorted(newest.iterdir()):
        distributed.barrier()
        intact = damaged.read_bytes()
        distributed.barrier()
        if rank == 0:
            damaged.write_bytes(intact[:-1] + bytes([intact[-1] ^ 1]) if intact else b"x")
        distributed.barrier()
        refused(load)
        if rank == 0:
            damaged.write_bytes(intact)
    distributed.barrier()
    assert load(tmp_path, model, optimizer) == "newer"
    assert gathered(words) == [words] * 2
    assert not [sentence for sentence in words if "\n" in sentence]
    saves, loads = words[:5], words[5:]
    assert all(sentence.startswith(f"cannot save a checkpoint to {tmp_path}: ") for sentence in saves)
    assert ["on rank 0" in saves[0], *("on rank 1" in sentence for sentence in saves[1:])] == [True] * 5
    assert "(on rank 0): free some space, or choose another folder" in saves[0]
    assert "ZeroDivisionError: division by zero (on rank 1); earlier ones are" in saves[2]
    assert "UnicodeDecodeError" in loads[0]
    assert "no other one in it is intact" in loads[0]  # nor can rank 1 read the older one
    intact = f"nothing was loaded: load {tmp_path / 'save-00000001'}, which is intact"
    assert len(loads) == 1 + len(list((tmp_path / "save-00000001").iterdir())) == 6
    assert all(sentence.endswith(intact) for sentence in loads[1:])


@ranks.on_ranks(2)
def test_interrupt_of_one_rank_ends_the_load_of_all(rank, tmp_path):
    """At three moments, after each of which all load together."""
    model, optimizer = make()
    train(model, optimizer, 0)
    for extra in ("older", "newer"):
        save(tmp_path, model, optimizer, extra=extra)
    words = []
    for moment in (
        (checkpoint_folder, "verify"),
        (optimizer, "load_state_dict"),
        (distributed_checkpoint, "set_model_state_dict"),
    ):
        with pytest.MonkeyPatch.context() as context:
            if rank == 1:
                context.setattr(*moment, Mock(side_effect=KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt if rank == 1 else CheckpointError) as error:
                load(tmp_path, model, optimizer)
        words.append(str(error.value))
        assert load(tmp_path, model, optimizer) == "newer"
    told = f"cannot load a checkpoint from {tmp_path}: KeyboardInterrupt:  (on rank 1); "
    partly = "a part of it was loaded: load again before training"
    assert words == [""] * 3 if rank == 1 else [told + "nothing was loaded", told + partly, told + partly]


@ranks.on_ranks(2)
def test_interrupt_of_one_rank_between_collectives_is_told_once_it_calls_again(rank, tmp_path):
    """Within what a gather is made of, and after it; then the next call goes well."""
    model, optimizer = make()
    train(model, optimizer, 0)
    save(tmp_path, model, optimizer)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    moments = [*((distributed.distributed_c10d, "all_gather", number) for number in (1, 2, 7))]
    aside = partial(save, wait=False)
    beside = [(aside, distributed, "new_group", 1), (aside, distributed_checkpoint._NewCheckpoint, "copy", 1)]
    for call, owner, name, number in [*beside, *((call, *moment) for call in (save, load) for moment in moments)]:
        original, left = getattr(owner, name), itertools.count(1)

        def interrupted(*args: Any, original: Any = original, number: int = number, left: Any = left, **kwargs: Any):
            result = original(*args, **kwargs)
            if next(left) == number:
                signal.raise_signal(signal.SIGINT)
            return result

        act = partial(call, tmp_path, model, optimizer)
        if rank == 1:
            with pytest.MonkeyPatch.context() as context:
                context.setattr(owner, name, interrupted)
                with pytest.raises(KeyboardInterrupt):
                    act()
        told = rf"^cannot .*: ranks \[{1 - rank}\] are elsewhere in the program than rank {rank}, as after "
        if name != "new_group":  # from where on the save goes on beside what Ctrl-C leads to
            ranks.raises(CheckpointError, told, act)
        elif rank == 0:
            act()
        act()
        wait()


@ranks.on_ranks(2)
def test_the_collector_stays_on_while_a_save_in_the_background_waits_for_other_ranks(rank, tmp_path, monkeypatch):
    """Else training, whose cycles with tensors in them were not freed, would run out of memory meanwhile."""
    model, optimizer = make()
    train(model, optimizer, 0)
    gather, is_on = distributed.all_gather_object, []

    def waiting(*args: Any, **kwargs: Any) -> None:
        if threading.current_thread() is not threading.main_thread():
            is_on.append(gc.isenabled())
        gather(*args, **kwargs)

    monkeypatch.setattr(distributed, "all_gather_object", waiting)
    save(tmp_path, model, optimizer, wait=False)
    wait()
    assert is_on
    assert all(is_on)


@ranks.on_ranks(2)
def test_an_error_of_several_ranks_in_a_hook_that_loads_with_dcp_is_told_to_all(rank, tmp_path):
    model, optimizer = make()
    train(model, optimizer, 0)
    save(tmp_path, model, optimizer)

    failures = {each: (ValueError(each), None) for each in range(2)}
    if rank == 0:
        model.register_load_state_dict_pre_hook(Mock(side_effect=CheckpointException("", failures)))
    ranks.raises(CheckpointError, r"ValueError: 0 \(on rank 0\)", partial(load, tmp_path, model, optimizer))


def die(rank: int, *, folder: str, victim: int, waits: bool) -> tuple[Any, str]:
    """Kill one rank in the middle of the second save; return the first one's content, and what the other raises."""
    model, optimizer = make()
    train(model, optimizer, 0)
    save(folder, model, optimizer, extra=[])
    saved = content(model, optimizer)
    train(model, optimizer, 1)
    if rank == victim:
        checkpoint_folder.sha256 = lambda path: os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(RuntimeError) as error:
        (save if waits else save_beside_training)(folder, model, optimizer)
    return saved, str(error.value)


@pytest.mark.covering(1)
@pytest.mark.parametrize("waits", [True, False])
@pytest.mark.parametrize("victim", [0, 1])
def test_rank_that_is_killed_leaves_the_older_one(victim, waits, tmp_path):
    results = ranks.run(die, 2, folder=str(tmp_path), victim=victim, waits=waits)
    assert results[victim] == ranks.ENDED
    saved, words = results[1 - victim]
    if not waits:
        assert words.startswith("cannot end a save in the background: ")
        assert "see whether a rank has ended" in words
        assert "\n" not in words
    assert len(list(tmp_path.glob(".save-*"))) == (victim == 0)  # rank 0 tidies up; without it, the next save does
    loaded, _, _ = ranks.run(resume, 2, kind=SpeculativeCPUAdamW, folder=str(tmp_path), seed=1)[0]
    assert loaded == saved
    assert sorted(os.listdir(tmp_path)) == [".lock", "latest", "save-00000001", "save-00000002"]


@ranks.on_ranks(3)
def test_process_group_may_be_a_part_of_the_ranks(rank, tmp_path):
    """The last two of three. What they talk through waits as long, and is no part of what all three make later.

    Nor does it keep the group of all alive.
    """
    group = distributed.new_group([1, 2], timeout=timedelta(seconds=77))
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    for number, waits in enumerate((True, False) if rank else (), 1):
        path = save(tmp_path, model, optimizer, extra=rank, process_group=group, wait=waits)
        assert path == tmp_path / f"save-0000000{number}"
        saved = model.weight.detach().clone()
        nn.init.zeros_(model.weight)
        assert load(tmp_path, model, optimizer, process_group=group) == 1
        assert torch.equal(model.weight, saved)
    if rank:
        assert timeout_of(background_save.gloo_group_of(group)) == timedelta(seconds=77)
    calls = [partial(call, model=model, optimizer=optimizer) for call in (save, partial(save, wait=False), load)]
    for call in [latest, *calls] if rank == 0 else ():
        assert "process_group is a group without this rank, 0; " in told(partial(call, process_group=group), tmp_path)
    distributed.barrier(distributed.new_group(timeout=timedelta(seconds=20)))
    world = weakref.ref(distributed.group.WORLD)
    distributed.destroy_process_group()
    assert world() is None


@ranks.on_ranks(2)
def test_what_would_be_that_of_one_rank_is_refused(rank, tmp_path):
    """Shards among values, and stages whose parameters have equal names."""
    model, optimizer = make()
    train(model, optimizer, 0)
    values = [[next(iter(optimizer.state)).detach()]]
    words = [told(partial(save, extra=values), tmp_path, model, optimizer)]
    next(iter(optimizer.state.values()))["more"] = values
    words.append(told(save, tmp_path, model, optimizer))
    assert all("in the optimizer's state, holds a DTensor, expected" in sentence for sentence in words)
    torch.manual_seed(rank)
    group = distributed.new_group([rank], use_local_synchronization=True)
    sharded, stage = nn.Linear(3, 2), nn.Linear(3, 2)
    fully_shard(sharded, mesh=DeviceMesh("cpu", [rank]))
    for each in (sharded, stage):
        own = SpeculativeCPUAdamW(each.parameters(), process_group=group)
        for call in (save, deepspeed.save_fp32):
            assert "ranks [1] have other parameters than rank 0" in told(call, tmp_path / "run", each, own)
    assert not os.listdir(tmp_path)
    nn.init.ones_(stage.weight)  # now only the biases differ, as those of which a loss is independent
    save(tmp_path, stage, SpeculativeCPUAdamW(stage.parameters()))
    nn.init.constant_(stage.weight.requires_grad_(False)[1], rank)  # frozen, and saved all the same
    assert "ranks [1] have" in told(save, tmp_path, stage, SpeculativeCPUAdamW([stage.bias]))
    stage.weight.data = torch.ones(2, 3)
    stage.other = nn.Parameter(distribute_tensor(torch.ones(2, 3), DeviceMesh("cpu", [0])), requires_grad=False)
    save(tmp_path / "other", stage, SpeculativeCPUAdamW([stage.bias]))
    stage.weight.untyped_storage().resize_(0)  # of which there is nothing to compare
    assert "weight has no data" in told(save, tmp_path / "new", stage, SpeculativeCPUAdamW([stage.bias]))


@ranks.on_ranks(2)
def test_what_differs_between_ranks_is_one_sentence_on_all(rank, tmp_path):
    """Arguments, and step counts, of which a checkpoint has one."""
    model, optimizer = make(SpeculativeCPUAdamW, 1)
    train(model, optimizer, 1)
    save(tmp_path, model, optimizer)
    calls: dict[Any, Any] = {latest: ()}
    calls.update(dict.fromkeys((save, load, deepspeed.load, deepspeed.save_fp32), (model, optimizer)))
    cases = [
        *((partial(save, tmp_path, *calls[save], wait=wait), "wait", wait) for wait in (rank == 0, rank == 1)),
        (partial(save, tmp_path, *calls[save], keep=2 - rank), "keep", 2 - rank),
        *((partial(call, own := tmp_path / f"{rank}", *rest), "folder", str(own)) for call, rest in calls.items()),
    ]
    called, parameter = next(iter(model.named_parameters()))
    before = content(model, optimizer)
    for call, name, value in cases:
        here, there = gathered(value)
        assert f": {name} is {here!r} on rank 0 and {there!r} on rank 1, expected the same on all ranks; " in told(call)
        assert content(model, optimizer) == before
    assert sorted(os.listdir(tmp_path)) == [".lock", "latest", "save-00000001"]
    for each in model.parameters():
        each.grad = None if rank and each is parameter else torch.zeros_like(each)
    optimizer.step()
    words = told(save, tmp_path, model, optimizer)
    assert f"the step count of {called} is 2.0 on rank 0 and 1.0 on rank 1, expected" in words
    load(tmp_path, model, optimizer)
    save(tmp_path, model, optimizer, wait=False)
    wait()


@ranks.on_ranks(2)
def test_number_that_all_ranks_have(rank, tmp_path):
    """And a parameter that is called as what the optimizer keeps."""
    ones = (distribute_tensor(torch.ones(shape), init_device_mesh("cpu", (2,)), [Replicate()]) for shape in ((), (4,)))
    model = nn.ParameterDict(zip(("one", "step"), ones, strict=True))
    optimizer = SpeculativeCPUAdamW(model.parameters())
    for parameter in model.values():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    before = content(model, optimizer)
    save(tmp_path, model, optimizer)
    optimizer.step()
    load(tmp_path, model, optimizer)
    assert content(model, optimizer) == before


GB = 10**9
LEFT: dict[str, tuple[list[dict[str, int]], str | None]] = {
    "on two machines": ([{"a": 11 * GB}, {"b": 11 * GB}], None),
    "on one machine": (
        [{"a": 11 * GB}, {"a": 11 * GB, "a group": 11 * GB}],
        "10.00 GB of host memory, with those of other ranks 20.00 GB, of which 11.00 GB are left",
    ),
}
"""What is left on each rank where each takes 10 GB, and what a save is refused with."""


@ranks.on_ranks(2)
def test_ranks_without_memory_for_copies_are_one_sentence_on_all(rank, tmp_path):
    model, optimizer = make(SpeculativeCPUAdamW, 1)
    train(model, optimizer, 1)
    save(tmp_path, model, optimizer)
    before = content(model, optimizer)
    for left, words in LEFT.values():
        files = sorted(os.listdir(tmp_path))
        distributed.barrier()
        with pytest.MonkeyPatch.context() as context:
            context.setattr(Claim, "of", lambda host, size: Claim(10 * GB, left[rank]))  # noqa: B023
            with nullcontext() if words is None else pytest.raises(CheckpointError, match=f"take {words}: pass"):
                save(tmp_path, model, optimizer, wait=False)
        wait()
        distributed.barrier()
        assert (sorted(os.listdir(tmp_path)) == files) is (words is not None)
        assert content(model, optimizer) == before
    other = make(SpeculativeCPUAdamW, 5)
    load(tmp_path, *other)
    assert content(*other) == before


MOMENTS: dict[str, Any] = {"_run": background_save, "write_data": FileSystemWriter, "sha256": checkpoint_folder}


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
def test_save_outlives_the_process_group(moment, late, tmp_path):
    """gloo's lives for as long as the save refers to it."""
    ranks.run(destroy, 2, folder=str(tmp_path), late=late, moment=moment)
    assert (tmp_path / "save-00000002").exists()
    ranks.run(load_newest, 2, folder=str(tmp_path))


def load_newest(rank: int, *, folder: str) -> None:
    load(folder, *make(SpeculativeCPUAdamW, 2))


def make_compact(size: int, moments: str, master: str) -> tuple[Any, SpeculativeCPUAdamW]:
    """Return a model of weights that have whole blocks on every rank, and of others that begin at all positions.

    On several ranks it is sharded.
    """
    torch.manual_seed(0)
    layers = nn.Linear(64, 128), nn.Linear(128, 64, bias=False), nn.Linear(9, 5), nn.Linear(3, 9)
    model = nn.Sequential(*layers).bfloat16()
    if size > 1:
        wrap([*model, model])
    return model, SpeculativeCPUAdamW(model.parameters(), lr=1e-2, moments=moments, master=master, max_grad_norm=1.0)


def train_compact(model: nn.Module, optimizer: SpeculativeCPUAdamW, steps: range) -> None:
    for step in steps:
        for number, parameter in enumerate(model.parameters()):
            generator = torch.Generator().manual_seed(100 * step + number)
            whole = torch.randn(parameter.shape, generator=generator).bfloat16()
            mesh = getattr(parameter, "device_mesh", None)
            parameter.grad = whole if mesh is None else distribute_tensor(whole, mesh, parameter.placements)
        optimizer.speculate()
        optimizer.step()


def continue_compact(rank: int, *, folder: str, seed: int, moments: str, master: str) -> dict[str, Any]:
    """Continue from a checkpoint, if there is one, and save."""
    model, optimizer = make_compact(distributed.get_world_size(), moments, master)
    if seed:
        load(folder, model, optimizer)
    train_compact(model, optimizer, range(3 * seed, 3 * seed + 3))
    save(folder, model, optimizer)
    return content(model, optimizer)


@pytest.mark.parametrize(("moments", "master"), [("bf16", "fp32"), ("8bit", "24bit")])
def test_has_the_bits_of_one_process_on_any_number_of_ranks(moments, master, tmp_path):
    """Two, four and one rank, one after the other; and without a checkpoint in between."""
    found = []
    for seed, size in enumerate([2, 4, 1]):
        arguments = {"folder": str(tmp_path), "seed": seed, "moments": moments, "master": master}
        results = ranks.run(continue_compact, size, **arguments)
        assert all(result == results[0] for result in results)
        found.append(results[0])
    model, optimizer = make_compact(1, moments, master)
    for seed, saved in enumerate(found):
        train_compact(model, optimizer, range(3 * seed, 3 * seed + 3))
        assert content(model, optimizer) == saved


HERE = "/proc/self/cwd/run"
"""A path that leads each process to a folder of its own, as on nodes that share no file system."""


@ranks.on_ranks(3)
def test_folder_that_ranks_do_not_share_is_found_when_the_run_begins(rank, tmp_path):
    """First in empty folders, then where each rank holds a copy of a run, and where each has its own."""
    own = tmp_path / str(rank)
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
        for is_copy in (True, False):
            if rank == 0 or not is_copy:  # save a model of this rank's own
                shutil.rmtree(own / "run")
                plain, alone = nn.Linear(4, 3), distributed.new_group([rank], use_local_synchronization=True)
                save(HERE, plain, torch.optim.AdamW(plain.parameters()), process_group=alone)
            distributed.barrier()
            if rank != 0 and is_copy:
                shutil.copytree(tmp_path / "0" / "run", own / "run", dirs_exist_ok=True)
            distributed.barrier()
            refused(latest, HERE)
            refused(load, HERE, model, optimizer)
            refused(load, Path(HERE, "save-00000001"), model, optimizer)
            refused(save, HERE, model, optimizer)
    assert gathered(words) == [words] * 3
    fault = f"{HERE} is another folder on ranks [1, 2] than on rank 0: choose one that all ranks share"
    begins = f"cannot continue or begin a run in {HERE}: {fault}; nothing was changed"
    saves = f"cannot save a checkpoint to {HERE}: {fault}; earlier ones are as they were"
    loads = f"cannot load a checkpoint from {{}}: {fault}; nothing was loaded"
    *found, last = words
    of_runs = [begins, loads.format(HERE), loads.format(f"{HERE}/save-00000001")]
    assert found == [begins, saves, begins, saves, *of_runs, last, *of_runs]
    assert "it holds save-00000001, which was neither loaded into this optimizer nor saved from it" in last


@ranks.on_ranks(2)
def test_folder_that_is_shared_is_left_as_it_was_and_can_be_read_only(rank, tmp_path):
    (tmp_path / "file").touch()
    path = tmp_path / "new" / "run"
    for _ in range(2):
        assert latest(path) is None
        distributed.barrier()
        assert os.listdir(path) == []
        distributed.barrier()
    model, optimizer = make()
    assert save(path, model, optimizer, extra=7) == latest(path)
    assert sorted(os.listdir(path)) == [".lock", "latest", "save-00000001"]
    distributed.barrier()
    with pytest.MonkeyPatch.context() as patch:  # root may write anywhere
        patch.setattr("tempfile.NamedTemporaryFile", Mock(side_effect=PermissionError("read-only")))
        assert load(latest(path), *make()) == 7
    words = told(latest, tmp_path / "file" / "run")
    assert words.startswith(f"cannot continue or begin a run in {tmp_path}/file/run: NotADirectoryError: ")
    assert words.endswith("(on rank 0): choose another folder that all ranks share; nothing was changed")
