"""Checkpoints of sharded training with `torch.distributed.checkpoint` (DCP): saved atomically, verified before use.

The digests find damage, not malice: DCP's metadata is a pickle, so load only checkpoints that you trust.
"""

from __future__ import annotations

import os
import pickle
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
)
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.optim import Optimizer

from superadam.host.files import synchronize
from superadam.integrations import checkpoint_folder
from superadam.integrations.checkpoint_folder import CheckpointError

__all__ = ["CheckpointError", "load", "save"]

_VALUES = "values.pt"  # what is no tensor, and `extra`

_T = TypeVar("_T")


def save(
    folder: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer,
    *,
    extra: object = None,
    keep: int = 2,
    process_group: dist.ProcessGroup | None = None,
) -> Path:
    """Save model and optimizer as the newest checkpoint in `folder`, then delete older ones; every rank calls this.

    Args:
        folder: shared by all ranks, on a file system with `flock`; created if need be.
        extra: numbers, strings, lists, dicts and tensors, which `load` returns; that of rank 0 is stored.
        keep: number of checkpoints to keep, at least 1, the new one included.
        process_group: the ranks that save; all by default.

    Returns:
        The checkpoint's own folder.

    Raises:
        CheckpointError: saving failed on some rank; what was saved before is as it was.
    """
    ranks = _Ranks(
        process_group,
        f"cannot save a checkpoint to {folder}",
        ": free some space, or choose another folder that all ranks share",
        "earlier ones are as they were",
    )
    with ExitStack() as stack:

        def begin() -> tuple[Path, dict[str, Tensor], dict[str, Any]]:
            if type(keep) is not int or keep < 1:
                raise CheckpointError(f"keep is {keep!r}, expected a whole number of at least 1")
            tensors, values = _contents(model, optimizer)
            path = Path(folder).absolute()
            return checkpoint_folder.begin(path, stack) if ranks.rank == 0 else path, tensors, values

        path, tensors, values = ranks.run(begin)
        part = ranks.gather(path)[0]

        def write() -> checkpoint_folder.Files:
            writer = FileSystemWriter(part, overwrite=False, sync_files=False)
            with _one_process_is_fine():
                state_dict_saver.save(tensors, storage_writer=writer, process_group=process_group)
            own = [part / name for name in os.listdir(part) if name.startswith(f"__{ranks.rank}_")]
            if ranks.rank == 0:
                _write_values(part, {**values, "extra": extra})
                own += [part / _VALUES, part / ".metadata"]
            for path in own:
                synchronize(path)
            return {path.name: (path.stat().st_size, checkpoint_folder.sha256(path)) for path in own}

        files = {name: entry for share in ranks.gather(ranks.run(write)) for name, entry in share.items()}

        def publish() -> Path:
            return checkpoint_folder.publish(part, files, ranks.size, keep) if ranks.rank == 0 else part

        return ranks.gather(ranks.run(publish))[0]


def load(
    folder: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer,
    *,
    process_group: dist.ProcessGroup | None = None,
) -> Any:
    """Load the newest checkpoint in `folder` into model and optimizer, and return its `extra`; every rank calls this.

    Every byte is verified before any is used. There may be another number of ranks than when it was saved. Where there
    are no masters in it, as `torch.optim.AdamW` has none, they are read from the parameters; torch's gets none.

    Args:
        folder: as for `save`, or one checkpoint's own folder.
        process_group: the ranks that load; all by default.

    Raises:
        CheckpointError: the checkpoint is damaged, or of another model or other parameter groups. Nothing was loaded;
            the message names the newest other checkpoint that is intact.
    """
    ranks = _Ranks(process_group, f"cannot load a checkpoint from {folder}", "", "nothing was loaded")
    path, digest, others = ranks.gather(ranks.run(lambda: checkpoint_folder.locate(Path(folder).absolute())))[0]

    def fault_of(path: Path, digest: str | None) -> str | None:
        return ranks.fault(lambda: checkpoint_folder.verify(path, digest, ranks.rank, ranks.size))

    fault = fault_of(path, digest)
    if fault is not None:
        intact = next((other for other in others if fault_of(other, None) is None), None)
        advice = "no other one in it is intact" if intact is None else f"load {intact}, which is intact"
        raise CheckpointError(f"{ranks.failure}: {fault}; {ranks.outcome}: {advice}")

    def prepare() -> tuple[dict[str, Tensor], dict[str, Any]]:
        values = _read_values(path)
        return _template(FileSystemReader(path), model, optimizer, values), values

    tensors, values = ranks.run(prepare)

    def read() -> None:
        with _one_process_is_fine():
            state_dict_loader.load(tensors, storage_reader=FileSystemReader(path), process_group=process_group)

    ranks.run(read)
    ranks.run(lambda: _restore(model, optimizer, tensors, values))
    return values["extra"]


class _Ranks:
    """The ranks that save or load together, of which all fail if one does; a single one without torch.distributed."""

    def __init__(self, group: dist.ProcessGroup | None, failure: str, advice: str, outcome: str) -> None:
        self.group, self.failure, self.advice, self.outcome = group, failure, advice, outcome
        self.are_several = dist.is_available() and dist.is_initialized()
        self.rank = dist.get_rank(group) if self.are_several else 0
        self.size = dist.get_world_size(group) if self.are_several else 1

    def gather(self, value: _T) -> list[_T]:
        """Return the values of all ranks, in their order."""
        values = [value] * self.size
        if self.are_several:
            dist.all_gather_object(values, value, group=self.group)
        return values

    def run(self, work: Callable[[], _T]) -> _T:
        """Return what `work` returns, or raise CheckpointError on every rank if it raised on one."""
        results: list[_T] = []
        fault = self.fault(lambda: results.append(work()))
        if fault is not None:
            raise CheckpointError(f"{self.failure}: {fault}; {self.outcome}")
        return results[0]

    def fault(self, work: Callable[[], object]) -> str | None:
        """Return, on every rank, what `work` raised on the first one on which it did."""
        fault, rank = None, self.rank
        cause: BaseException | None = None
        try:
            work()
        except (Exception, CheckpointException) as error:
            cause = error
            if isinstance(error, CheckpointException):  # of DCP, the same on every rank
                rank, (cause, _) = min(error.failures.items(), key=lambda failure: failure[0])
            place = f" (on rank {rank})" if self.size > 1 else ""
            fault = f"{cause}{place}"
            if not isinstance(cause, CheckpointError):
                fault = f"{type(cause).__name__}: {(str(cause).splitlines() or [''])[0]}{place}{self.advice}"
        faults = self.gather(fault)
        if cause is not None and rank == self.rank and not isinstance(cause, Exception):
            raise cause  # Ctrl-C, which DCP has caught
        return next(filter(None, faults), None)


def _write_values(path: Path, values: dict[str, Any]) -> None:
    try:
        torch.save(values, path / _VALUES)
        _read_values(path)  # what load() would refuse
    except (pickle.PickleError, AttributeError, TypeError):
        raise CheckpointError(
            "extra or a parameter group holds an object, expected numbers, strings, lists, dicts and tensors"
        ) from None


def _read_values(path: Path) -> Any:
    return torch.load(path / _VALUES, map_location="cpu", weights_only=True)


@contextmanager
def _one_process_is_fine() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        yield


def _named_state(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """Return the optimizer's state dict with the parameters' names in the model.

    torch would make a step with zero gradients to create state where there is none; an empty entry prevents that.
    """
    for module in model.modules():
        if isinstance(module, FullyShardedDataParallel):
            raise CheckpointError("the model is wrapped in FullyShardedDataParallel, expected fully_shard")
        if isinstance(module, FSDPModule):
            module.reshard()  # after an evaluation, its parameters may not be those of the optimizer
    if not {*_parameters(optimizer)} <= {*model.parameters()}:
        raise CheckpointError("the optimizer has parameters that the model lacks, expected the model's own")
    state, first = optimizer.state, next(_parameters(optimizer))
    is_new = not state
    if is_new:
        state[first] = {}
    try:
        named: dict[str, Any] = get_optimizer_state_dict(model, optimizer)
    finally:
        if is_new:
            del state[first]
    return {**named, "state": {name: entry for name, entry in named["state"].items() if entry}}


def _contents(model: nn.Module, optimizer: Optimizer) -> tuple[dict[str, Tensor], dict[str, Any]]:
    named = _named_state(model, optimizer)
    flat = {f"model.{name}": value for name, value in get_model_state_dict(model).items()}
    for name, entry in named["state"].items():
        flat.update({f"optimizer.{name}.{key}": value for key, value in entry.items()})
    tensors = {name: value for name, value in flat.items() if isinstance(value, Tensor)}
    others = {name: value for name, value in flat.items() if name not in tensors}
    return tensors, {"others": others, "param_groups": named["param_groups"]}


def _template(
    reader: FileSystemReader, model: nn.Module, optimizer: Optimizer, values: dict[str, Any]
) -> dict[str, Tensor]:
    """Return host tensors for all in a checkpoint, sharded as the parameters are now.

    The file decides what state there is: a parameter without gradients has none, and torch's AdamW has no masters.
    Raises CheckpointError where it is of another model or other parameter groups.
    """
    groups = _named_state(model, optimizer)["param_groups"]
    if [sorted(group["params"]) for group in groups] != [sorted(group["params"]) for group in values["param_groups"]]:
        raise CheckpointError("it has other parameter groups than the optimizer, expected one of the same model")
    names = (name for group in groups for name in group["params"])
    parameters = dict(zip(names, _parameters(optimizer), strict=True))
    state = {f"model.{name}": value for name, value in get_model_state_dict(model).items()}
    present = {name: value for name, value in state.items() if isinstance(value, Tensor)}
    saved: dict[str, Any] = reader.read_metadata().state_dict_metadata
    found = {name: (tuple(entry.size), entry.properties.dtype) for name, entry in saved.items()}
    expected = {name: (tuple(value.shape), value.dtype) for name, value in present.items()}
    differing = expected.items() ^ {(name, kind) for name, kind in found.items() if name.startswith("model.")}
    if differing:
        name = min(name for name, _ in differing)
        kinds = (some.get(name, "absent") for some in (found, expected))
        raise CheckpointError("{} is {} in it, expected {} as in the model".format(name.partition(".")[2], *kinds))
    template = {}
    for name, (shape, dtype) in found.items():
        parameter, _, _ = name.removeprefix("optimizer.").rpartition(".")
        like = present[name] if name in present else parameters[parameter]
        if like.shape != shape:  # as that of step
            like = torch.empty(shape, device="cpu")
        template[name] = torch.empty_like(like, dtype=dtype, device="cpu", requires_grad=False)
    return template


def _parameters(optimizer: Optimizer) -> Iterator[Tensor]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


def _restore(model: nn.Module, optimizer: Optimizer, tensors: dict[str, Tensor], values: dict[str, Any]) -> None:
    """Load what was read: the optimizer first, because it may refuse; into torch's Adam without masters.

    torch's own way would make a step with zero gradients, and drop the state of frozen parameters.
    """
    state: dict[str, dict[str, Any]] = {}
    model_state: dict[str, Any] = {}
    for name, value in (tensors | values["others"]).items():
        kind, _, name = name.partition(".")
        parameter, _, key = name.rpartition(".")
        if kind == "model":
            model_state[name] = value
        elif key != "master" or not isinstance(optimizer, torch.optim.Adam | torch.optim.AdamW):
            state.setdefault(parameter, {})[key] = value
    present = _named_state(model, optimizer)["param_groups"]
    pairs = zip(present, values["param_groups"], strict=True)
    groups = [{**now, **saved, "params": now["params"]} for now, saved in pairs]
    optimizer.load_state_dict({"state": state, "param_groups": groups})
    set_model_state_dict(model, model_state)
