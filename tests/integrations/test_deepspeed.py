"""Runs of DeepSpeed go on with superadam: every bit of masters, moments and counts, and the losses that follow.

The folders in deepspeed_data/ were written by DeepSpeed 0.19.8 on CPUs (`support/deepspeed_run.py`): zeroS-N by stage S
on N ranks, `universal` by `ds_to_universal`. Where DeepSpeed is installed, they are written anew as well.
"""

import contextlib
import errno
import importlib.util
import json
import math
import os
import random
import shutil
import subprocess
import sys
import weakref
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support import deepspeed_run
from support.deepspeed_run import Model, groups_of, loss_of, words_of
from support.ranks import on_ranks, run
from support.visible import refused
from torch import distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from superadam import OffloadScheduler, SpeculativeCPUAdam, SpeculativeCPUAdamW
from superadam.integrations import deepspeed, fp32_weights, zero_checkpoint
from superadam.integrations.distributed_checkpoint import CheckpointError

DATA = Path(__file__).parent / "deepspeed_data"
FOLDERS = ("zero1-2", "zero2-1", "zero2-2", "zero2-2/universal", "zero3-2", "zero3-2/universal", "zero3-2-small")
NAMES = ("embed.weight", "up.weight", "up.bias", "norm.weight", "norm.bias", "down.weight")
KEPT = ("base_optimizer_state", "single_partition_of_fp32_groups", "partition_count")  # no objects of DeepSpeed
TOLERANCE = 1e-4  # relative: DeepSpeed reduces gradients in bf16


def training(*, dtype: torch.dtype = torch.bfloat16, is_sharded: bool = False, **options: Any) -> tuple[Any, Any]:
    """Return model and optimizer before they continue; buffers stay fp32, as DeepSpeed leaves them."""
    model: Any = Model()
    for parameter in model.parameters():
        parameter.data = torch.zeros_like(parameter, dtype=dtype)
    model.shift.zero_()
    if is_sharded:
        fully_shard(model, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32))
    groups = [{**group, "weight_decay": 0.5} for group in groups_of(model)]  # which the checkpoint corrects
    return model, SpeculativeCPUAdamW(groups, lr=1.0, max_grad_norm=1.0, **options)


def continued(folder: str, **options: Any) -> tuple[Any, Any]:
    model, optimizer = training(**options)
    assert deepspeed.load(DATA / folder, model, optimizer) == deepspeed_run.STEPS
    return model, optimizer


def loaded(model: Any, optimizer: Any) -> dict[str, torch.Tensor]:
    """Return all that a run continues with, by the names of files that ds_to_universal writes."""
    found = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            entry = dict(optimizer.state[parameter])
            entry["fp32"] = entry.pop("master", parameter.detach())
            for key, value in entry.items():
                found[f"{name}/{key}"] = value.full_tensor() if isinstance(value, DTensor) else value
    return found


def universal(folder: Path) -> dict[str, torch.Tensor]:
    found = {}
    for name in NAMES:
        for key in ("fp32", "exp_avg", "exp_avg_sq"):
            read = torch.load(folder / "zero" / name / f"{key}.pt", weights_only=True)
            found[f"{name}/{key}"] = read["param"] if isinstance(read, dict) else read
        found[f"{name}/step"] = torch.tensor(float(deepspeed_run.STEPS))
    return found


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == torch.float32, name
        assert torch.equal(found[name].flatten(), value.flatten()), name


def later_losses(model: Any, optimizer: Any, rank: int = 0, ranks: int = 1) -> list[float]:
    losses = []
    for step in range(deepspeed_run.STEPS, deepspeed_run.STEPS + deepspeed_run.LATER_STEPS):
        loss = loss_of(model(words_of(step, rank, ranks)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        loss = loss.detach() / ranks
        if ranks > 1:
            dist.all_reduce(loss)
        losses.append(loss.item())
    return losses


def expected_losses(folder: str) -> list[float]:
    return [*json.loads((DATA / folder.partition("/")[0] / "losses.json").read_text())]


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_run_goes_on_with_the_bits_and_losses_of_deepspeed(folder):
    model, optimizer = continued(folder)
    found = loaded(model, optimizer)
    if (DATA / folder.partition("/")[0] / "universal").is_dir():
        assert_same(found, universal(DATA / folder.partition("/")[0] / "universal"))
    module = torch.load(next((DATA / folder).rglob("*model_states.pt")), weights_only=True)["module"]
    for name, value in model.state_dict().items():
        if module[name].numel():  # not of ZeRO-3
            assert torch.equal(value, module[name]), name
        if f"{name}/fp32" in found:
            assert torch.equal(value, found[f"{name}/fp32"].to(torch.bfloat16)), name
    assert [(group["lr"], group["betas"], group["weight_decay"]) for group in optimizer.param_groups] == [
        (1e-4, (0.9, 0.99), 0.1),
        (1e-4, (0.9, 0.99), 0.0),
    ]
    with OffloadScheduler(optimizer, model):
        assert later_losses(model, optimizer) == pytest.approx(expected_losses(folder), rel=TOLERANCE)


def test_an_fp32_model_takes_the_masters_themselves():
    assert_same(loaded(*continued("zero3-2", dtype=torch.float32)), universal(DATA / "zero3-2/universal"))


@on_ranks(2)
def test_shards_of_fsdp2_take_over_a_run_of_two_ranks(rank):
    model, optimizer = continued("zero3-2", is_sharded=True)
    assert_same(loaded(model, optimizer), universal(DATA / "zero3-2/universal"))
    with OffloadScheduler(optimizer, model):
        assert later_losses(model, optimizer, rank, 2) == pytest.approx(expected_losses("zero3-2"), rel=TOLERANCE)


def test_gaps_where_deepspeed_aligns_each_parameter_are_passed_over(tmp_path):
    sizes = [[parameter.numel() for parameter in group["params"]] for group in groups_of(Model())]

    def align(path: Path) -> None:
        state = zero_checkpoint._read(path)["optimizer_state_dict"]
        for number, some in enumerate(sizes):
            moments = state["base_optimizer_state"]["state"][number]
            masters = state["single_partition_of_fp32_groups"]
            for flat, key in ((masters, number), (moments, "exp_avg"), (moments, "exp_avg_sq")):
                parts = flat[key][: sum(some)].split(some)
                flat[key] = torch.cat([torch.nn.functional.pad(part, (0, 3), value=math.nan) for part in parts])
        state["param_alignment_paddings"] = [[3] * len(some) for some in sizes]
        path.unlink()  # which is mapped
        torch.save({"optimizer_state_dict": {key: state[key] for key in (*KEPT, "param_alignment_paddings")}}, path)

    model, optimizer = training()
    deepspeed.load(edited(tmp_path, "zero2-1", "*optim*", align), model, optimizer)
    assert_same(loaded(model, optimizer), loaded(*continued("zero2-1")))


@pytest.mark.parametrize("key", ["bias_correction", "correct_bias"])  # of DeepSpeed, of transformers 4
def test_a_state_dict_in_the_layout_of_its_cpu_adam_loads_as_it_is_or_is_refused_without_correction(key):
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer = SpeculativeCPUAdamW([parameter])
    group = {"lr": 0.1, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.0, key: True, "amsgrad": False}
    entry = {"step": 7, "exp_avg": torch.rand(3), "exp_avg_sq": torch.rand(3)}
    with refused(optimizer, ValueError, f"{key} False, expected True, as here"):
        optimizer.load_state_dict({"state": {0: entry}, "param_groups": [{**group, key: False, "params": [0]}]})
    optimizer.load_state_dict({"state": {0: entry}, "param_groups": [{**group, "params": [0]}]})
    assert torch.equal(optimizer.state[parameter]["exp_avg_sq"], entry["exp_avg_sq"])
    assert (optimizer.state[parameter]["step"], optimizer.param_groups[0]["lr"]) == (7, 0.1)


def masters_on_ranks(rank: int, folder: str) -> None:
    deepspeed.save_fp32(folder, *continued("zero3-2", is_sharded=True))


@pytest.mark.parametrize(("ranks", "file_bytes"), [(1, 10**9), (1, 152), (2, 10**9)])
def test_masters_are_written_as_a_model(tmp_path, monkeypatch, ranks, file_bytes):
    safetensors = pytest.importorskip("safetensors.torch")
    monkeypatch.setattr(fp32_weights, "FILE_BYTES", file_bytes)
    folder = tmp_path / "new" / "model"
    if ranks == 1:
        model, optimizer = continued("zero3-2")
        for name in ("config", "generation_config"):
            setattr(model, name, SimpleNamespace(save_pretrained=lambda part, name=name: (part / name).write_text("")))
        assert deepspeed.save_fp32(folder, model, optimizer) == folder
        assert {path.name for path in folder.glob("*config")} == {"config", "generation_config"}
    else:
        run(masters_on_ranks, ranks, folder=str(folder))
    assert [path.name for path in folder.parent.iterdir()] == ["model"]
    files = sorted(folder.glob("*.safetensors"))
    parts = [safetensors.load_file(path) for path in files]
    found = {name: value for part in parts for name, value in part.items()}
    assert sum(map(len, parts)) == len(found) == len(Model().state_dict())
    for name in NAMES:
        assert torch.equal(found[name].flatten(), universal(DATA / "zero3-2/universal")[f"{name}/fp32"].flatten())
    assert {value.dtype for value in found.values()} == {torch.float32}
    if file_bytes == 152:  # the first two tensors fill a file
        assert [path.name for path in files] == [f"model-{number:05}-of-00005.safetensors" for number in range(1, 6)]
        index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
        assert index == {name: path.name for path, part in zip(files, parts, strict=True) for name in part}
    Model().load_state_dict(found)


@on_ranks(2)
def test_names_are_those_of_the_model_that_is_wrapped(rank, tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    model, optimizer = training()
    wrapped = torch.compile(DistributedDataParallel(torch.compile(model)))
    deepspeed.load(DATA / "zero3-2", wrapped, optimizer)
    deepspeed.save_fp32(tmp_path / "model", wrapped, optimizer)
    Model().load_state_dict(safetensors.load_file(tmp_path / "model/model.safetensors"))
    flat = FullyShardedDataParallel(Model(), device_id=torch.device("cpu"), use_orig_params=True)
    optimizer = SpeculativeCPUAdamW(flat.parameters())
    with refused(optimizer, CheckpointError, "expected fully_shard .*; nothing was written"):
        deepspeed.save_fp32(tmp_path / "flat", flat, optimizer)


@pytest.mark.parametrize("name", ["dtensor_like", "_whole"])
@on_ranks(2)
def test_all_ranks_are_told_where_one_has_no_memory_for_its_part_or_a_whole_tensor(rank, name, tmp_path):
    model, optimizer = continued("zero3-2", is_sharded=True)
    gather, left = getattr(fp32_weights, name), [3]

    def gather_some(*arguments: Any) -> torch.Tensor:
        tensor = gather(*arguments)
        left[0] -= 1
        if left[0] == rank == 0:
            raise MemoryError("planted")
        return tensor

    refusal = pytest.raises(CheckpointError, match=r"MemoryError: planted \(on rank 0\); nothing was written")
    with pytest.MonkeyPatch.context() as patch, refusal:
        patch.setattr(fp32_weights, name, gather_some)
        deepspeed.save_fp32(tmp_path / "model", model, optimizer)
    dist.barrier()
    assert os.listdir(tmp_path) == []


def test_compact_masters_are_written_as_they_are_decoded(tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    model, optimizer = continued("zero2-1", master="24bit", moments="bf16")
    model.up.weight.data = model.up.weight.data.t().contiguous().t()  # which safetensors would refuse
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "link").symlink_to("elsewhere")
    deepspeed.save_fp32(tmp_path / "link", model, SimpleNamespace(optimizer=optimizer))
    found = safetensors.load_file(tmp_path / "elsewhere/model.safetensors")
    assert torch.equal(found["up.weight"], optimizer.state[model.up.weight]["master"])


def test_tied_weights_are_written_once(tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    weight = torch.nn.Parameter(torch.ones(3))
    deepspeed.save_fp32(tmp_path / "model", torch.nn.ParameterList([weight, weight]), SpeculativeCPUAdamW([weight]))
    assert [*safetensors.load_file(tmp_path / "model/model.safetensors")] == ["0"]


def test_values_that_are_not_what_lies_in_memory_are_written_as_they_are(tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    model = torch.nn.ParameterList([torch.ones(3)])
    model.register_buffer("conjugate", torch.full((2,), 1 + 2j).conj())
    model.register_buffer("negative", torch._neg_view(torch.ones(2)))
    deepspeed.save_fp32(tmp_path / "model", model, SpeculativeCPUAdamW(model.parameters()))
    found = safetensors.load_file(tmp_path / "model/model.safetensors")
    assert {name: value.tolist() for name, value in found.items()} == {
        name: value.tolist() for name, value in model.state_dict().items()
    }


def test_what_cannot_be_written_leaves_nothing_behind(tmp_path, monkeypatch):
    (tmp_path / "other").write_text("")
    parameter = torch.nn.Parameter(torch.ones(3))
    shared = torch.nn.ParameterList([parameter, torch.nn.Parameter(parameter.data)])
    for folder, (model, optimizer), words in (
        (tmp_path, training(), "not empty, expected a new folder; choose another one; nothing was written"),
        (tmp_path / "model", (shared, SpeculativeCPUAdamW(shared.parameters())), "share memory.*; nothing was written"),
        (tmp_path / "model", (Model(), training()[1]), "has none of the model's parameters.*; nothing was written"),
        ("/", training(), "not empty, expected a new folder; choose another one; nothing was written"),
        (b"bytes", training(), "TypeError: .*; nothing was written"),
    ):
        with refused(optimizer, CheckpointError, words):
            deepspeed.save_fp32(folder, model, optimizer)
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    with refused(optimizer, ImportError, r"save_fp32\(\) needs safetensors \(.*\); pip install safetensors"):
        deepspeed.save_fp32(tmp_path / "model", model, optimizer)
    assert os.listdir(tmp_path) == ["other"]


@pytest.mark.parametrize("fails", [False, True])
def test_masters_are_on_the_disk_before_their_folder_has_its_name(fails, tmp_path, monkeypatch):
    pytest.importorskip("safetensors")
    calls, replace = [], Path.replace

    def synchronize(descriptor: int) -> None:
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        calls.append(Path(path).suffix)
        if fails and path == str(tmp_path):
            raise OSError(errno.EIO, "planted")

    monkeypatch.setattr(os, "fsync", synchronize)
    monkeypatch.setattr(Path, "replace", lambda *paths: calls.append("replace") or replace(*paths))
    (tmp_path / ".model.part").mkdir()  # of a save that was killed
    (tmp_path / ".model.part/model-00001-of-00009.safetensors").write_text("")
    model, optimizer = continued("zero3-2")
    with refused(optimizer, CheckpointError, "planted.*; nothing was written") if fails else contextlib.nullcontext():
        deepspeed.save_fp32(tmp_path / "model", model, optimizer)
    assert calls == [".safetensors", ".part", "replace", "", *(["replace"] if fails else [])]
    assert {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")} == (
        set() if fails else {"model", "model/model.safetensors"}
    )


def test_two_writers_of_one_folder_do_not_mix(tmp_path, monkeypatch):
    safetensors = pytest.importorskip("safetensors.torch")
    save_file, (model, optimizer) = safetensors.save_file, continued("zero2-1")

    def save(*arguments: Any) -> None:
        monkeypatch.setattr(safetensors, "save_file", save_file)
        with refused(optimizer, CheckpointError, "another process is writing to .*; nothing was written"):
            deepspeed.save_fp32(tmp_path / "model", model, optimizer)
        save_file(*arguments)

    monkeypatch.setattr(safetensors, "save_file", save)
    deepspeed.save_fp32(tmp_path / "model", *continued("zero3-2"))
    assert os.listdir(tmp_path) == ["model"]
    Model().load_state_dict(safetensors.load_file(tmp_path / "model/model.safetensors"))


def test_one_file_of_masters_is_in_memory_at_a_time(tmp_path, monkeypatch):
    safetensors = pytest.importorskip("safetensors.torch")
    monkeypatch.setattr(fp32_weights, "FILE_BYTES", 200)
    model, optimizer = continued("zero3-2")
    written: list[Any] = []
    save_file, gather = safetensors.save_file, fp32_weights._whole

    def save(content: dict[str, torch.Tensor], *arguments: Any) -> None:
        written.extend(map(weakref.ref, content.values()))
        save_file(content, *arguments)

    def gather_after(*arguments: Any) -> torch.Tensor:
        assert all(tensor() is None for tensor in written)
        return gather(*arguments)

    monkeypatch.setattr(safetensors, "save_file", save)
    monkeypatch.setattr(fp32_weights, "_whole", gather_after)
    deepspeed.save_fp32(tmp_path / "model", model, optimizer)
    assert len(written) == len(Model().state_dict())


def edited(tmp_path: Path, folder: str, pattern: str, change: Any) -> Path:
    """Return a copy of a checkpoint in which all files of a pattern were changed."""
    copy = tmp_path / "copy"
    shutil.copytree(DATA / folder, copy)
    for path in copy.rglob(pattern):
        change(path)
    return copy


def changed_model(change: Any) -> Any:
    def write(path: Path) -> None:
        content = torch.load(path, weights_only=True)
        change(content)
        torch.save(content, path)

    return write


def changed_adam(change: Any) -> Any:
    """Return what changes Adam's state in a file, without `param_slice_mappings`."""

    def write(path: Path) -> None:
        state = zero_checkpoint._read(path)["optimizer_state_dict"]
        change(state["base_optimizer_state"])
        path.unlink()  # which is mapped
        torch.save({"optimizer_state_dict": {key: state[key] for key in KEPT}}, path)

    return write


def decayed_as_adam(path: Path, version: str = "") -> None:
    """Make a file one of DeepSpeed's own Adam with `adam_w_mode: false`, or of a version that has not written that."""
    made = {"type": "Adam", "params": {} if version else {"adam_w_mode": False}}
    if "optim" in path.name:
        changed_adam(lambda adam: [group.pop("decoupled_weight_decay") for group in adam["param_groups"]])(path)
    else:
        changed_model(lambda it: it.update(ds_config={"optimizer": made}, ds_version=version))(path)


mixed_up = changed_model(lambda content: content["ds_config"]["zero_optimization"].update(round_robin_gradients=True))

FAULTS: dict[str, tuple[str, str, Any, str]] = {
    "no optimizer": ("zero2-2", "*optim*", Path.unlink, r"no files \*optim_states.pt, expected a checkpoint of ZeRO"),
    "no model": ("zero2-2", "*model_states*", Path.unlink, r"no files \*model_states.pt"),
    "a rank is missing": ("zero3-2", "*rank_1_mp_rank_00_optim*", Path.unlink, "optim_states of 1 ranks, expected 2"),
    "a rank has no model": ("zero3-2", "*rank_1_mp_rank_00_model*", Path.unlink, "model_states of 1 ranks, expected 2"),
    "latest lies": ("zero2-2", "latest", lambda path: path.write_text("gone"), "No such file"),
    "cut off": ("zero2-1", "*optim*", lambda path: os.truncate(path, 900), "optim_states.pt is damaged"),
    "cut later": ("zero2-1", "*optim*", lambda path: os.truncate(path, 5000), "optim_states.pt is damaged"),
    "a pipe": ("zero2-1", "*model*", lambda path: path.unlink() or os.mkfifo(path), "model_states.pt is damaged"),
    "tensor parallel": (
        "zero2-1",
        "*model*",
        lambda path: shutil.copy(path, path.with_name("mp_rank_01_model_states.pt")),
        "mp_rank_01_model_states.pt is of tensor, pipeline or expert parallelism, which is not read; experts",
    ),
    "another layout": (
        "zero2-1",
        "*model*",
        changed_model(lambda content: content.pop("param_shapes")),
        r"another layout than DeepSpeed 0.19.8 writes without tensor or pipeline parallelism \(KeyError",
    ),
    **{
        name: ("zero2-2", "*rank*optim*", changed_adam(change), sentence)
        for name, change, sentence in (
            ("SuperOffload", lambda adam: adam["state"].clear(), "no moments of embed.weight, .* of SuperOffload"),
            ("maximize", lambda adam: adam["param_groups"][0].update(maximize=True), "with amsgrad, maximize or"),
            ("uncorrected", lambda adam: adam["param_groups"][1].update(correct_bias=False), "without bias correction"),
            ("NAdam", lambda adam: adam["param_groups"][1].pop("amsgrad"), "another optimizer, expected Adam or AdamW"),
            ("L2", lambda adam: adam["param_groups"][0].update(decoupled_weight_decay=False), "a SpeculativeCPUAdam;"),
        )
    },
    "of two saves": (
        "zero2-2",
        "*rank_1*optim*",
        changed_adam(lambda adam: adam["state"][0].update(step=torch.tensor(77.0))),
        r"its shards are of steps \[3.0, 77.0\], expected one save",
    ),
    "Adam of DeepSpeed": ("zero2-1", "*.pt", decayed_as_adam, r"that of Adam \(L2\), expected that of AdamW"),
    "mixed up": ("zero2-2/universal", "*model_states*", mixed_up, "ds_to_universal mixes .*, load the checkpoint it"),
    "a moment is missing": ("zero3-2", "exp_avg.pt", Path.unlink, "No such file"),
    "masters next to moments are missing": ("zero3-2", "fp32.pt", Path.unlink, "No such file"),
    **{
        name: ("zero2-1", "*model*", changed_model(change), sentence)
        for name, change, sentence in (
            ("name", lambda it: it["param_shapes"][0].update(other=torch.Size([1])), "other, which the model lacks"),
            (
                "shape",
                lambda it: it["param_shapes"][0].update({"up.weight": torch.Size([5, 9])}),
                r"is of shape \(5, 9",
            ),
            ("untrained", lambda it: it["param_shapes"][1].pop("up.bias"), "no state of up.bias, which the optimizer"),
        )
    },
    **{
        name: ("zero3-2", "exp_avg.pt", partial(torch.save, content), f"{sentence}; it is damaged")
        for name, content, sentence in (
            ("a moment is text", {"param": "none"}, "exp_avg.pt holds str, expected a tensor"),
            ("a moment is short", torch.zeros(1), "embed.weight has 1 elements in it, expected 35"),
        )
    },
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("fault", FAULTS)
def test_what_cannot_be_continued_changes_nothing(tmp_path, fault, dtype):
    folder, pattern, change, sentence = FAULTS[fault]
    copy = edited(tmp_path, folder, pattern, change)
    model, optimizer = training(dtype=dtype)
    sentence += "" if "nothing" in sentence else ".*nothing was loaded"
    with refused(optimizer, CheckpointError, sentence):
        deepspeed.load(copy / "universal" if "moment" in fault else copy, model, optimizer)
    assert not model.shift.any()


def test_other_things_than_a_model_and_an_optimizer_of_ours_are_one_sentence(tmp_path):
    model, optimizer = training()
    for given, words in (
        ((None, optimizer), "model is a NoneType, expected one Module"),
        ((model, torch.optim.AdamW(model.parameters())), "optimizer is a AdamW, expected a SpeculativeCPUAdam"),
    ):
        for call, folder in ((deepspeed.load, DATA / "zero2-1"), (deepspeed.save_fp32, tmp_path / "new")):
            with refused(optimizer, CheckpointError, f"{words}.*; nothing was"):
                call(folder, *given)
    assert not model.shift.any()
    assert not list(tmp_path.iterdir())


def everything(folder: Path) -> list[Any]:
    """Return what a run continues with from a folder."""
    model, optimizer = training()
    steps = deepspeed.load(folder, model, optimizer)
    values = loaded(model, optimizer) | model.state_dict()
    return [steps, optimizer.state_dict()["param_groups"], {name: value.tolist() for name, value in values.items()}]


@pytest.mark.parametrize("key", ["bias_correction", "correct_bias"])  # of DeepSpeed, of transformers 4
def test_mappings_that_are_wrong_with_round_robin_gradients_are_not_needed(tmp_path, key):
    change = changed_adam(lambda adam: [each.update({key: not each.pop("amsgrad")}) for each in adam["param_groups"]])
    assert everything(edited(tmp_path, "zero2-2", "*rank*optim*", change)) == everything(DATA / "zero2-2")


def test_what_older_ones_have_lost_is_not_guessed(tmp_path):
    model, _ = training()
    optimizer = SpeculativeCPUAdam(groups_of(model))
    copy = edited(tmp_path, "zero2-1", "*.pt", partial(decayed_as_adam, version="0.19.3"))
    assert deepspeed.load(copy, model, optimizer) == deepspeed_run.STEPS
    decayed_as_adam(next(copy.rglob("*model*")), "0.19.4")  # which lost nothing: it is the default
    with refused(optimizer, CheckpointError, r"that of AdamW, expected that of Adam \(L2\)"):
        deepspeed.load(copy, model, optimizer)


def test_files_are_in_the_order_of_the_numbers_of_their_ranks(tmp_path):
    names = [f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in (2, 9, 10, 100)]
    for name in names:
        (tmp_path / name).touch()
    assert zero_checkpoint._shards_of(tmp_path) == names


def test_a_frozen_parameter_of_one_element_is_that_of_the_first_rank():
    """Others have padding."""
    pieces = ({"scale": torch.tensor([value])} for value in (3.0, 0.0))
    models = [{"frozen_param_shapes": {"scale": (1,)}, "frozen_param_fragments": piece} for piece in pieces]
    assert zero_checkpoint._frozen(models)["scale"].tolist() == [3.0]


def test_round_robin_of_one_rank_mixes_nothing_up(tmp_path):
    copy = edited(tmp_path, "zero2-2/universal", "*model_states*", mixed_up)
    groups = zero_checkpoint._read(path := copy / "zero/optimizer_state.pt")["param_groups"]
    path.unlink()  # which is mapped
    torch.save({"partition_count": [1, 1], "param_groups": groups}, path)
    assert everything(copy) == everything(DATA / "zero2-2/universal")


def compiled(content: dict[str, Any]) -> None:
    for shapes in (content["module"], *content["param_shapes"], content["frozen_param_shapes"] or {}):
        shapes.update({f"_orig_mod.{name}": shapes.pop(name) for name in [*shapes]})


def of_another_stage(content: dict[str, Any]) -> None:
    content["ds_config"]["zero_optimization"].update(round_robin_gradients=True, stage=1)


def without_config(content: dict[str, Any]) -> None:
    content["ds_config"] = None  # as older versions write it


UNLIKE = [("zero2-1", compiled), ("zero2-2/universal", of_another_stage), ("zero2-2", without_config)]


@pytest.mark.parametrize(("folder", "change"), UNLIKE)
def test_what_says_nothing_of_the_values_changes_nothing(tmp_path, folder, change):
    assert everything(edited(tmp_path, folder, "*model_states*", changed_model(change))) == everything(DATA / folder)


def test_files_without_checksums_are_not_taken_for_damaged_ones(tmp_path):
    torch.serialization.set_crc32_options(False)
    try:
        copy = edited(tmp_path, "zero2-1", "*model_states*", changed_model(lambda content: None))
    finally:
        torch.serialization.set_crc32_options(True)
    assert everything(copy) == everything(DATA / "zero2-1")


@pytest.mark.parametrize("folder", ["zero2-1", "zero3-2-small", "zero3-2/universal"])
def test_a_flipped_bit_is_refused_or_is_one_that_nothing_reads(tmp_path, folder):
    expected, draw = everything(DATA / folder), random.Random(folder)
    copy, refusals = tmp_path / "copy", 0
    for _ in range(30):
        shutil.copytree(DATA / folder, copy)
        path = draw.choice(sorted(copy.rglob("*.pt")))
        content = bytearray(path.read_bytes())
        content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
        path.write_bytes(content)
        try:
            assert everything(copy) == expected, path
        except CheckpointError:
            refusals += 1
        shutil.rmtree(copy)
    assert refusals > 0


def test_other_parameter_groups_are_refused():
    model, _ = training()
    optimizer = SpeculativeCPUAdamW([one for one in model.parameters() if one.requires_grad])
    with refused(optimizer, CheckpointError, "other parameter groups than the optimizer"):
        deepspeed.load(DATA / "zero3-2", model, optimizer)


class Trap:
    """Would leave a file behind if a checkpoint could call anything."""

    def __init__(self, call: Any) -> None:
        self.call = call

    def __reduce__(self) -> Any:
        return self.call, (deepspeed_run.__file__, "trapped")


@pytest.mark.parametrize("call", [shutil.copy, os.symlink])
def test_nothing_that_a_checkpoint_names_is_executed(tmp_path, monkeypatch, call):
    monkeypatch.chdir(tmp_path)
    content = torch.load(DATA / "zero2-1/global_step3/mp_rank_00_model_states.pt", weights_only=True)
    copy = edited(tmp_path, "zero2-1", "*model*", lambda path: torch.save({**content, "trap": Trap(call)}, path))
    model, optimizer = training()
    if call is shutil.copy:  # unknown to torch, thus inert
        deepspeed.load(copy, model, optimizer)
    else:  # torch loads nothing that names the system
        with refused(optimizer, CheckpointError, "model_states.pt is damaged, or holds what is not loaded"):
            deepspeed.load(copy, model, optimizer)
    assert not Path("trapped").exists()


def test_state_is_read_a_parameter_at_a_time(monkeypatch):
    asked, kind = list[str](), zero_checkpoint.ZeroCheckpoint
    flat = kind.flat
    monkeypatch.setattr(kind, "flat", lambda self, name, key: asked.append(name) or flat(self, name, key))
    model, optimizer = training()
    entries = deepspeed._state_dict(kind(DATA / "zero3-2"), dict(model.named_parameters()), optimizer)["state"]
    assert not asked
    next(iter(entries.values()))
    assert {*asked} == {"embed.weight"}


@pytest.fixture(scope="module")
def environment():
    if importlib.util.find_spec("deepspeed") is None:
        pytest.skip("DeepSpeed is not installed")
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])  # it looks for ninja there
    return {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "PATH": path}


@pytest.mark.deep
@pytest.mark.slow
@pytest.mark.subprocess
@pytest.mark.parametrize(
    "zero", [{"stage": 1}, {"stage": 2}, {"stage": 2, "round_robin_gradients": True}, {"stage": 3}]
)
def test_deepspeed_itself_writes_what_is_read(tmp_path, environment, zero):
    program = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    words = [*program, deepspeed_run.__file__, str(tmp_path / "run"), json.dumps(zero)]
    subprocess.run(words, env=environment, check=True, capture_output=True)
    convert = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", "--inject_missing_state"]
    convert += ["--input_folder", str(tmp_path / "run/global_step3"), "--output_folder", str(tmp_path / "universal")]
    subprocess.run(convert, env=environment, check=True, capture_output=True)
    model, optimizer = training()
    deepspeed.load(tmp_path / "run", model, optimizer)
    if len(zero) == 1:  # else they are mixed up
        assert_same(loaded(model, optimizer), universal(tmp_path / "universal"))
    expected = json.loads((tmp_path / "run/losses.json").read_text())
    assert all(map(math.isfinite, expected))
    assert later_losses(model, optimizer) == pytest.approx(expected, rel=TOLERANCE)
