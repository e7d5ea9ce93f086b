"""The masters of a model as its weights: what DeepSpeed's `zero_to_fp32` makes, as files of safetensors."""

from __future__ import annotations

import functools
import json
import os
import re
import shutil
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from superadam.distributed import shards
from superadam.host.files import lock, synchronize
from superadam.integrations import checkpoint_contents
from superadam.integrations.checkpoint_folder import CheckpointError
from superadam.integrations.checkpoint_ranks import CheckpointRanks
from superadam.kernels.torch_private import WRAPPER_NAMES, dtensor_like
from superadam.offload import arguments
from superadam.optim.adam import SpeculativeCPUAdam
from superadam.optim.arguments import parameters_of
from superadam.optim.entry import Encoded, raw

FILE_BYTES = 5_000_000_000
"""Of one file of safetensors, as transformers writes them."""

_LOCK = ".lock"

_Tensors = dict[str, tuple[Tensor, Any]]
"""Tensors of a model by name, with what holds the value of each: a master, or itself."""

WRAPPERS = re.compile("|".join(re.escape(f"{name}.") for name in WRAPPER_NAMES))


def save_fp32(
    folder: str | os.PathLike[str],
    model: nn.Module,
    optimizer: SpeculativeCPUAdam,
    *,
    process_group: dist.ProcessGroup | None = None,
) -> Path:
    """Write the model with its fp32 masters instead of rounded weights, as safetensors; every rank calls this.

    It is what DeepSpeed's `zero_to_fp32` makes: files and index as transformers has them, with the configuration of a
    model that has one. Tied weights are written once; integers and fp64 stay. Rank 0 holds one file, of 5 GB or of one
    larger tensor, at a time.

    Args:
        folder: does not exist, or is empty; there is nothing in it until all was written.
        optimizer: it may be in a framework's wrapper.
        process_group: the ranks that write; all by default.

    Returns:
        The folder.

    Raises:
        CheckpointError: it is in use, or cannot be written to; nothing is left behind.
        ImportError: safetensors is not installed.
    """
    try:
        from safetensors.torch import save_file
    except ImportError as error:
        raise ImportError(f"save_fp32() needs safetensors ({error}); pip install safetensors") from error
    ranks = CheckpointRanks(process_group, f"cannot write masters to {folder}", "", "nothing was written")
    ranks.require_same(folder=str(folder))
    model = unwrapped(model)
    path = ranks.run(lambda: Path(os.path.realpath(folder)))  # no symbolic link, which a folder cannot replace
    part, stack = path.parent / f".{path.name}.part", ExitStack()

    tensors, seen = ranks.run(lambda: (_masters(model, optimizer), checkpoint_contents.seen(model, ranks.size)))
    names = [group.get("param_names") for group in arguments.unwrapped(optimizer).param_groups]
    ranks.require_same((names, [(name, tuple(parameter.shape)) for name, (parameter, _) in tensors.items()]), seen)

    ranks.on_first(lambda: _begin(path, part, stack))
    files = _files_of(tensors)
    try:
        for name, content in files.items():
            # All ranks take part in each tensor, once none lacks memory for its part, and the first one keeps it.
            whole = {
                key: tensor
                for key, each in content.items()
                for part_of_it in [ranks.run(functools.partial(_part, *each))]
                for tensor in [ranks.run(functools.partial(_whole, part_of_it))]
                if ranks.rank == 0
            }
            ranks.on_first(functools.partial(save_file, whole, part / name, {"format": "pt"}))
            whole.clear()  # before there is another one
        ranks.on_first(lambda: _publish(part, path, model, files))
    finally:
        if ranks.rank == 0:
            shutil.rmtree(part, ignore_errors=True)
        stack.close()
    return path


def _begin(path: Path, part: Path, stack: ExitStack) -> None:
    """Make the folder that is written to, and lock it until the stack is closed."""
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise CheckpointError(f"{path} is not empty, expected a new folder; choose another one")
    part.mkdir(parents=True, exist_ok=True)  # there is one where a save was killed
    try:
        lock(part / _LOCK, 0.0, stack)
    except BlockingIOError:
        raise CheckpointError(f"another process is writing to {part}; wait for it") from None
    for left in {*part.iterdir()} - {part / _LOCK}:
        left.unlink()


def _files_of(tensors: _Tensors) -> dict[str, _Tensors]:
    """Divide tensors among files, by the files' names; there is at least one."""
    contents: list[_Tensors] = [{}]
    size = 0  # of the last file
    for name, (parameter, master) in tensors.items():
        size += 4 * parameter.numel()
        if size > FILE_BYTES and contents[-1]:
            contents.append({})
            size = 4 * parameter.numel()
        contents[-1][name] = parameter, master
    if len(contents) == 1:
        return {"model.safetensors": contents[0]}
    count = len(contents)
    return {f"model-{number:05}-of-{count:05}.safetensors": some for number, some in enumerate(contents, 1)}


def _publish(part: Path, path: Path, model: nn.Module, files: Mapping[str, _Tensors]) -> None:
    """Add what goes with the weights, and give the folder its name."""
    if len(files) > 1:
        index = {"metadata": {}, "weight_map": {key: name for name, content in files.items() for key in content}}
        (part / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
    for kind in ("config", "generation_config"):
        if hasattr(getattr(model, kind, None), "save_pretrained"):
            getattr(model, kind).save_pretrained(part)
    for each in (*part.glob("[!.]*"), part):
        synchronize(each)
    part.replace(path)
    try:
        (path / _LOCK).unlink()
        synchronize(path.parent)
    except OSError:
        path.replace(part)  # which is deleted
        raise


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the model that DistributedDataParallel has wrapped, and perhaps torch.compile that; others themselves."""
    model = getattr(model, WRAPPER_NAMES[0], model)
    return model.module if isinstance(model, DistributedDataParallel) else model


def _masters(model: nn.Module, optimizer: SpeculativeCPUAdam) -> _Tensors:
    """Return the tensors of the model, each once."""
    checkpoint_contents.reshard(model)
    optimizer = arguments.unwrapped(optimizer)
    optimizer._adopt_sampled_writes()
    with optimizer._encoded():
        state = optimizer.state_dict()["state"]
        entries = {id(each): state.get(index, {}) for index, each in enumerate(parameters_of(optimizer))}
    if entries.keys().isdisjoint(map(id, model.parameters())):
        raise CheckpointError("the optimizer has none of the model's parameters, expected the model that it trains")
    named: _Tensors = {}
    seen = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if isinstance(tensor, Tensor) and id(tensor) not in seen:
            seen.add(id(tensor))
            named[WRAPPERS.sub("", name)] = tensor, raw(entries.get(id(tensor), {})).get("master", tensor)
    return named


def _part(parameter: Any, master: Tensor | Encoded) -> Any:
    """Return a tensor at least in fp32 if it is of floats, distributed as the parameter is."""
    if isinstance(master, Encoded):
        master = replace(master, parameter=None).decoded()
    local = shards.local_of(master.detach())
    if local.is_floating_point() and local.itemsize < 4:
        local = local.float()
    if shards.is_distributed(parameter):
        return dtensor_like(parameter, local.to(parameter.device_mesh.device_type))
    return local


def _whole(tensor: Any) -> Tensor:
    """Return a whole tensor on the CPU."""
    whole: Tensor = tensor.full_tensor() if shards.is_distributed(tensor) else tensor
    return whole.cpu().resolve_conj().resolve_neg().contiguous()  # safetensors writes what lies in memory
