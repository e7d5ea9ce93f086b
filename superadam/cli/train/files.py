"""Atomic file writes, and the checks beforehand that they will be possible.

A reader never sees half a file, and a process that dies while writing leaves the older file as it was.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from superadam.cli.usage import UsageError


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

    It is written under another name, which a process that is killed meanwhile leaves behind; the next call removes it.

    Raises:
        UsageError: writing failed; the older file is as it was.
    """
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    with writing(path):
        if path.exists() and not path.is_file():  # /dev/null would be gone
            raise OSError("it is no regular file")
        for left in path.parent.glob(f".{glob.escape(path.name)}.*.part"):
            process = left.name.split(".")[-2]
            if left == part or (process.isdecimal() and not Path("/proc", process).exists()):
                left.unlink(missing_ok=True)
        try:
            with part.open("x+b") as file:
                write(file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(part, path)
        finally:
            part.unlink(missing_ok=True)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)  # the new name
        finally:
            os.close(folder)
