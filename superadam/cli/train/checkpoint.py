"""The checkpoint of a run: its layout, and the checks that a loaded one must pass.

It is one file: what `torch.save` writes of tensors and plain values only, so that `torch.load(weights_only=True)` reads
it, followed by the SHA-256 of all that. A file in which any byte was changed is refused before its content is read.

Of several processes, it is a folder of `superadam.integrations.distributed_checkpoint`.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from superadam.cli.train.files import replace_file
from superadam.cli.train.history import History
from superadam.cli.train.loop import Trainer
from superadam.cli.train.memory import require_memory
from superadam.cli.train.ranks import ALONE, Ranks
from superadam.cli.train.settings import Settings
from superadam.cli.usage import UsageError

FILE_NAME = "checkpoint.pt"

FOLDER_NAME = "shards"
"""Of the checkpoint of several processes."""

FORMAT = "superadam train, 6"
"""Stored in every checkpoint; a later layout gets the next number."""


def save(trainer: Trainer, folder: Path) -> Path:
    """Write the run to `folder`, and return the path of the file, or of the folder, that holds it.

    Raises:
        UsageError: writing failed; an older checkpoint is as it was.
    """
    content = {
        "format": FORMAT,
        "settings": asdict(trainer.settings),
        "text_sha256": trainer.text.sha256,
        "batches": trainer.generator.get_state(),
        "random": torch.get_rng_state(),
        "history": trainer.history.to_plain(),
    }
    if trainer.ranks.are_several:
        from superadam.integrations import distributed_checkpoint

        path = folder / FOLDER_NAME
        with _failures_in_words():
            distributed_checkpoint.save(path, trainer.model, trainer.optimizer, extra=content, keep=1)
        return path
    content |= {"model": trainer.model.state_dict(), "optimizer": trainer.optimizer.state_dict()}
    path = folder / FILE_NAME
    replace_file(path, lambda file: _write(content, file))
    return path


@contextmanager
def _failures_in_words() -> Iterator[None]:
    from superadam.integrations.checkpoint_folder import CheckpointError

    try:
        yield
    except CheckpointError as error:
        raise UsageError(str(error)) from error


def _write(content: dict[str, Any], file: IO[bytes]) -> None:
    try:
        torch.save(content, file)
    except RuntimeError as error:  # torch's own about some errors of the disk
        raise error.__context__ or error from None
    file.seek(0)
    file.write(hashlib.file_digest(file, "sha256").digest())  # type: ignore[arg-type]


def _is_intact(file: IO[bytes]) -> bool:
    """Return whether the file ends with the digest of the rest, and seek to its beginning."""
    sha256 = hashlib.sha256()
    left = file.seek(0, os.SEEK_END) - sha256.digest_size
    file.seek(0)
    while left > 0 and (block := file.read(min(left, 1 << 20))):
        sha256.update(block)
        left -= len(block)
    is_intact = file.read() == sha256.digest()
    file.seek(0)
    return is_intact


def read(folder: Path, ranks: Ranks = ALONE) -> dict[str, Any]:
    """Return the content of the checkpoint in `folder`; of shards, only what is no tensor of them, and not verified.

    Raises:
        UsageError: there is none for this number of processes, it was altered, or it is not one of this version's
            `superadam train`.
    """
    remedy = "give the folder of an earlier run's --out"
    path, other = folder / FILE_NAME, folder / FOLDER_NAME
    if ranks.are_several:
        path, other = other, path
    if other.exists() and not path.exists():
        made, how = ("one process", "without") if ranks.are_several else ("several processes", "under")
        raise UsageError(f"the run in {folder} was made by {made}; continue it {how} torchrun")
    if not (path.is_dir() if ranks.are_several else os.path.isfile(path)):  # False, too, where it may not be read
        raise UsageError(f"--resume {folder} holds no {path.name} that can be read; {remedy}")
    try:
        content = _read_extra(path) if ranks.are_several else _read_file(path)
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror or error}; {remedy}") from error
    except UsageError:
        raise
    except Exception:  # torch.load raises whatever a foreign file leads to, even one whose end is its digest
        content = None
    if not isinstance(content, dict) or type(content.get("format")) is not str:
        raise UsageError(f"{path} is damaged, changed or no checkpoint of 'superadam train'; {remedy}")
    if content["format"] != FORMAT:
        raise UsageError(
            f"{path} has the layout {content['format']!r}, expected {FORMAT!r}; continue it with the version of "
            "superadam that wrote it, or start a new run without --resume"
        )
    return content


def _read_file(path: Path) -> Any:
    """Return what an intact file holds, None of any other; raises UsageError where it does not fit in memory."""
    require_memory(torch.device("cpu"), 2 * os.path.getsize(path), f"restoring {path}", "allow this process more of it")
    with path.open("rb") as file:
        return torch.load(file, map_location="cpu", weights_only=True) if _is_intact(file) else None


def _read_extra(path: Path) -> Any:
    from superadam.integrations import distributed_checkpoint

    with _failures_in_words():
        return distributed_checkpoint.peek(path)


def settings_of(content: dict[str, Any], folder: Path) -> Settings:
    """Return the settings of a checkpoint that `read` returned.

    Raises:
        UsageError: they are damaged.
    """
    try:
        return Settings.of_plain(content["settings"])
    except Exception as error:  # whatever hand-made content leads to
        raise UsageError(f"{folder / FILE_NAME} has damaged settings; start a new run without --resume") from error


def restore(trainer: Trainer, content: dict[str, Any], folder: Path) -> None:
    """Load a checkpoint into a new trainer.

    Raises:
        UsageError: the text is another one, or the content does not fit the model; the trainer is unusable then.
    """
    path = folder / (FOLDER_NAME if trainer.ranks.are_several else FILE_NAME)
    if not isinstance(digest := content.get("text_sha256"), str) or digest != trainer.text.sha256:
        raise UsageError(
            f"{path} was trained on other bytes than {trainer.text.name} holds now; give the same text with --text"
        )
    try:
        trainer.history = History.of_plain(content["history"])
        groups = _without_rates(trainer.optimizer.state_dict())
        if trainer.ranks.are_several:
            _load_shards(trainer, path)
        else:
            _load_whole(trainer, content)
        loaded = trainer.optimizer.state_dict()
        _require_same_outline(_without_rates(loaded), groups)
        _require_updates(loaded, trainer)
        trainer.generator.set_state(content["batches"])
        torch.set_rng_state(content["random"])
    except UsageError:
        raise
    except Exception as error:  # whatever hand-made content leads to
        raise UsageError(f"{path} does not fit the model that it names; it is damaged: start a new run") from error
    trainer.schedule.last_epoch = trainer.history.updates
    trainer.history.sessions += 1


def _load_whole(trainer: Trainer, content: dict[str, Any]) -> None:
    _require_same_outline(content["model"], trainer.model.state_dict())
    trainer.model.load_state_dict(content["model"])
    trainer.optimizer.load_state_dict(content["optimizer"])
    _require_same_outline(content["optimizer"], trainer.optimizer.state_dict())  # nothing was converted or made up


def _load_shards(trainer: Trainer, path: Path) -> None:
    from superadam.integrations import distributed_checkpoint

    with _failures_in_words():
        distributed_checkpoint.load(path, trainer.model, trainer.optimizer)


def _require_updates(optimizer: dict[str, Any], trainer: Trainer) -> None:
    updates = trainer.history.updates
    steps = [float(entry["step"]) for entry in optimizer["state"].values()]
    if steps != [updates] * (len(list(trainer.model.parameters())) if updates else 0):
        raise ValueError(f"the optimizer has not made the {updates} updates of the history")


def _require_same_outline(found: object, expected: object) -> None:
    if _outline(found) != _outline(expected):
        raise ValueError("other keys, plain values or dtypes than expected")


def _without_rates(optimizer: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the parameter groups of an optimizer's state dict, but for the learning rates, which move."""
    return [{**group, "lr": None} for group in optimizer["param_groups"]]


def _outline(value: object) -> object:
    """Return a nest of dicts and lists with the dtypes of its tensors in their places."""
    if isinstance(value, dict):
        return {key: _outline(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_outline(item) for item in value]
    return value.dtype if isinstance(value, Tensor) else value
