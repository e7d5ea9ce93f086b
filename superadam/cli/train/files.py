"""Atomic file writes whose failure is a sentence, and the checks beforehand that they will be possible."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from superadam.cli.usage import UsageError
from superadam.host import files


def require_writable_folder(folder: Path, option: str) -> None:
    """Check that `folder` exists or can be made, and takes new files; writes nothing.

    Raises:
        UsageError: it cannot be used; `option` is named as the cause.
    """
    existing = folder
    while not os.path.lexists(existing) and existing != existing.parent:
        existing = existing.parent
    if not existing.is_dir():
        raise UsageError(f"{option} needs the folder {folder}, but {existing} is not a folder; choose another place")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise UsageError(f"{option} needs the folder {folder}, but {existing} is not writable; choose another place")


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Create the folder of `path`, and let what runs inside write the file.

    Raises:
        UsageError: writing failed.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        words = f"cannot write {path}: {error.strerror or error}; free some space or choose another place"
        raise UsageError(words) from error


def replace_file(path: Path, write: Callable[[IO[bytes]], object]) -> None:
    """Replace `path` by what `write` writes to a binary file, in one step: after a power cut it is one or the other.

    Raises:
        UsageError: writing failed; the older file is as it was.
    """
    with writing(path):
        files.replace_file(path, write)
