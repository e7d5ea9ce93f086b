"""Checkpoints of sharded training with `torch.distributed.checkpoint` (DCP): saved atomically, verified before use.

The digests find damage, not malice: DCP's metadata is a pickle, so load only checkpoints that you trust.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.state_dict import set_model_state_dict
from torch.distributed.checkpoint.storage import WriteResult
from torch.optim import Optimizer
from torch.utils.serialization import config as serialization

from superadam.host.files import synchronize
from superadam.host.machine import Host
from superadam.host.memory import Claim, gigabytes
from superadam.host.signals import THIS_THREAD
from superadam.integrations import background_save, checkpoint_contents, checkpoint_folder, checkpoint_tensors
from superadam.integrations.background_save import wait
from superadam.integrations.checkpoint_folder import CheckpointError
from superadam.integrations.checkpoint_ranks import CheckpointRanks, Seen
from superadam.kernels.torch_private import is_short_of_memory
from superadam.optim.adam import SpeculativeCPUAdam
from superadam.optim.arguments import parameters_of, without_wrapper
from superadam.optim.binding import untracked
from superadam.optim.entry import Encoded

__all__ = ["CheckpointError", "latest", "load", "save", "wait"]

_descent: WeakKeyDictionary[Optimizer, set[str | None]] = WeakKeyDictionary()
"""Of each optimizer, the states of folders whose newest checkpoint was loaded into it or saved from it."""

_last_seen: dict[Path, str | None] = {}
"""State of each folder when it was last asked for its newest checkpoint, or received it, in this process.

Its path is without symbolic links.
"""


def latest(folder: str | os.PathLike[str], *, process_group: dist.ProcessGroup | None = None) -> Path | None:
    """Return the newest checkpoint in `folder`, to `load`, or None, to begin a run; every rank calls this first.

    Nothing is verified before `load`. Several ranks find out here whether they share the folder: rank 0 creates it if
    need be, and writes to it for a moment.

    Args:
        folder: as for `save`.
        process_group: the ranks that will load and save; all by default.

    Raises:
        CheckpointError: ranks do not share the folder, or its newest checkpoint is lost. The message names the newest
            other one that is intact, for `load` to go back to.
    """
    background_save.wait()
    failure, advice = f"cannot continue or begin a run in {folder}", ": choose another folder that all ranks share"
    ranks = CheckpointRanks(process_group, failure, advice, "nothing was changed")

    def look() -> checkpoint_folder.CheckpointFolder:
        found = checkpoint_folder.look(path := Path(folder).absolute())
        if ranks.size > 1:
            path.mkdir(parents=True, exist_ok=True)
        return found

    ranks.require_same(folder=str(folder))
    there = ranks.on_first(look)
    _last_seen[there.newest.parent.resolve()] = there.state
    if ranks.require_shared(there.newest) is None and there.state is not None:
        _verify(ranks, there)  # tells what is lost
    return None if there.state is None else there.newest


@untracked
def save(
    folder: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer,
    *,
    extra: object = None,
    keep: int = 2,
    process_group: dist.ProcessGroup | None = None,
    wait: bool = True,
) -> Path:
    """Save model and optimizer as the newest checkpoint in `folder`, then delete older ones; every rank calls this.

    A folder is that of one run: where it holds checkpoints, the newest must be one that this optimizer has loaded or
    saved. Where another process is saving there, this waits for half a minute.

    Args:
        folder: shared by all ranks, with one path on all, on a file system with `flock`; created if need be.
        optimizer: ours or torch's; it may be in a framework's wrapper.
        extra: numbers, strings, lists, dicts and tensors, which `load` returns; that of rank 0 is stored.
        keep: number of checkpoints to keep, at least 1, the new one included; the same on all ranks.
        process_group: the ranks that save; all by default.
        wait: if False, return when all that this rank writes was copied into host memory, which the next such save uses
            again, and write it during training. The next `save` or `load`, `wait()` and the end of the interpreter
            wait until the checkpoint is whole, or raise the CheckpointError with which it failed.

    Returns:
        The checkpoint's own folder; without `wait`, None of it can be read yet.

    Raises:
        CheckpointError: saving failed on some rank, or it has no memory for the copies; what was saved before is as it
            was.
    """
    optimizer = without_wrapper(optimizer)
    with (
        nullcontext() if wait else background_save.beginning,
        _counted_steps(optimizer) as steps,
        ExitStack() as stack,
        closing(stack),  # whose end goes on where Ctrl-C interrupts it
    ):
        background_save.wait()
        ranks = CheckpointRanks(
            process_group,
            f"cannot save a checkpoint to {folder}",
            ": free some space, or choose another folder that all ranks share",
            "earlier ones are as they were",
        )
        checkpoint = _NewCheckpoint(ranks, optimizer, steps, keep, stack, is_copied=not wait)
        checkpoint.begin(folder, model, extra)
        checkpoint.plan()
        if wait:
            return checkpoint.finish()
        checkpoint.copy()
        with THIS_THREAD.without_handlers:  # Ctrl-C leaves no unfinished checkpoint behind
            ranks.gather(None)  # where it has kept a rank from this, no thread of others begins
            ranks.group = background_save.gloo_group_of(process_group)
            background_save.start(checkpoint.finish, stack.pop_all())
        return checkpoint_folder.published(checkpoint.part)


@untracked
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
        optimizer: as for `save`.
        process_group: the ranks that load; all by default.

    Raises:
        CheckpointError: the checkpoint is damaged, or of another model or other parameter groups. The message says
            that nothing was loaded, and names the newest other checkpoint that is intact; where a hook of the model's
            raised, or another rank, it says that a part was loaded.
    """
    optimizer = without_wrapper(optimizer)
    background_save.wait()
    ranks = CheckpointRanks(process_group, f"cannot load a checkpoint from {folder}", "", "nothing was loaded")
    ranks.require_same(folder=str(folder))
    there, is_newest = ranks.on_first(lambda: checkpoint_folder.locate(Path(folder).absolute()))
    path = there.newest
    ranks.require_shared(path)
    _verify(ranks, there)

    values = ranks.run(lambda: checkpoint_contents.read_values(path / checkpoint_contents.VALUES))
    tensors, groups, extra = ranks.run(
        lambda: (*checkpoint_contents.template_of(FileSystemReader(path), model, optimizer, values), values["extra"])
    )

    def read() -> None:
        unmapped = serialization.patch("load.mmap", False)  # type: ignore[attr-defined]  # DCP reads no file as a whole
        with warnings.catch_warnings(), unmapped:
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # each rank reads its own parts
            state_dict_loader.load(tensors, storage_reader=FileSystemReader(path), no_dist=True)

    ranks.run(read)
    state, model_state = checkpoint_contents.split(optimizer, tensors | values["others"])
    ranks.restore(
        lambda: optimizer.load_state_dict({"state": state, "param_groups": groups}),
        lambda: set_model_state_dict(model, model_state),
    )
    if is_newest:
        _last_seen[path.parent.resolve()] = there.state
    # Who goes back to an older one may save after the newest that was known; others may have saved since then.
    _descent.setdefault(optimizer, set()).add(_last_seen.get(path.parent.resolve(), there.state))
    return extra


def _verify(ranks: CheckpointRanks, there: checkpoint_folder.CheckpointFolder) -> None:
    """Raise CheckpointError, which names the newest intact other checkpoint, unless the newest one is intact."""

    def fault_of(path: Path, digest: str | None) -> str | None:
        return ranks.fault(lambda: checkpoint_folder.verify(path, digest, ranks.rank, ranks.size))

    fault = fault_of(there.newest, there.digest)
    if fault is not None:
        intact = next((other for other in there.others if fault_of(other, None) is None), None)
        advice = "no other one in it is intact" if intact is None else f"load {intact}, which is intact"
        raise CheckpointError(f"{fault}: {advice}")


@dataclass(eq=False)
class _NewCheckpoint:
    """A checkpoint that is being saved, stage by stage; each raises CheckpointError on all ranks if it fails on one."""

    ranks: CheckpointRanks
    optimizer: Optimizer
    steps: Callable[[], int]  # counts those of the optimizer, until `save` returns
    keep: int
    stack: ExitStack  # when it ends, the checkpoint was published, or nothing is left of it
    is_copied: bool  # training goes on before it is written

    def begin(self, folder: str | os.PathLike[str], model: nn.Module, extra: object) -> None:
        """Determine what is saved, and make the folder that it is written to."""

        def read() -> tuple[object, Seen, dict[str, Any]]:
            if type(self.keep) is not int or self.keep < 1:
                raise CheckpointError(f"keep is {self.keep!r}, expected a whole number of at least 1")
            with self._lock():
                apart = set()  # what is no longer the rounded master
                if isinstance(self.optimizer, SpeculativeCPUAdam):
                    apart.update(self.optimizer._adopt_sampled_writes())
                self._steps_made = self.steps()
                self._tensors, values = checkpoint_contents.contents_of(model, self.optimizer)
                named = [name for group in values["param_groups"] for name in group["params"]]
                pairs = zip(named, parameters_of(self.optimizer), strict=True)
                self._parameters = {name: parameter for name, parameter in pairs if parameter not in apart}
                values["extra"] = extra if self.ranks.rank == 0 else None
                self._values = checkpoint_contents.bytes_of_values(values)
                counts = {
                    f"the step count of {name}": count.tolist()
                    for name in (named if self.ranks.size > 1 else ())
                    if isinstance(count := self._tensors.get(f"optimizer.{name}.step"), Tensor)
                }
                names = [(group["params"], group.get("param_names")) for group in values["param_groups"]]
                shapes = [tuple(parameter.shape) for parameter in model.parameters()]
                return (names, shapes), checkpoint_contents.seen(model, self.ranks.size), counts

        names, seen, counts = self.ranks.run(read)
        self.ranks.require_same(names, seen, folder=str(folder), wait=not self.is_copied, keep=self.keep, **counts)
        self._states = _descent.setdefault(self.optimizer, set())
        self.part = self.ranks.on_first(
            lambda: checkpoint_folder.begin(Path(folder).absolute(), self.stack, self._states)
        )
        self.ranks.require_shared(self.part)

    def plan(self) -> None:
        """Agree on what each rank writes.

        DCP's own `save` would agree on it while it writes, and where the process group is destroyed meanwhile, each
        rank would write as if it were alone.
        """
        is_first = self.ranks.rank == 0
        planner = self._planner = checkpoint_tensors.Planner()
        writer = self._writer = FileSystemWriter(self.part, overwrite=False, sync_files=False)
        writer.fs = checkpoint_tensors.Files()
        if self.is_copied or any(isinstance(tensor, Encoded) for tensor in self._tensors.values()):
            writer.per_thread_copy_ahead = 0  # the planner makes tensors one after the other

        def plan_of_rank() -> SavePlan:
            planner.set_up_planner(self._tensors, writer.storage_meta(), is_first)
            writer.set_up_storage_writer(is_first)
            return writer.prepare_local_plan(planner.create_local_plan())

        plans = self.ranks.gather(self.ranks.run(plan_of_rank))

        def plan_of_all() -> SavePlan:
            every, self._metadata = planner.create_global_plan(plans)
            return planner.finish_plan(writer.prepare_global_plan(every)[self.ranks.rank])

        self._plan = self.ranks.run(plan_of_all)

    def copy(self) -> None:
        """Copy what this rank writes into memory that nothing else reaches."""
        names = {item.index.fqn for item in self._plan.items}
        parameters = self._parameters if isinstance(self.optimizer, SpeculativeCPUAdam) else {}
        copies = self.ranks.run(lambda: checkpoint_tensors.Copies(self._tensors, names, parameters))
        own = Claim.of(Host(), copies.size)
        claims = self.ranks.gather(own)

        def copy() -> None:
            with self._lock():
                try:
                    own.check(claims)
                    self.stack.callback(checkpoint_tensors.rest)
                    self._planner.read_from(copies.make())
                except Exception as error:
                    if not is_short_of_memory(error):
                        raise
                    reason = error if isinstance(error, MemoryError) else "which the system does not give"
                    raise CheckpointError(
                        f"copies of what it writes take {gigabytes(own.size)} of host memory, {reason}: pass "
                        "wait=True, which makes none, or free some memory"
                    ) from error
                self._require_no_step()

        self.ranks.run(copy)
        del self._tensors, self._parameters, self.optimizer, self.steps  # nothing of training is kept

    def finish(self) -> Path:
        """Write, and publish what all ranks have written; return the checkpoint's own folder."""
        every = self.ranks.gather(self.ranks.run(self._write))
        path, state = self.ranks.on_first(lambda: self._publish(every))
        self._states.add(state)
        _last_seen[path.parent.resolve()] = state
        return path

    def _write(self) -> tuple[list[WriteResult], checkpoint_folder.Files]:
        """Write this rank's files; return what DCP says of them, and their digests."""
        written = self._writer.write_data(self._plan, self._planner)
        written.wait()
        checkpoint_tensors.require_whole(self._plan, written.value())
        if not self.is_copied:
            self._require_no_step()
        own = [self.part / name for name in os.listdir(self.part) if name.startswith(f"__{self.ranks.rank}_")]
        return written.value(), _digests(own)

    def _publish(self, every: list[tuple[list[WriteResult], checkpoint_folder.Files]]) -> tuple[Path, str]:
        """Publish what all ranks have written; return the checkpoint's folder and its parent's state."""
        self._writer.finish(self._metadata, [results for results, _ in every])
        values = self.part / checkpoint_contents.VALUES
        values.write_bytes(self._values)
        files = _digests([values, self.part / ".metadata"])
        for _, share in every:
            files.update(share)
        return checkpoint_folder.publish(self.part, files, self.keep, self._states)

    def _lock(self) -> AbstractContextManager[object]:
        """Return what is held while state is read; no other thread makes a step of our optimizer meanwhile."""
        return self.optimizer._binding._lock() if isinstance(self.optimizer, SpeculativeCPUAdam) else nullcontext()

    def _require_no_step(self) -> None:
        if self.steps() != self._steps_made:
            raise CheckpointError("another thread has made a step meanwhile: save from the one that trains")


def _digests(paths: list[Path]) -> checkpoint_folder.Files:
    """Return size and digest of files, which are on the disk then."""
    for path in paths:
        synchronize(path)
    return {path.name: (path.stat().st_size, checkpoint_folder.sha256(path)) for path in paths}


@contextmanager
def _counted_steps(optimizer: Optimizer) -> Iterator[Callable[[], int]]:
    """Give what counts the steps of an optimizer; of torch's those that begin inside."""
    begun: list[None] = []
    if isinstance(optimizer, SpeculativeCPUAdam):
        yield lambda: optimizer.statistics.steps
    elif isinstance(optimizer, Optimizer):
        with optimizer.register_step_pre_hook(lambda *_: begun.append(None)):
            yield lambda: len(begun)
    else:  # which is refused on all ranks
        yield int
