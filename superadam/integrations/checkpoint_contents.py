"""What a checkpoint of a model and an optimizer holds: tensors by name, and values that are no tensors.

model.NAME              a parameter or buffer
optimizer.NAME.KEY      the state of the parameter called NAME
"""

from __future__ import annotations

import io
import pickle
from contextlib import nullcontext
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.optim import Optimizer

from superadam.distributed import shards
from superadam.host.signals import THIS_THREAD
from superadam.integrations.checkpoint_folder import CheckpointError
from superadam.integrations.checkpoint_ranks import Seen
from superadam.kernels.memory import has_memory
from superadam.kernels.nested import tensors_in
from superadam.optim.adam import SpeculativeCPUAdam
from superadam.optim.arguments import parameters_of
from superadam.optim.entry import Encoded

VALUES = "values.pt"  # what is no tensor, and `extra`


def contents_of(model: nn.Module, optimizer: Optimizer) -> tuple[dict[str, Tensor | Encoded], dict[str, Any]]:
    """Return the tensors of a checkpoint, as users see them or encoded, and its values but for `extra`."""
    named = _named_state(model, optimizer)
    flat = {f"model.{name}": value for name, value in get_model_state_dict(model).items()}
    for name, entry in named["state"].items():
        if wrong := [key for key in entry if not isinstance(key, str) or "." in key]:
            raise CheckpointError(
                f"the state of {name} has the key {wrong[0]!r}, expected names without dots; rename it"
            )
        flat.update({f"optimizer.{name}.{key}": value for key, value in entry.items()})
    tensors: dict[str, Tensor | Encoded] = {
        name: value for name, value in flat.items() if isinstance(value, Tensor | Encoded)
    }
    others = {name: value for name, value in flat.items() if name not in tensors}
    return tensors, {"others": others, "param_groups": named["param_groups"]}


def template_of(
    reader: FileSystemReader, model: nn.Module, optimizer: Optimizer, values: dict[str, Any]
) -> tuple[dict[str, Tensor], list[dict[str, Any]]]:
    """Return host tensors for all in a checkpoint, sharded as the parameters are now, and its parameter groups.

    The file decides what state there is: a parameter without gradients has none, and torch's AdamW has no masters.
    Raises CheckpointError where it is of another model or other parameter groups.
    """
    groups = _named_state(model, optimizer)["param_groups"]
    if [sorted(group["params"]) for group in groups] != [sorted(group["params"]) for group in values["param_groups"]]:
        raise CheckpointError("it has other parameter groups than the optimizer, expected one of the same model")
    names = (name for group in groups for name in group["params"])
    parameters = dict(zip(names, parameters_of(optimizer), strict=True))
    state: dict[str, Any] = {f"model.{name}": value for name, value in get_model_state_dict(model).items()}
    expected = {
        name: (tuple(value.shape), value.dtype) if isinstance(value, Tensor) else "present"
        for name, value in state.items()
    }
    saved: dict[str, Any] = reader.read_metadata().state_dict_metadata
    tensors = {name: (tuple(entry.size), entry.properties.dtype) for name, entry in saved.items()}
    found: dict[str, object] = {**tensors, **dict.fromkeys(values["others"], "present")}
    differing = expected.items() ^ {(name, kind) for name, kind in found.items() if name.startswith("model.")}
    if differing:
        name = min(name for name, _ in differing)
        kinds = (some.get(name, "absent") for some in (found, expected))
        raise CheckpointError("{} is {} in it, expected {} as in the model".format(name.partition(".")[2], *kinds))
    template = {}
    for name, (shape, dtype) in tensors.items():
        parameter, _, key = name.removeprefix("optimizer.").rpartition(".")
        like = state[name] if name in state else parameters[parameter]
        if name not in state and (like.shape != shape or key == "step"):
            like = torch.empty(shape, device="cpu")
        template[name] = torch.empty_like(like, dtype=dtype, device="cpu", requires_grad=False)
    pairs = zip(groups, values["param_groups"], strict=True)
    own = {"params", "param_names"}  # which may have another order in it
    return template, [{**now, **saved, **{key: now[key] for key in own & now.keys()}} for now, saved in pairs]


def split(optimizer: Optimizer, content: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what was read as the state of optimizer and model by names; for torch's Adam without masters.

    torch's own way would make a step with zero gradients, and drop the state of frozen parameters.
    """
    state: dict[str, dict[str, Any]] = {}
    model_state: dict[str, Any] = {}
    for name, value in content.items():
        kind, _, name = name.partition(".")
        parameter, _, key = name.rpartition(".")
        if kind == "model":
            model_state[name] = value
        elif key != "master" or not isinstance(optimizer, torch.optim.Adam | torch.optim.AdamW):
            state.setdefault(parameter, {})[key] = value
    return state, model_state


def _named_state(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """Return the optimizer's state dict with the parameters' names in the model.

    torch would make a step with zero gradients to create state where there is none; an empty entry prevents that.
    """
    reshard(model)
    if not isinstance(optimizer, Optimizer):
        raise CheckpointError(f"optimizer is a {type(optimizer).__name__}, expected one Optimizer")
    if not {*parameters_of(optimizer)} <= {*model.parameters()}:
        raise CheckpointError("the optimizer has parameters that the model lacks, expected the model's own")
    state, first = optimizer.state, next(iter(parameters_of(optimizer)), None)
    if first is None:
        return {"state": {}, "param_groups": optimizer.state_dict()["param_groups"]}
    is_new = not state
    if is_new:
        state[first] = {}
    try:
        with optimizer._encoded() if isinstance(optimizer, SpeculativeCPUAdam) else nullcontext():
            named: dict[str, Any] = get_optimizer_state_dict(model, optimizer)
    finally:
        if is_new:
            del state[first]
    return {**named, "state": {name: entry for name, entry in named["state"].items() if entry}}


def reshard(model: nn.Module) -> None:
    """Give a model the parameters of its optimizer; after an evaluation, FSDP2 may have left whole ones there."""
    if not isinstance(model, nn.Module):
        raise CheckpointError(f"model is a {type(model).__name__}, expected one Module")
    for module in model.modules():
        if isinstance(module, FullyShardedDataParallel):
            raise CheckpointError("the model is wrapped in FullyShardedDataParallel, expected fully_shard")
        if isinstance(module, FSDPModule):
            module.reshard()


def seen(model: nn.Module, ranks: int) -> Seen:
    """Return a few elements of the matrices of a model of which so many ranks may have copies, nearly alike.

    None of what is distributed over all ranks, nor of vectors: where a bias has no effect, it is what ranks have
    rounded differently.
    """
    found = {}
    parameters: list[Any] = [*model.parameters()] if ranks > 1 else []
    for position, parameter in enumerate(parameters):
        if shards.is_distributed(parameter) and parameter.device_mesh.size() == ranks:
            continue
        local, part = shards.local_of(parameter).detach(), shards.counted_part(parameter)
        if part is not None and parameter.dim() > 1 and parameter.is_floating_point() and has_memory(local):
            found[position, part] = local.flatten()[:: max(1, local.numel() // 8)].tolist()
    return found


def bytes_of_values(values: dict[str, Any]) -> bytes:
    """Return what `values.pt` holds; raises CheckpointError where `load` would refuse it."""
    memory = io.BytesIO()
    with THIS_THREAD.without_handlers:
        try:
            if any(map(shards.is_distributed, tensors_in(values))):  # of which it would hold one rank's part
                raise CheckpointError(
                    "extra, or a list or dict in the optimizer's state, holds a DTensor, expected those in the state "
                    "itself or as buffers of the model; give full_tensor() of it"
                )
            torch.save(values, memory)
            read_values(io.BytesIO(memory.getvalue()))
        except (pickle.PickleError, AttributeError, TypeError, RecursionError):
            raise CheckpointError(
                "extra, a parameter group or the model's state holds an object, expected numbers, strings, lists, "
                "dicts and tensors"
            ) from None
    return memory.getvalue()


def read_values(file: Path | IO[bytes]) -> Any:
    """Return what `values.pt` holds, without executing anything."""
    return torch.load(file, map_location="cpu", weights_only=True, mmap=False)
