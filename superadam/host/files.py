"""Atomic file writes, and locks: a reader never sees half a file, and a process that dies leaves the older one."""

from __future__ import annotations

import fcntl
import os
import secrets
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import IO
from weakref import WeakSet

from superadam.host import forks


def synchronize(path: Path) -> None:
    """Return once a file, or the names in a folder, are on the disk; raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace_file(path: Path, write: Callable[[IO[bytes]], object]) -> None:
    """Replace `path` by what `write` writes to a binary file, in one step: after a power cut it is one or the other.

    A process that is killed meanwhile leaves a file behind, `.NAME.*.part`. Raises OSError if writing fails; the older
    file is then as it was.
    """
    process, part = os.getpid(), path.with_name(f".{path.name}.{secrets.token_hex(8)}.part")
    if path.exists() and not path.is_file():  # /dev/null would be gone
        raise OSError(f"{path} is no regular file, expected one, or none; name another path")
    try:
        with part.open("xb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except OSError as error:
        if error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, os.fspath(path)) from None  # which the caller knows
    finally:
        forks.call_in(process, part.unlink, True)
    synchronize(path.parent)  # the new name


_held: WeakSet[IO[str]] = WeakSet()  # lock files of this process


def _close_held() -> None:
    """Close them in a child that was forked, so that the lock ends with the process that took it."""
    for file in _held:
        file.close()


os.register_at_fork(after_in_child=_close_held)


def lock(path: Path, seconds: float, stack: ExitStack) -> None:
    """Hold the lock of a file, which is created if need be, until `stack` or this process ends.

    After Ctrl-C at any moment, `stack` releases it. Raises BlockingIOError if another process still holds it after this
    time, and OSError.
    """
    file = stack.enter_context(open(path, "a", opener=_opened_at_once))  # noqa: SIM115 - it does
    stack.callback(_unlock, file)
    _held.add(file)
    deadline = time.monotonic() + seconds
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() >= deadline:
                raise
        time.sleep(min(0.1, seconds))


def _unlock(file: IO[str]) -> None:
    if not file.closed:  # as it is in a forked child
        fcntl.flock(file, fcntl.LOCK_UN)  # also for a child that Python did not fork


def _opened_at_once(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK, 0o666)  # a pipe would wait for a reader
