"""The checkpoint of a run: one file of tensors and plain values, so that `torch.load(weights_only=True)` reads it.

`torch.save` writes it as a zip archive with a CRC-32 of each entry, which `torch.load` does not look at; `read` does.
"""

from __future__ import annotations

import zipfile
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

import torch

from superadam.cli.train.history import History
from superadam.cli.train.loop import Trainer
from superadam.cli.train.settings import Settings
from superadam.cli.usage import UsageError
from superadam.host.files import replace_file

FILE_NAME = "checkpoint.pt"

FORMAT = "superadam train, 8"
"""Stored in every checkpoint; a later layout gets the next number."""


def save(trainer: Trainer, path: Path) -> None:
    """Replace the file by the run as it stands, in one step; raises OSError, and then the older file stays."""
    content = {
        "format": FORMAT,
        "settings": asdict(trainer.settings),
        "text_sha256": trainer.text.sha256,
        "batches": trainer.generator.get_state(),
        "history": trainer.history.to_plain(),
        "model": trainer.model.state_dict(),
        "optimizer": trainer.optimizer.state_dict(),
    }

    def write(file: IO[bytes]) -> None:
        try:
            torch.save(content, file)
        except RuntimeError as error:  # torch's own about some errors of the disk
            raise error.__context__ or error from None

    replace_file(path, write)


def read(folder: Path) -> tuple[Settings, dict[str, Any]]:
    """Return the settings and the content of the checkpoint in `folder`.

    Raises:
        UsageError: there is none, it was damaged, or it is not one of this version's `superadam train`.
    """
    path, remedy = folder / FILE_NAME, "give the folder of an earlier run's --out"
    try:
        file = path.open("rb")
    except OSError as error:
        words = f"--resume {folder} holds no {FILE_NAME} that can be read ({error.strerror}); {remedy}"
        raise UsageError(words) from error
    try:
        with file, zipfile.ZipFile(file) as archive:
            damaged = archive.testzip()
            file.seek(0)
            content: Any = None if damaged else torch.load(file, map_location="cpu", weights_only=True)
        layout = content["format"]
    except Exception as error:  # whatever a foreign file leads to
        raise UsageError(f"{path} is damaged or no checkpoint of 'superadam train'; {remedy}") from error
    if layout != FORMAT:
        raise UsageError(
            f"{path} has the layout {layout!r}, expected {FORMAT!r}; continue it with the version of superadam that "
            "wrote it, or start a new run without --resume"
        )
    return Settings(**content["settings"]), content


def restore(trainer: Trainer, content: dict[str, Any], folder: Path) -> None:
    """Load what `read` returned into a new trainer of these settings.

    Raises:
        UsageError: the text is another one.
    """
    if content["text_sha256"] != trainer.text.sha256:
        raise UsageError(
            f"the run in {folder} was trained on other bytes than {trainer.text.name} holds now; "
            "give the same text with --text"
        )
    trainer.model.load_state_dict(content["model"])
    trainer.optimizer.load_state_dict(content["optimizer"])
    trainer.generator.set_state(content["batches"])
    trainer.continue_from(History.of_plain(content["history"]))
