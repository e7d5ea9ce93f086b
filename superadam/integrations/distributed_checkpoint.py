"""Checkpoints of sharded training with `torch.distributed.checkpoint` (DCP): saved atomically, verified before use.

The digests find damage, not malice: DCP's metadata is a pickle, so load only checkpoints that you trust.
"""

from __future__ import annotations

import io
import os
import pickle
import tempfile
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, nullcontext, suppress
from pathlib import Path
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
)
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.optim import Optimizer

from superadam.host.files import synchronize
from superadam.host.signals import deferred_signals
from superadam.integrations import background_save, checkpoint_folder
from superadam.integrations.background_save import wait
from superadam.integrations.checkpoint_folder import CheckpointError
from superadam.optim.adam import SpeculativeCPUAdam
from superadam.optim.entry import Encoded
from superadam.state.snapshot import ChangedError, Snapshot

__all__ = ["CheckpointError", "latest", "load", "save", "wait"]

_VALUES = "values.pt"  # what is no tensor, and `extra`

_NO_OBJECTS = "extra or a parameter group holds an object, expected numbers, strings, lists, dicts and tensors"

_SHARED = ": choose another folder that all ranks share"

_T = TypeVar("_T")

_descent: WeakKeyDictionary[Optimizer, set[str | None]] = WeakKeyDictionary()
"""States of folders, of which the newest checkpoint was loaded into an optimizer or saved from it."""

_last_seen: dict[Path, str | None] = {}
"""State of each folder when it was last asked for its newest checkpoint, or received it, in this process.

Its path is without symbolic links.
"""


def latest(folder: str | os.PathLike[str], *, process_group: dist.ProcessGroup | None = None) -> Path | None:
    """Return the newest checkpoint in `folder`, to `load`, or None, to begin a run; every rank calls this first.

    Nothing is verified before `load`. Several ranks find out here whether they share the folder: rank 0 writes to it,
    and leaves a lock file there where there is no checkpoint.

    Args:
        folder: as for `save`.
        process_group: the ranks that will load and save; all by default.

    Raises:
        CheckpointError: ranks do not share the folder, or its newest checkpoint is lost. The message names the newest
            other one that is intact, for `load` to go back to.
    """
    background_save.wait()
    ranks = _Ranks(process_group, f"cannot continue or begin a run in {folder}", _SHARED, "nothing was changed")
    with ExitStack() as stack:

        def look() -> tuple[Path, checkpoint_folder.CheckpointFolder, Path]:
            path = Path(folder).absolute()
            there = checkpoint_folder.look(path)
            is_marked = ranks.rank == 0 and ranks.size > 1 and there.state is None
            return path, there, checkpoint_folder.begin(path, stack, ()) if is_marked else there.newest

        path, there, marker = ranks.gather(ranks.run(look))[0]
        _last_seen[path.resolve()] = there.state
        if ranks.require_shared(marker) is None and there.state is not None:
            _verify(ranks, there)  # tells what is lost
    return None if there.state is None else there.newest


def save(
    folder: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer,
    *,
    extra: object = None,
    keep: int = 2,
    process_group: dist.ProcessGroup | None = None,
    wait: bool = True,
    copy_bytes: int = 4 << 30,
) -> Path:
    """Save model and optimizer as the newest checkpoint in `folder`, then delete older ones; every rank calls this.

    A folder is that of one run: where it holds checkpoints, the newest must be one that this optimizer has loaded or
    saved. Where another process is saving there, this waits for half a minute.

    Args:
        folder: shared by all ranks, on a file system with `flock`; created if need be.
        extra: numbers, strings, lists, dicts and tensors, which `load` returns; that of rank 0 is stored.
        keep: number of checkpoints to keep, at least 1, the new one included.
        process_group: the ranks that save; all by default.
        wait: if False, return when the checkpoint is determined, and write it beside training, which has the same bits.
            The next `save` or `load`, `wait()` and the end of the interpreter wait until it is whole, or raise the
            CheckpointError with which it failed. Writes to parameters or state other than the optimizer's can make it
            fail.
        copy_bytes: without `wait`, the most host memory in bytes, on each rank, for copies of what training changes
            before it was written. Where that is full, a step waits for the writer. The largest shard of a tensor, twice
            while it is being rounded, is taken in addition, and buffers, step counts and `extra` are copied at once.

    Returns:
        The checkpoint's own folder; without `wait`, None of it can be read yet.

    Raises:
        CheckpointError: saving failed on some rank; what was saved before is as it was.
    """
    with nullcontext() if wait else background_save.beginning, ExitStack() as stack:
        background_save.wait()
        group = process_group if wait else background_save.group_beside(process_group)
        ranks = _Ranks(
            group,
            f"cannot save a checkpoint to {folder}",
            f": free some space, or {_SHARED.removeprefix(': ')}",
            "earlier ones are as they were",
        )
        snapshot: Snapshot | None = None
        steps = _count_steps(optimizer, stack)
        made = 0

        def begin() -> tuple[Path, dict[str, Tensor], dict[str, Any]]:
            nonlocal snapshot, made
            if type(keep) is not int or keep < 1:
                raise CheckpointError(f"keep is {keep!r}, expected a whole number of at least 1")
            if type(copy_bytes) is not int or copy_bytes < 0:
                raise CheckpointError(f"copy_bytes is {copy_bytes!r}, expected a whole number of at least 0")
            with optimizer._lock if isinstance(optimizer, SpeculativeCPUAdam) else nullcontext():
                if isinstance(optimizer, SpeculativeCPUAdam):
                    optimizer._adopt_sampled_writes()
                made = steps()
                tensors, values = _contents(model, optimizer)
                values["extra"] = extra if ranks.rank == 0 else None
                if not wait:
                    values = _copy_of(values)
                if not wait or any(isinstance(tensor, Encoded) for tensor in tensors.values()):
                    snapshot = background_save.snapshot_of(
                        tensors, _named_parameters(optimizer, values), model, optimizer, copy_bytes
                    )
                    stack.callback(snapshot.release if wait else background_save.attach(snapshot, optimizer))
                described = {name: _described(tensor, snapshot) for name, tensor in tensors.items()}
            path = Path(folder).absolute()
            states = _descent.setdefault(optimizer, set())
            return checkpoint_folder.begin(path, stack, states) if ranks.rank == 0 else path, described, values

        path, tensors, values = ranks.run(begin)
        part = ranks.gather(path)[0]
        ranks.require_shared(part)

        writer: FileSystemWriter
        if snapshot is None:
            writer, planner = FileSystemWriter(part, overwrite=False, sync_files=False), DefaultSavePlanner()
        else:
            writer = background_save.SnapshotWriter(part, snapshot)
            planner = writer.planner
        plan, metadata = _plan(ranks, tensors, writer, planner)

        def write() -> tuple[list[WriteResult], checkpoint_folder.Files]:
            try:
                written = writer.write_data(plan, planner)
                written.wait()
                if snapshot is not None:
                    snapshot.finish()
                if wait and steps() != made:
                    raise CheckpointError("another thread has made a step meanwhile: save from the one that trains")
            finally:
                if snapshot is not None:
                    snapshot.release()  # no step waits for other ranks
            own = [part / name for name in os.listdir(part) if name.startswith(f"__{ranks.rank}_")]
            return written.value(), _digests(own)

        def publish(every: list[tuple[list[WriteResult], checkpoint_folder.Files]]) -> tuple[Path, str | None]:
            if metadata is None:
                return part, None
            writer.finish(metadata, [results for results, _ in every])
            _write_values(part, values)
            files = _digests([part / _VALUES, part / ".metadata"])
            for _, share in every:
                files.update(share)
            path = checkpoint_folder.publish(part, files, ranks.size, keep, _descent[optimizer])
            return path, checkpoint_folder.look(path.parent).state

        def finish(stack: ExitStack) -> Path:
            with stack:
                every = ranks.collect(ranks.run(write))
                path, state = ranks.gather(ranks.run(lambda: publish(every)))[0]
            _descent[optimizer].add(state)
            _last_seen[path.parent.resolve()] = state
            return path

        with deferred_signals():  # Ctrl-C leaves no snapshot behind that nobody writes
            rest = stack.pop_all()
            if not wait:
                are_agreed: Future[bool] = Future()  # all ranks have a thread, which until then sends nothing

                def start() -> None:
                    try:
                        background_save.start(lambda: finish(rest) if are_agreed.result() else rest.close())
                    except RuntimeError as error:
                        raise CheckpointError(f"{error}; pass wait=True, or end some threads") from error

                try:
                    ranks.run(start)
                except BaseException:
                    are_agreed.set_result(False)
                    rest.close()
                    background_save.wait()
                    raise
                are_agreed.set_result(True)
    return finish(rest) if wait else checkpoint_folder.published(part)


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
        CheckpointError: the checkpoint is damaged, or of another model or other parameter groups. The message says
            that nothing was loaded, and names the newest other checkpoint that is intact; where a hook of the model's
            raised, or another rank, it says that a part was loaded.
    """
    background_save.wait()
    ranks = _Ranks(process_group, f"cannot load a checkpoint from {folder}", "", "nothing was loaded")
    located = ranks.gather(ranks.run(lambda: checkpoint_folder.locate(Path(folder).absolute())))
    parent, there, is_newest = located[0]
    path = there.newest
    ranks.require_shared(path)
    _verify(ranks, there)

    def prepare() -> tuple[dict[str, Tensor], dict[str, Any]]:
        values = _read_values(path)
        return _template(FileSystemReader(path), model, optimizer, values), values

    tensors, values = ranks.run(prepare)

    def read() -> None:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # one process is fine
            state_dict_loader.load(tensors, storage_reader=FileSystemReader(path), process_group=process_group)

    ranks.run(read)
    state, model_state = _split(model, optimizer, tensors, values)
    begun: list[bool] = []

    def restore() -> None:
        optimizer.load_state_dict(state)  # first, because it may refuse
        begun.append(True)
        set_model_state_dict(model, model_state)

    fault = ranks.fault(restore)
    if fault is not None:
        outcome = "a part of it was loaded: load again before training" if any(ranks.gather(begun)) else ranks.outcome
        raise CheckpointError(f"{ranks.failure}: {fault}; {outcome}")
    if is_newest:
        _last_seen[parent.resolve()] = there.state
    # Who goes back to an older one may save after the newest that was known; others may have saved since then.
    _descent.setdefault(optimizer, set()).add(_last_seen.get(parent.resolve(), there.state))
    return values["extra"]


def _verify(ranks: _Ranks, there: checkpoint_folder.CheckpointFolder) -> None:
    """Raise CheckpointError, which names the newest intact other checkpoint, unless the newest one is intact."""

    def fault_of(path: Path, digest: str | None) -> str | None:
        return ranks.fault(lambda: checkpoint_folder.verify(path, digest, ranks.rank, ranks.size))

    fault = fault_of(there.newest, there.digest)
    if fault is not None:
        intact = next((other for other in there.others if fault_of(other, None) is None), None)
        advice = "no other one in it is intact" if intact is None else f"load {intact}, which is intact"
        raise CheckpointError(f"{ranks.failure}: {fault}; {ranks.outcome}: {advice}")


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

    def collect(self, value: _T) -> list[_T]:
        """Return the values of all ranks, in their order, on rank 0; nothing on the others."""
        values = [value] * (self.size if self.rank == 0 else 0)
        if self.are_several:
            dist.gather_object(value, values or None, group=self.group, group_dst=0)
        return values

    def scatter(self, values: list[_T]) -> _T:
        """Return the value for this rank of those that rank 0 has, in the order of ranks."""
        value = values[:1]
        if self.are_several:
            value = value or [None]  # type: ignore[list-item]
            dist.scatter_object_list(value, values or None, group=self.group, group_src=0)
        return value[0]

    def require_shared(self, path: Path) -> str | None:
        """Return what rank 0 sees at a path of a folder of checkpoints.

        Raises CheckpointError where another rank sees something else.
        """
        sights: list[str | None] = [None]
        fault = self.fault(lambda: sights.insert(0, checkpoint_folder.sight(path)))
        seen = self.gather(sights[0])
        strangers = [rank for rank, sight in enumerate(seen) if sight != seen[0]]
        if fault is None and not strangers and seen[0] not in (None, path.name):  # folders may hold copies of it
            strangers = self._without_marker(path.parent)
        if fault is None and strangers:
            there = f"{path.parent} is another folder on ranks {strangers} than on rank 0"
            fault = f"{there}: choose one that all ranks share"
        if fault is not None:
            raise CheckpointError(f"{self.failure}: {fault}; {self.outcome}")
        return seen[0]

    def _without_marker(self, folder: Path) -> list[int]:
        """Return the ranks that do not see a file that rank 0 makes; none where it can make none."""
        if self.size == 1:
            return []
        with ExitStack() as stack:
            name: str | None = None
            if self.rank == 0:
                with suppress(OSError):  # one may load where one cannot write
                    marker = stack.enter_context(
                        tempfile.NamedTemporaryFile(prefix=checkpoint_folder.MARKER, dir=folder)
                    )
                    name = os.path.basename(marker.name)
            name = self.gather(name)[0]
            found = self.gather(name is None or os.path.exists(folder / name))
        self.gather(None)  # nobody goes on before it is removed
        return [rank for rank, is_there in enumerate(found) if not is_there]

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
        except BaseException as error:  # Ctrl-C, too: the others wait for this rank
            cause = error
            if isinstance(error, CheckpointException):  # of DCP, the same on every rank
                rank, (cause, _) = min(error.failures.items(), key=lambda failure: failure[0])
            place = f" (on rank {rank})" if self.size > 1 else ""
            fault = f"{cause}{place}"
            if not isinstance(cause, CheckpointError | ChangedError):
                fault = f"{type(cause).__name__}: {(str(cause).splitlines() or [''])[0]}{place}{self.advice}"
        faults = self.gather(fault)
        if cause is not None and rank == self.rank and not isinstance(cause, Exception):
            raise cause
        return next(filter(None, faults), None)


def _plan(
    ranks: _Ranks, tensors: dict[str, Tensor], writer: FileSystemWriter, planner: SavePlanner
) -> tuple[SavePlan, Metadata | None]:
    """Return what this rank is to write, and on rank 0 DCP's description of the checkpoint.

    DCP's own `save` would agree on it while it writes, and where the process group is destroyed meanwhile, each rank
    would write as if it were alone.
    """

    def plan_of_rank() -> SavePlan:
        planner.set_up_planner(tensors, writer.storage_meta(), ranks.rank == 0)
        writer.set_up_storage_writer(ranks.rank == 0)
        return writer.prepare_local_plan(planner.create_local_plan())

    def plan_of_all() -> tuple[list[SavePlan], Metadata | None]:
        if not plans:
            return [], None
        every, metadata = planner.create_global_plan(plans)
        return writer.prepare_global_plan(every), metadata

    plans = ranks.collect(ranks.run(plan_of_rank))
    every, metadata = ranks.run(plan_of_all)
    return planner.finish_plan(ranks.scatter(every)), metadata


def _digests(paths: list[Path]) -> checkpoint_folder.Files:
    """Return size and digest of files, which are on the disk then."""
    for path in paths:
        synchronize(path)
    return {path.name: (path.stat().st_size, checkpoint_folder.sha256(path)) for path in paths}


def _write_values(path: Path, values: dict[str, Any]) -> None:
    try:
        torch.save(values, path / _VALUES)
        _read_values(path)  # what load() would refuse
    except (pickle.PickleError, AttributeError, TypeError):
        raise CheckpointError(_NO_OBJECTS) from None


def _copy_of(values: dict[str, Any]) -> dict[str, Any]:
    memory = io.BytesIO()
    try:
        torch.save(values, memory)
        memory.seek(0)
        copied: dict[str, Any] = torch.load(memory, map_location="cpu", weights_only=True)
    except (pickle.PickleError, AttributeError, TypeError):
        raise CheckpointError(_NO_OBJECTS) from None
    return copied


def _read_values(path: Path) -> Any:
    return torch.load(path / _VALUES, map_location="cpu", weights_only=True)


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
    state, first = optimizer.state, next(_parameters(optimizer), None)
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


def _count_steps(optimizer: Optimizer, stack: ExitStack) -> Callable[[], int]:
    """Return what counts the steps of an optimizer, of torch's those begun from now on, until the stack is closed."""
    if isinstance(optimizer, SpeculativeCPUAdam):
        return lambda: optimizer.statistics.steps
    begun: list[None] = []
    stack.callback(optimizer.register_step_pre_hook(lambda *_: begun.append(None)).remove)
    return lambda: len(begun)


def _described(tensor: Tensor | Encoded, snapshot: Snapshot | None) -> Tensor:
    """Return what tells DCP of a tensor: itself, or where a snapshot has its values, no reference to the state."""
    if isinstance(tensor, Encoded):
        return tensor.whole(tensor.like)
    return tensor if snapshot is None else tensor.detach()


def _contents(model: nn.Module, optimizer: Optimizer) -> tuple[dict[str, Tensor | Encoded], dict[str, Any]]:
    named = _named_state(model, optimizer)
    flat = {f"model.{name}": value for name, value in get_model_state_dict(model).items()}
    for name, entry in named["state"].items():
        flat.update({f"optimizer.{name}.{key}": value for key, value in entry.items()})
    tensors: dict[str, Tensor | Encoded] = {
        name: value for name, value in flat.items() if isinstance(value, Tensor | Encoded)
    }
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
    parameters = _named_parameters(optimizer, {"param_groups": groups})
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
    others = {name for name in values["others"] if name.startswith("model.")}
    for name in sorted(others ^ (state.keys() - present.keys())):
        there, here = ("present", "absent") if name in others else ("absent", "present")
        raise CheckpointError(f"{name.partition('.')[2]} is {there} in it, expected {here} as in the model")
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


def _named_parameters(optimizer: Optimizer, values: dict[str, Any]) -> dict[str, Tensor]:
    """Return the optimizer's parameters by the names that `param_groups` of what is saved give them."""
    names = (name for group in values["param_groups"] for name in group["params"])
    return dict(zip(names, _parameters(optimizer), strict=True))


def _split(
    model: nn.Module, optimizer: Optimizer, tensors: dict[str, Tensor], values: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what was read as the optimizer's state and as the model's; for torch's Adam without masters.

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
    return {"state": state, "param_groups": groups}, model_state
