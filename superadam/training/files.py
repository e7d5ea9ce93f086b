"""Files that are there whole or not at all.

Owns how the trainer writes to disk and how it asks beforehand whether it will be able to. A reader never sees half a
file, and a process that dies while writing leaves the older file as it was.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from superadam.usage import UsageError


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
    """Make the folder of `path`, and let what runs inside write the file.

    Raises:
        UsageError: the disk does not take it.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}; free some space or choose another place") from error


def replace_file(path: Path, write: Callable[[IO[bytes]], object]) -> None:
    """Make `path` what `write` puts into a binary file, in one step: after a power cut it is the older file or this.

    Raises:
        UsageError: the disk does not take it; the older file is as it was.
    """
    with writing(path), tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
        try:
            write(file)
            file.flush()
            os.fsync(file.fileno())
            os.chmod(file.name, 0o666 & ~_umask())
            os.replace(file.name, path)
        except BaseException:
            Path(file.name).unlink(missing_ok=True)
            raise


def _umask() -> int:
    """Return the process's mask for new files; the operating system only tells it by setting another."""
    mask = os.umask(0)
    os.umask(mask)
    return mask
