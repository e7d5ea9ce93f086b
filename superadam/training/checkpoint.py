"""A run on disk.

Owns the checkpoint's layout and the checks that a loaded one must pass. It holds tensors and plain values only, so that
`torch.load(weights_only=True)` reads it, and nothing of a run is changed before everything in it has been read.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from superadam.training.files import replace_file
from superadam.training.history import History
from superadam.training.loop import Trainer
from superadam.training.settings import Settings
from superadam.usage import UsageError

FILE_NAME = "checkpoint.pt"

_FAMILY = "superadam train, "

FORMAT = _FAMILY + "3"
"""Stands in every checkpoint; a later layout counts on."""

_READABLE = (_FAMILY + "2", FORMAT)
"""Layout 2 lacks the settings that came with presets, whose defaults are what its runs had."""


def save(trainer: Trainer, folder: Path) -> Path:
    """Write the run to `folder` and return the file's path.

    Raises:
        UsageError: the disk does not take it; an older checkpoint is as it was.
    """
    content = {
        "format": FORMAT,
        "settings": asdict(trainer.settings),
        "text_sha256": trainer.text.sha256,
        "model": trainer.model.state_dict(),
        "optimizer": trainer.optimizer.state_dict(),
        "schedule": trainer.schedule.state_dict(),
        "batches": trainer.generator.get_state(),
        "random": torch.get_rng_state(),
        "history": trainer.history.to_plain(),
    }
    path = folder / FILE_NAME
    replace_file(path, lambda file: torch.save(content, file))
    return path


def read(folder: Path) -> dict[str, Any]:
    """Return the content of the checkpoint in `folder`.

    Raises:
        UsageError: there is none, or it is not one of this version's `superadam train`.
    """
    path = folder / FILE_NAME
    if not path.is_file():
        raise UsageError(f"--resume {folder} holds no {FILE_NAME}; give the folder of an earlier run's --out")
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch.load raises whatever unzipping or unpickling damaged bytes leads to
        raise UsageError(f"{path} is damaged or no checkpoint; give the folder of an earlier run's --out") from error
    if not isinstance(content, dict) or not str(content.get("format")).startswith(_FAMILY):
        raise UsageError(f"{path} is not a checkpoint of 'superadam train'; give the folder of an earlier run's --out")
    if content["format"] not in _READABLE:
        raise UsageError(
            f"{path} has the layout {content['format']!r}, expected {FORMAT!r}; continue it with the version of "
            "superadam that wrote it, or start a new run without --resume"
        )
    return content


def settings_of(content: dict[str, Any], folder: Path) -> Settings:
    """Return the settings of a checkpoint that `read` returned.

    Raises:
        UsageError: they are damaged.
    """
    try:
        return Settings.of_plain(content["settings"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UsageError(f"{folder / FILE_NAME} has damaged settings; start a new run without --resume") from error


def restore(trainer: Trainer, content: dict[str, Any], folder: Path) -> None:
    """Bring a fresh trainer to where the checkpoint was written.

    Raises:
        UsageError: the text is another one, or the content does not fit the model; the trainer is of no use then.
    """
    path = folder / FILE_NAME
    if content.get("text_sha256") != trainer.text.sha256:
        raise UsageError(
            f"{path} was trained on other bytes than {trainer.text.name} holds now; give the same text with --text"
        )
    try:
        trainer.model.load_state_dict(content["model"])
        trainer.optimizer.load_state_dict(content["optimizer"])
        trainer.schedule.load_state_dict(content["schedule"])
        trainer.generator.set_state(content["batches"])
        torch.set_rng_state(content["random"])
        trainer.history = History.of_plain(content["history"])
    except (KeyError, TypeError, ValueError, RuntimeError, AttributeError) as error:
        raise UsageError(f"{path} does not fit the model that it names; it is damaged: start a new run") from error
    trainer.history.sessions += 1
