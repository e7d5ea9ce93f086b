"""`UsageError`, which commands raise for input that can be corrected, and types of options.

`main` makes a sentence of such an error, and status 2. What a type says is wrong follows the name of the option.
"""

from __future__ import annotations

import argparse
import os
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

from superadam.host.files import replace_file


class UsageError(Exception):
    """A command cannot do what it was asked; the message says what was wrong, what was expected and what to do."""


def require_modules(command: str, *modules: str, extra: str = "cli") -> None:
    """Raise UsageError unless the optional modules that a command needs are installed."""
    for module in modules:
        if find_spec(module) is None:
            raise UsageError(f"'superadam {command}' needs {module}; in the clone: pip install '.[{extra}]'")


def writable(option: str, path: Path | None) -> None:
    """Raise UsageError unless a file can be written, before what it is to hold is measured."""
    if path is not None and not (path.parent.is_dir() and not path.is_dir() and os.access(path.parent, os.W_OK)):
        raise UsageError(f"{option} {path} cannot be written, expected a file in a folder that exists; name another")


def count(word: str) -> int:
    """Return a number from 1 on that C's integers hold."""
    if not (word.isdecimal() and 0 < (value := int(word)) < 1 << 31):
        raise argparse.ArgumentTypeError(f"{word} is no number from 1 to {(1 << 31) - 1}, expected one")
    return value


def share(word: str) -> float:
    """Return a number from 0 to 1."""
    with suppress(ValueError):
        if 0 <= (value := float(word)) <= 1:
            return value
    raise argparse.ArgumentTypeError(f"{word} is no share, expected 0 to 1")


def write(path: Path, text: str) -> None:
    """Write a whole file or none: one that stands there stays as it was until then."""
    if path.exists() and not path.is_file():  # /dev/stdout
        path.write_text(text, "utf-8")
    else:
        replace_file(path, lambda file: file.write(text.encode()))
