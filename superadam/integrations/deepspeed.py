"""Takes over runs of DeepSpeed: `load` continues their ZeRO checkpoints, `save_fp32` writes the masters as a model.

DeepSpeed need not be installed.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import Shard

from superadam.distributed import shards
from superadam.host.signals import THIS_THREAD
from superadam.integrations.checkpoint_contents import reshard
from superadam.integrations.checkpoint_folder import CheckpointError
from superadam.integrations.checkpoint_ranks import CheckpointRanks
from superadam.integrations.fp32_weights import WRAPPERS, save_fp32, unwrapped
from superadam.integrations.zero_checkpoint import ZeroCheckpoint
from superadam.kernels.torch_private import dtensor_like
from superadam.offload import arguments
from superadam.optim.adam import SpeculativeCPUAdam
from superadam.optim.arguments import parameters_of

__all__ = ["load", "save_fp32"]


def load(
    folder: str | os.PathLike[str],
    model: nn.Module,
    optimizer: SpeculativeCPUAdam,
    *,
    process_group: dist.ProcessGroup | None = None,
) -> int:
    """Continue a run of DeepSpeed: load its checkpoint of ZeRO-1, 2 or 3; every rank calls this.

    Masters and moments (fp32), step counts, and `lr`, `betas`, `eps` and `weight_decay` of each group go to the
    optimizer; rounded masters, frozen parameters and buffers to the model. Parameters may be shards of FSDP2, on any
    number of ranks. In addition to the state, one parameter at a time is in memory. Each file is read once before, by
    one of the ranks, to find damage.

    Args:
        folder: what `save_checkpoint` wrote, a `global_step` folder in it, or what `ds_to_universal` wrote.
        process_group: the ranks that load; all by default.

    Returns:
        The steps that DeepSpeed counted, skipped ones included: where a learning-rate schedule goes on.

    Raises:
        CheckpointError: it is damaged, of a layout that is not read (tensor or pipeline parallel, NVMe), or of another
            model or other groups; the message says whether anything was loaded.
    """
    ranks = CheckpointRanks(
        process_group, f"cannot load DeepSpeed's checkpoint from {folder}", "", "nothing was loaded"
    )
    ranks.require_same(folder=str(folder))
    checkpoint, targets = ranks.run(lambda: _opened(Path(folder), model, optimizer))
    ranks.run(lambda: checkpoint.verify(ranks.rank, ranks.size))

    def restore_state() -> None:
        try:
            optimizer.load_state_dict(_state_dict(checkpoint, targets, optimizer))
        except ValueError as error:
            raise error.__cause__ or error from None  # what reading the checkpoint raised

    def restore_weights() -> None:
        with torch.no_grad():
            for name, target in targets.items():
                is_trained = name in checkpoint.places
                values = checkpoint.flat(name, "fp32") if is_trained else checkpoint.others[name]
                shards.local_of(target).copy_(_part(name, values, target))

    ranks.restore(restore_state, restore_weights)
    return checkpoint.steps


def _opened(folder: Path, model: nn.Module, optimizer: SpeculativeCPUAdam) -> tuple[ZeroCheckpoint, dict[str, Tensor]]:
    """Return a checkpoint that fits, and the tensors that it is loaded into, by its names."""
    with THIS_THREAD.without_handlers:
        try:
            checkpoint = ZeroCheckpoint(folder)
        except (KeyError, IndexError, AttributeError, TypeError) as error:
            raise CheckpointError(
                f"it has another layout than DeepSpeed 0.19.8 writes without tensor or pipeline parallelism ({error!r})"
            ) from error
    reshard(model)
    plain = {WRAPPERS.sub("", name): name for name in checkpoint.shapes}  # as it may be of a compiled model
    named = {
        plain.get(short := WRAPPERS.sub("", name), short): tensor
        for tensors in (unwrapped(model).named_parameters, unwrapped(model).named_buffers)
        for name, tensor in tensors(remove_duplicate=False)
    }
    for name, shape in checkpoint.shapes.items():
        if name not in named:
            raise CheckpointError(f"it has {name}, which the model lacks, expected a checkpoint of the same model")
        if tuple(named[name].shape) != tuple(shape):
            found, expected = tuple(shape), tuple(named[name].shape)
            raise CheckpointError(f"{name} is of shape {found} in it, expected {expected} as in the model")
    names = {id(named[name]): name for name in checkpoint.places}
    trained = {*map(id, parameters_of(arguments.unwrapped(optimizer)))}
    if idle := [name for each, name in names.items() if each not in trained]:
        raise CheckpointError(
            f"it has state of {idle[0]}, which the optimizer lacks, expected the parameters it trains"
        )
    if new := [name for name, tensor in named.items() if id(tensor) in trained - names.keys()]:
        raise CheckpointError(f"it has no state of {new[0]}, which the optimizer trains, expected state of all")
    tied = [name for name in checkpoint.others if id(named[name]) in names]
    return checkpoint, {name: named[name] for name in checkpoint.shapes if name not in tied}


def _state_dict(
    checkpoint: ZeroCheckpoint, targets: dict[str, Tensor], optimizer: SpeculativeCPUAdam
) -> dict[str, Any]:
    names = {id(targets[name]): name for name in checkpoint.places}
    ordered: list[tuple[str, Tensor]] = []
    groups, continued = [], ("lr", "betas", "eps", "weight_decay")
    for group in optimizer.param_groups:
        own = [(names[id(parameter)], parameter) for parameter in group["params"]]
        kinds = [{key: checkpoint.group_of(name)[key] for key in continued} for name, _ in own]
        if any(kind != kinds[0] for kind in kinds):
            raise CheckpointError("it has other parameter groups than the optimizer, expected those of the same model")
        is_decoupled = group["decoupled_weight_decay"]
        kind = checkpoint.group_of(own[0][0]).get("decoupled_weight_decay", is_decoupled) if own else is_decoupled
        if kind != is_decoupled and kinds[0]["weight_decay"]:
            ways = "that of Adam (L2)", "that of AdamW"
            raise CheckpointError(
                f"its weight decay is {ways[kind]}, expected {ways[is_decoupled]} as in the optimizer; make it a "
                f"SpeculativeCPUAdam{'W' * kind}"
            )
        first = len(ordered)
        ordered += own
        groups.append({**group, **(kinds[0] if kinds else {}), "params": [*range(first, len(ordered))]})
    return {"state": _State(checkpoint, ordered), "param_groups": groups}


class _State(Mapping[int, dict[str, Any]]):
    """The state of a state dict, of which an entry is read when it is asked for."""

    def __init__(self, checkpoint: ZeroCheckpoint, parameters: list[tuple[str, Tensor]]) -> None:
        self._checkpoint, self._parameters = checkpoint, parameters

    def __len__(self) -> int:
        return len(self._parameters)

    def __iter__(self) -> Iterator[int]:
        return iter(range(len(self)))

    def __getitem__(self, index: int) -> dict[str, Any]:
        name, parameter = self._parameters[index]
        local = shards.local_of(parameter)
        keys = {"exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq", "master": "fp32"}
        entry: dict[str, Any] = {"step": self._checkpoint.step(name)}
        for ours, theirs in keys.items():
            part = _part(name, self._checkpoint.flat(name, theirs), parameter)
            entry[ours] = dtensor_like(parameter, part) if shards.is_distributed(parameter) else part
        if local.dtype in (torch.float32, torch.float64) and local.device.type == "cpu":  # it is its own master
            del entry["master"]  # which was read all the same, to refuse what cannot be loaded before any of it is
        return entry


def _part(name: str, values: Tensor, target: Any) -> Tensor:
    """Return this rank's part of a whole tensor."""
    if values.numel() != target.numel():
        raise CheckpointError(f"{name} has {values.numel()} elements in it, expected {target.numel()}; it is damaged")
    values = values.reshape(target.shape)
    for dimension, placement in enumerate(target.placements if shards.is_distributed(target) else ()):
        if placement.is_replicate():
            continue
        if type(placement) is not Shard:
            raise CheckpointError(f"{name} is placed {placement}, expected Shard or Replicate, as FSDP2 alone does")
        chunks = values.chunk(target.device_mesh.size(dimension), placement.dim)
        place = target.device_mesh.get_coordinate()[dimension]
        values = chunks[place] if place < len(chunks) else values.narrow(placement.dim, 0, 0)
    return values
