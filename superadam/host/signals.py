"""Defers signal handlers while something is changed that must be changed wholly or not at all.

Python runs handlers between any two instructions of the main thread, and a handler may raise, as that of Ctrl-C does. A
signal whose default action ends the process is not deferred.
"""

from __future__ import annotations

import os
import threading
from contextlib import AbstractContextManager, nullcontext

from superadam.host import _signals

_SECTION = _signals.Section()
_NOTHING = nullcontext()
os.register_at_fork(after_in_child=_signals.forget)  # what another thread forks inside would never get to the end


def deferred_signals() -> AbstractContextManager[None]:
    """Return a context inside which no handler runs; those that are due run at the end of the outermost one.

    All of them run, and the last exception is raised with the others as its context. Only the main thread runs
    handlers, so that in other threads this does nothing.
    """
    return _SECTION if threading.current_thread() is threading.main_thread() else _NOTHING
