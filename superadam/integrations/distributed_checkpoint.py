"""Checkpoints of sharded training with `torch.distributed.checkpoint` (DCP): saved atomically, verified before use.

    FOLDER/latest               name of the newest checkpoint, and the SHA-256 of its manifest
    FOLDER/save-00000007/       DCP's files, values.pt (all that is no tensor), manifest.json (every size and SHA-256)
    FOLDER/.save-*.part/        a save under way, or what is left of one that was killed
    FOLDER/.lock                held by the one save that may be under way

A checkpoint is written under another name, synchronized, renamed, and only then named in `latest`. So whenever the
processes or the machine stop, either the older or the new one is loaded.

The digests find damage, not malice: DCP's metadata is a pickle, so load only checkpoints that you trust.
"""

from __future__ import annotations

import fcntl
import hashlib
import itertools
import json
import os
import re
import secrets
import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
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

from superadam.host.files import replace_file, synchronize
from superadam.optim.adam import SpeculativeCPUAdam

__all__ = ["CheckpointError", "load", "save"]

FORMAT = 1
"""Stored in every manifest; a later layout gets the next number."""

LATEST, MANIFEST, VALUES = "latest", "manifest.json", "values.pt"
_NAME = re.compile(r"save-(\d{8,})", re.ASCII)
_POINTER = re.compile(r"(save-\d{8,}) ([0-9a-f]{64})\n", re.ASCII)
_T = TypeVar("_T")


class CheckpointError(RuntimeError):
    """A checkpoint could not be saved or loaded; raised on every rank."""


def save(
    folder: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer,
    *,
    extra: object = None,
    keep: int = 2,
    process_group: dist.ProcessGroup | None = None,
) -> Path:
    """Save model and optimizer as the newest checkpoint in `folder`; every rank calls this.

    Afterwards older checkpoints are deleted, and what killed saves have left; what cannot be deleted is left to the
    next save.

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
        "; earlier ones are as they were: free some space, or choose another folder that all ranks share",
    )
    with ExitStack() as stack:

        def begin() -> tuple[Path, dict[str, Tensor], dict[str, Any]]:
            if type(keep) is not int or keep < 1:
                raise ValueError(f"keep is {keep!r}, expected a whole number of at least 1")
            tensors, values = _contents(model, optimizer)
            return _begin(Path(folder).absolute(), stack) if ranks.is_first else Path(), tensors, values

        part, tensors, values = ranks.run(begin)
        part = ranks.gather(part)[0]

        def write() -> dict[str, list[int | str]]:
            with _no_warnings():
                state_dict_saver.save(
                    tensors,
                    storage_writer=FileSystemWriter(part, overwrite=False, sync_files=False),
                    process_group=process_group,
                )
            own = [part / name for name in os.listdir(part) if name.startswith(f"__{ranks.rank}_")]
            if ranks.is_first:
                torch.save({**values, "extra": extra}, part / VALUES)
                _read_values(part)  # refuse now what load() would refuse
                own += [part / VALUES, part / ".metadata"]
            for path in own:
                synchronize(path)
            return {path.name: [path.stat().st_size, _sha256(path)] for path in own}

        files = {name: entry for share in ranks.gather(ranks.run(write)) for name, entry in share.items()}

        def publish() -> Path:
            path = part.with_name(part.name.split(".")[1])
            if ranks.is_first:
                manifest = _sealed({"format": FORMAT, "world_size": ranks.size, "files": files})
                replace_file(part / MANIFEST, lambda file: file.write(manifest))
                _require_files(part, files)
                os.rename(part, path)
                synchronize(path.parent)
                pointer = f"{path.name} {hashlib.sha256(manifest).hexdigest()}\n"
                replace_file(path.parent / LATEST, lambda file: file.write(pointer.encode()))
                for older in _checkpoints(path.parent)[keep:]:
                    with suppress(OSError):
                        os.rename(older, _new_part(older))
                _delete_parts(path.parent)
            return path

        return ranks.run(publish)


def load(
    folder: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer,
    *,
    process_group: dist.ProcessGroup | None = None,
) -> Any:
    """Load the newest checkpoint in `folder` into model and optimizer, and return its `extra`; every rank calls this.

    Every byte is verified before any is used. The number of ranks may be another than when it was saved. Without
    masters in the file, as `torch.optim.AdamW` leaves none, ours are read from the parameters.

    Args:
        folder: as for `save`, or the folder of one checkpoint in it.
        process_group: the ranks that load; all by default.

    Raises:
        CheckpointError: the checkpoint is damaged, or not one of such a model and optimizer. Nothing was loaded; the
            message names the newest older checkpoint that is intact.
    """
    ranks = _Ranks(process_group, f"cannot load a checkpoint from {folder}", "; nothing was loaded")
    path, digest, others = ranks.gather(ranks.run(lambda: _located(Path(folder).absolute())))[0]
    fault = ranks.fault(lambda: _verify(path, digest, ranks))
    if fault is not None:
        is_intact = [ranks.fault(lambda other=other: _verify(other, None, ranks)) is None for other in others]
        intact = next(itertools.compress(others, is_intact), None)
        remedy = f"load {intact}, which is intact" if intact else "no other one in it is intact"
        raise CheckpointError(f"{ranks.failure}: {fault}; nothing was loaded: {remedy}")

    def prepare() -> tuple[dict[str, Tensor], dict[str, Any]]:
        values = _read_values(path)
        return _template(path, model, optimizer, values), values

    tensors, values = ranks.run(prepare)

    def read() -> None:
        with _no_warnings():
            state_dict_loader.load(tensors, storage_reader=FileSystemReader(path), process_group=process_group)

    ranks.run(read)
    ranks.run(lambda: _restore(model, optimizer, tensors, values))
    return values["extra"]


class _Ranks:
    """The ranks that save or load together; a single one without torch.distributed."""

    def __init__(self, group: dist.ProcessGroup | None, failure: str, remedy: str) -> None:
        self.group, self.failure, self.remedy = group, failure, remedy
        self.is_distributed = dist.is_available() and dist.is_initialized()
        self.rank = dist.get_rank(group) if self.is_distributed else 0
        self.size = dist.get_world_size(group) if self.is_distributed else 1
        self.is_first = self.rank == 0

    def gather(self, value: _T) -> list[_T]:
        """Return the values of all ranks, in their order."""
        values = [value] * self.size
        if self.is_distributed:
            dist.all_gather_object(values, value, group=self.group)
        return values

    def run(self, work: Callable[[], _T]) -> _T:
        """Return what `work` returns, or raise CheckpointError on every rank if it raised on one."""
        results: list[_T] = []
        fault = self.fault(lambda: results.append(work()))
        if fault is not None:
            raise CheckpointError(f"{self.failure}: {fault}{self.remedy}")
        return results[0]

    def fault(self, work: Callable[[], object]) -> str | None:
        """Return, on every rank, what `work` raised on the first rank on which it did."""
        fault = None
        try:
            work()
        except (Exception, CheckpointException) as error:
            fault = self._described(error)
        except BaseException:  # Ctrl-C
            self.gather(f"rank {self.rank} was interrupted")
            raise
        return next(filter(None, self.gather(fault)), None)

    def _described(self, error: BaseException) -> str:
        rank = self.rank
        if isinstance(error, CheckpointException):  # DCP's, on every rank alike
            rank, (error, _) = next(iter(error.failures.items()))
        words = (str(error).splitlines() or [""])[0]
        if not isinstance(error, CheckpointError):
            words = f"{type(error).__name__}: {words}"
        return f"{words} (on rank {rank})" if self.size > 1 else words


# ---- files -----------------------------------------------------------------------------------------------------------


def _begin(folder: Path, stack: ExitStack) -> Path:
    """Create the folder that the next checkpoint is written to; at the end of `stack` it is gone or renamed.

    Whoever holds the lock is the only one that saves here: any other unfinished save is one that was killed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lock = stack.enter_context((folder / ".lock").open("a"))
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise CheckpointError("another process is saving there") from None
    _delete_parts(folder)
    number = 1 + max((int(path.name.split("-")[1]) for path in _checkpoints(folder)), default=0)
    part = _new_part(folder / f"save-{number:08}")
    part.mkdir()
    stack.callback(shutil.rmtree, part, ignore_errors=True)
    return part


def _new_part(path: Path) -> Path:
    """Return a name for an unfinished checkpoint that no rank of a killed save can still be writing to."""
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")


def _delete_parts(folder: Path) -> None:
    for part in folder.glob(".save-*.part"):
        shutil.rmtree(part, ignore_errors=True)


def _checkpoints(folder: Path) -> list[Path]:
    """Return the folders of all whole checkpoints, the newest first."""
    found = [path for path in folder.iterdir() if _NAME.fullmatch(path.name) and path.is_dir()]
    return sorted(found, key=lambda path: int(path.name.split("-")[1]), reverse=True)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sealed(content: dict[str, Any]) -> bytes:
    """Return a manifest, which holds the digest of the rest of itself."""
    body = {key: value for key, value in content.items() if key != "sha256"}
    digest = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
    return (json.dumps({**body, "sha256": digest}, sort_keys=True, indent=1) + "\n").encode()


def _require_files(path: Path, files: dict[str, Any]) -> None:
    """Raise CheckpointError unless a folder holds these files, of these sizes, and the manifest."""
    found = {entry.name: entry.stat().st_size if entry.is_file() else None for entry in os.scandir(path)}
    found.pop(MANIFEST, None)
    for name in sorted({*files, *found}):
        size = files[name][0] if name in files else "none"
        if found.get(name, "none") != size:
            raise CheckpointError(f"{path / name} has {found.get(name, 'no')} bytes, expected {size}")


def _located(folder: Path) -> tuple[Path, str | None, list[Path]]:
    """Return the checkpoint to load, the digest of its manifest, and the others."""
    if (folder / MANIFEST).exists():
        return folder, None, []
    try:
        pointer = _POINTER.fullmatch((folder / LATEST).read_text("ascii"))
    except (FileNotFoundError, UnicodeError):
        pointer = None
    path = folder / (pointer[1] if pointer else LATEST)
    return path, pointer and pointer[2], [other for other in _checkpoints(folder) if other != path]


def _verify(path: Path, digest: str | None, ranks: _Ranks) -> None:
    """Raise unless a checkpoint is whole, and this rank's share of its files intact."""
    if path.name == LATEST:
        raise CheckpointError(f"{path} is missing or damaged")
    text = (path / MANIFEST).read_bytes()
    try:
        manifest = json.loads(text)
        is_intact = _sealed(manifest) == text and digest in (None, hashlib.sha256(text).hexdigest())
    except (ValueError, AttributeError, RecursionError):
        is_intact = False
    if not is_intact:
        raise CheckpointError(f"{path / MANIFEST} is damaged")
    if manifest["format"] != FORMAT:
        raise CheckpointError(f"{path} has format {manifest['format']!r}, expected {FORMAT}, by another superadam")
    _require_files(path, manifest["files"])
    for name in sorted(manifest["files"])[ranks.rank :: ranks.size]:
        if _sha256(path / name) != manifest["files"][name][1]:
            raise CheckpointError(f"{path / name} is damaged")


def _read_values(path: Path) -> dict[str, Any]:
    values: dict[str, Any] = torch.load(path / VALUES, map_location="cpu", weights_only=True)
    return values


@contextmanager
def _no_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # a single process is no fault
        yield


# ---- state -----------------------------------------------------------------------------------------------------------


def _named_state(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """Return the optimizer's state dict with the parameters' names in the model.

    Torch would make an optimizer without state step with gradients of zero, which counts; an empty entry prevents that.
    """
    for module in model.modules():
        if isinstance(module, FullyShardedDataParallel):
            raise CheckpointError("the model is wrapped in FullyShardedDataParallel, expected fully_shard")
        if isinstance(module, FSDPModule):
            module.reshard()  # after an evaluation, its parameters may not be those of the optimizer
    state, first = optimizer.state, optimizer.param_groups[0]["params"][0]
    is_new = not state
    if is_new:
        state[first] = {}
    try:
        named: dict[str, Any] = get_optimizer_state_dict(model, optimizer)
    except KeyError:
        raise CheckpointError("the optimizer has parameters that the model lacks, expected the model's own") from None
    finally:
        if is_new:
            del state[first]
    return {**named, "state": {name: entry for name, entry in named["state"].items() if entry}}


def _contents(model: nn.Module, optimizer: Optimizer) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return all tensors by their names in a checkpoint, and everything else."""
    named = _named_state(model, optimizer)
    flat = {f"model.{name}": value for name, value in get_model_state_dict(model).items()}
    for name, entry in named["state"].items():
        flat.update({f"optimizer.{name}.{key}": value for key, value in entry.items()})
    tensors = {name: value for name, value in flat.items() if isinstance(value, Tensor)}
    others = {name: value for name, value in flat.items() if name not in tensors}
    return tensors, {"others": others, "param_groups": named["param_groups"]}


def _template(path: Path, model: nn.Module, optimizer: Optimizer, values: dict[str, Any]) -> dict[str, Tensor]:
    """Return host tensors for all in a checkpoint, sharded as those that are there now.

    The file decides what state there is: a parameter without gradients has none, and torch's AdamW has no masters.

    Raises:
        CheckpointError: it is of another model or other parameter groups.
    """
    present, groups = get_model_state_dict(model), _named_state(model, optimizer)["param_groups"]
    if [sorted(group["params"]) for group in groups] != [sorted(group["params"]) for group in values["param_groups"]]:
        raise CheckpointError("its parameter groups are not the optimizer's, expected a checkpoint of the same model")
    listed = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    names = [name for group in groups for name in group["params"]]
    parameters = dict(zip(names, listed, strict=True))
    metadata = FileSystemReader(path).read_metadata().state_dict_metadata
    saved = {name: (tuple(entry.size), entry.properties.dtype) for name, entry in metadata.items()}  # type: ignore[union-attr]
    expected = {f"model.{name}": value for name, value in present.items() if isinstance(value, Tensor)}
    for name in sorted({*expected, *filter(lambda name: name.startswith("model."), saved)}):
        found, value = saved.get(name), expected.get(name)
        if value is None or found != (tuple(value.shape), value.dtype):
            here = "nothing" if value is None else (tuple(value.shape), value.dtype)
            raise CheckpointError(f"it holds {found or 'nothing'} as {name}, expected {here}: it is of another model")
    template = {}
    for name, (shape, dtype) in saved.items():
        like = expected.get(name, parameters.get(name.removeprefix("optimizer.").rpartition(".")[0]))
        if like is None or like.shape != shape or name.endswith(".step"):
            like = torch.empty(shape)
        template[name] = torch.empty_like(like, dtype=dtype, device="cpu", requires_grad=False)
    return template


def _restore(model: nn.Module, optimizer: Optimizer, tensors: dict[str, Tensor], values: dict[str, Any]) -> None:
    """Load what was read. The optimizer comes first, because it checks everything before it changes anything."""
    state: dict[str, dict[str, Any]] = {}
    model_state = {}
    has_masters = isinstance(optimizer, SpeculativeCPUAdam)
    for name, value in (tensors | values["others"]).items():
        kind, _, name = name.partition(".")
        if kind == "model":
            model_state[name] = value
        elif has_masters or not name.endswith(".master"):
            parameter, _, key = name.rpartition(".")
            state.setdefault(parameter, {})[key] = value
    named = _named_state(model, optimizer)["param_groups"]
    groups = [
        {**now, **saved, "params": now["params"]} for now, saved in zip(named, values["param_groups"], strict=True)
    ]
    optimizer.load_state_dict({"state": state, "param_groups": groups})
    set_model_state_dict(model, model_state)
