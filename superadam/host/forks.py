"""What belongs to one process: one that was forked from it has neither its threads nor its device."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from typing import Any

_left_to_parent: list[object] = []


def finalize(owner: object, function: Callable[..., object], *arguments: Any) -> weakref.finalize[..., Any]:
    """Return a `weakref.finalize` of this process: one that was forked from it keeps the arguments and calls nothing.

    The end of the interpreter does not call it either.
    """
    result = weakref.finalize(owner, call_in, os.getpid(), function, *arguments)
    result.atexit = False
    return result


def call_in(process: int, function: Callable[..., object], *arguments: Any) -> None:
    """Call a function in this process; another one keeps the arguments."""
    if os.getpid() == process:
        function(*arguments)
    else:
        _left_to_parent.append(arguments)
