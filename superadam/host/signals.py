"""Defers signal handlers and finalizers while something is changed that must be changed wholly or not at all.

Python runs handlers between any two instructions of the main thread, and a handler may raise, as that of Ctrl-C does. A
signal whose default action ends the process is not deferred. The garbage collector runs finalizers in any thread.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from superadam.host import _signals

_SECTION = _signals.Section()


class _Thread(threading.local):
    """Whether this thread runs handlers: until Python 3.13, `threading.main_thread()` is the first that imported it.

    Attributes:
        without_handlers: `deferred_signals()` in the main thread, and what does nothing in others: for what waits long,
            or happens often. There the garbage collector would be off as long, while the main thread trains.
    """

    without_handlers: AbstractContextManager[None] = nullcontext()  # while it is asked, too: finalizers may run then

    def __init__(self) -> None:
        try:
            signal.set_wakeup_fd(-2)  # of no file, so that it changes nothing
        except OSError:
            self.without_handlers = _SECTION
        except ValueError:
            pass  # it is another thread


THIS_THREAD = _Thread()


def _forget() -> None:
    THIS_THREAD.without_handlers = _SECTION
    _signals.forget()
    while _signals.pause_collector(False):
        pass


os.register_at_fork(after_in_child=_forget)  # what another thread forks inside would never get to the end


@contextmanager
def _without_finalizers() -> Iterator[None]:
    _signals.pause_collector(True)
    try:
        yield
    finally:
        _signals.pause_collector(False)


def deferred_signals() -> AbstractContextManager[None]:
    """Return a context inside which no handler runs; those that are due run at the end of the outermost one.

    All of them run, and the last exception is raised with the others as its context. Only the main thread runs
    handlers. Nor does the garbage collector run inside, in any thread, unless it is called.
    """
    section = THIS_THREAD.without_handlers
    return section if section is _SECTION else _without_finalizers()
