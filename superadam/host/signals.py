"""Defers signal handlers and finalizers while something is changed that must be changed wholly or not at all.

Python runs handlers between any two instructions of the main thread, and a handler may raise, as that of Ctrl-C does. A
signal whose default action ends the process is not deferred. The garbage collector runs finalizers in any thread.
"""

from __future__ import annotations

import os
import signal
import threading
from contextlib import AbstractContextManager, nullcontext

from superadam.host import _signals

_SECTION = _signals.Section()


class _WithoutFinalizers:
    def __enter__(self) -> None:
        _signals.pause_collector(True)

    def __exit__(self, *_: object) -> None:
        _signals.pause_collector(False)


class _Thread(threading.local):
    """Contexts of this thread: until Python 3.13, `threading.main_thread()` is the first that imported it.

    Attributes:
        deferred_signals: inside, no handler runs; those that are due run at the end of the outermost one, and the last
            exception is raised with the others as its context. Only the main thread runs handlers. Nor does the garbage
            collector run inside, in any thread, unless it is called.
        without_handlers: the same in the main thread, and what does nothing in others: for what waits long, or happens
            often. There the garbage collector would be off as long, while the main thread trains.
    """

    deferred_signals: AbstractContextManager[None] = _WithoutFinalizers()
    without_handlers: AbstractContextManager[None] = nullcontext()  # while it is asked, too: finalizers may run then

    def __init__(self) -> None:
        try:
            signal.set_wakeup_fd(-2)  # of no file, so that it changes nothing
        except OSError:
            self.become_main()
        except ValueError:
            pass  # it is another thread

    def become_main(self) -> None:
        """Know that this is the thread that runs handlers."""
        self.deferred_signals = self.without_handlers = _SECTION


THIS_THREAD = _Thread()


def _forget() -> None:
    THIS_THREAD.become_main()
    _signals.forget()
    while _signals.pause_collector(False):
        pass


os.register_at_fork(after_in_child=_forget)  # what another thread forks inside would never get to the end
