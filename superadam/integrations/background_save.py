"""Saving beside training: what a save writes, the thread that does it, and the process group that it talks through.

DCP asks for one tensor after the other, and refers to all of them until its file is whole. So the memory of each is
used again once it is in the file, and never more than one is copied for DCP at a time.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.optim import Optimizer

from superadam.distributed import shards
from superadam.integrations.checkpoint_folder import CheckpointError
from superadam.kernels.torch_private import storage_key, timeout_of
from superadam.optim.adam import SpeculativeCPUAdam
from superadam.optim.entry import Encoded
from superadam.state.snapshot import CopyMemory, Snapshot

_logger = logging.getLogger("superadam")

_copy_memory = CopyMemory()


# ---- what is saved ---------------------------------------------------------------------------------------------------


def snapshot_of(
    tensors: dict[str, Tensor | Encoded],
    parameters: dict[str, Tensor],
    model: nn.Module,
    optimizer: Optimizer,
    copy_bytes: int,
) -> Snapshot:
    """Return a snapshot of what a save writes, which holds until it is released.

    A working copy is its rounded master, so that nothing is copied from its device. Buffers, step counts and whatever
    else belongs to no parameter are copied at once.

    Args:
        tensors: by name; `optimizer.NAME.KEY` is the state of the parameter called NAME in `parameters`.
    """
    snapshot = Snapshot(copy_bytes, _copy_memory)
    optimized = {id(parameter) for parameter in parameters.values()}
    of_model = [*model.parameters(), *parameters.values()]  # these, the last, stand for others on their memory
    own = {_memory(parameter): parameter for parameter in of_model if parameter.numel()}
    masters: dict[int, str] = {}
    for name, tensor in tensors.items():
        kind, _, rest = name.partition(".")
        parameter = parameters.get(rest.rpartition(".")[0]) if kind == "optimizer" else None
        if parameter is None:
            continue
        if isinstance(tensor, Encoded):
            snapshot.add_encoded(name, tensor, parameter)
        elif tensor.dim() == 0 and name.endswith(".step"):
            snapshot.add_copy(name, tensor)
            continue
        else:
            snapshot.add(name, tensor, parameter)
        if name.endswith(".master") and isinstance(optimizer, SpeculativeCPUAdam):
            masters[id(parameter)] = name
    for name, tensor in tensors.items():
        if not name.startswith("model.") or isinstance(tensor, Encoded):
            continue
        parameter = own.get(_memory(tensor)) if shards.local_of(tensor).numel() else None
        if parameter is None:
            snapshot.add_copy(name, tensor)
        elif id(parameter) in masters:
            snapshot.add_rounded(name, masters[id(parameter)], parameter.dtype)
        else:
            snapshot.add_value(name, tensor, parameter, is_optimized=id(parameter) in optimized)
    for device in {shards.local_of(tensor).device for tensor in tensors.values() if isinstance(tensor, Tensor)}:
        if device.type != "cpu":
            torch.get_device_module(device).synchronize(device)  # the writer reads on another stream
    return snapshot


def _memory(tensor: Tensor) -> tuple[int, int, torch.Size, tuple[int, ...]]:
    local = shards.local_of(tensor)
    return storage_key(local.untyped_storage()), int(local.storage_offset()), local.shape, local.stride()


def attach(snapshot: Snapshot, optimizer: Optimizer) -> Callable[[], None]:
    """Let an optimizer's steps preserve what they change; return what ends that, and the snapshot."""
    if isinstance(optimizer, SpeculativeCPUAdam):
        holder = optimizer._snapshots
        holder.current = snapshot

        def detach() -> None:
            holder.current = None
            snapshot.release()

        return detach
    process = os.getpid()
    handle = optimizer.register_step_pre_hook(lambda *_: snapshot.preserve_all() if os.getpid() == process else None)

    def remove() -> None:
        handle.remove()
        snapshot.release()

    return remove


class SnapshotWriter(FileSystemWriter):
    """Writes one file, one tensor after the other; `planner` gives the tensors."""

    def __init__(self, path: Path, snapshot: Snapshot) -> None:
        super().__init__(path, overwrite=False, sync_files=False, per_thread_copy_ahead=0)
        self.fs = _Files()
        self.planner = _SnapshotPlanner(snapshot, self.fs)


class _Files(FileSystem):
    """Knows how much of the file was written."""

    stream: Any = None

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        with super().create_stream(path, mode) as stream:
            self.stream = stream
            yield stream


class _SnapshotPlanner(DefaultSavePlanner):
    def __init__(self, snapshot: Snapshot, files: _Files) -> None:
        super().__init__()
        self._snapshot, self._files = snapshot, files
        self._last: Tensor | None = None
        self._begin = 0

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        plan = super().finish_plan(new_plan)
        self._snapshot.keep_only({item.index.fqn for item in plan.items})
        return plan

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        position = self._files.stream.tell()
        if self._last is not None and position < self._begin + self._last.nbytes:
            raise CheckpointError(
                f"torch {torch.__version__} does not write one tensor after the other, as saving beside training "
                "needs; pass wait=True"
            )
        self._last, self._begin = self._snapshot.take(write_item.index.fqn), position
        return self._last


# ---- the thread ------------------------------------------------------------------------------------------------------


class _Save:
    """A save under way, or one that has ended and was not waited for."""

    def __init__(self, work: Callable[[], object]) -> None:
        self._process, self._work = os.getpid(), work
        self._error: BaseException | None = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="superadam-save")  # which the interpreter's end awaits
        self._thread.start()

    def _run(self) -> None:
        try:
            self._work()
        except BaseException as error:
            self._error = error
            if not threading.main_thread().is_alive():  # no call will come
                _logger.error("%s", error)
        finally:
            del self._work
            self._ended.set()

    def join(self) -> None:
        if os.getpid() == self._process:  # in a forked process there is no such thread
            self._ended.wait()  # after Ctrl-C, Python 3.11 takes a thread that was being joined for ended
            self._thread.join()

    def raise_failure(self) -> None:
        if os.getpid() == self._process:
            if isinstance(self._error, CheckpointError):
                raise self._error
            if self._error is not None:
                raise CheckpointError(
                    f"cannot end a save beside training: {type(self._error).__name__}: "
                    f"{(str(self._error).splitlines() or [''])[0]}; earlier ones are as they were: call wait() before "
                    "destroy_process_group(), and see whether a rank has ended"
                ) from self._error


beginning = threading.Lock()
"""Held while a save beside training begins: one thread after the other, each when the save before has ended."""


def _renew_lock() -> None:
    """Of a forked child: no thread is there that would give back what was held."""
    global beginning
    beginning = threading.Lock()


os.register_at_fork(after_in_child=_renew_lock)

_under_way: _Save | None = None


def start(work: Callable[[], object]) -> None:
    """Run this beside training."""
    global _under_way
    _under_way = _Save(work)


def wait() -> None:
    """Wait for the save that `save(..., wait=False)` has begun, if there is one.

    Every rank calls this before `destroy_process_group()`. The next `save` or `load`, and the end of the interpreter,
    wait as well.

    Raises:
        CheckpointError: that save failed on some rank; what was saved before is as it was. It is raised once.
    """
    global _under_way
    if _under_way is not None:
        save = _under_way
        save.join()  # where Ctrl-C leaves it to the next call
        _under_way = None
        save.raise_failure()


# ---- the process group -----------------------------------------------------------------------------------------------

_groups: dict[object, tuple[object, dist.ProcessGroup]] = {}


def group_beside(group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """Return a gloo group of the same ranks, made once, on which collectives run beside those of training.

    It waits for ranks as long as the given one does. After `destroy_process_group()` another one is made; a save under
    way keeps its own. Where torch.distributed is not used, None.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return None
    world: Any = dist.group.WORLD
    for known in [known for known, (of_world, _) in _groups.items() if of_world is not world]:
        del _groups[known]  # of a job before
    key = group or world
    if key not in _groups:
        ranks = dist.get_process_group_ranks(key)
        made = dist.new_group(
            ranks,
            backend="gloo",
            timeout=timeout_of(key),
            use_local_synchronization=len(ranks) < dist.get_world_size(),
        )
        _groups[key] = world, cast(dist.ProcessGroup, made)
    return _groups[key][1]
