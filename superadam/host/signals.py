"""Defers signal handlers while something is changed that must be changed wholly or not at all.

Python runs the handlers of signals between any two instructions of the main thread, and a handler may raise, as that of
Ctrl-C does. A signal that is left to its default action, such as ending the process, is not deferred.
"""

from __future__ import annotations

import signal
import threading
from contextlib import AbstractContextManager, nullcontext
from types import FrameType, TracebackType
from typing import Any

_SIGNALS = (
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGALRM,
    signal.SIGUSR1,
    signal.SIGUSR2,
)
_active: list[object] = []
_NOTHING = nullcontext()


def deferred_signals() -> AbstractContextManager[None]:
    """Return a context inside which no handler runs; those that are due run at its end.

    It does nothing inside another one, and in threads other than the main one, where no handler runs.
    """
    if _active or threading.current_thread() is not threading.main_thread():
        return _NOTHING
    return _DeferredSignals()


class _DeferredSignals:
    def __init__(self) -> None:
        self._due: list[tuple[int, FrameType | None]] = []
        self._handlers: dict[int, Any] = {}

    def __enter__(self) -> None:
        try:
            for one in _SIGNALS:  # Ctrl-C first, and at the end last: it must not leave others behind
                handler = signal.getsignal(one)
                if callable(handler):
                    self._handlers[one] = handler
                    signal.signal(one, self._note)
        except BaseException:  # of a handler that was still in force
            self._put_back()
            raise
        _active.append(self)

    def _put_back(self) -> None:
        for one, handler in reversed(self._handlers.items()):
            signal.signal(one, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._due.append((number, frame))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        _active.clear()
        self._put_back()
        for number, frame in self._due:
            self._handlers[number](number, frame)
