"""Ctrl-C and polite kills, taken between two steps.

Owns the signal handlers while a run is in motion. The first signal asks the loop to stop after its step, so that the
checkpoint is whole; the second one interrupts at once.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType


class Interruption:
    """A context in which SIGINT and SIGTERM are remembered instead of raised.

    Attributes:
        signal_number: the signal that came, or None.
    """

    _SIGNALS = (signal.SIGINT, signal.SIGTERM)

    def __init__(self) -> None:
        self.signal_number: int | None = None
        self._previous: dict[int, signal._HANDLER] = {}

    def __enter__(self) -> Interruption:
        if threading.current_thread() is threading.main_thread():  # Python allows handlers nowhere else
            self._previous = {number: signal.signal(number, self._remember) for number in self._SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._restore()

    def _remember(self, number: int, frame: FrameType | None) -> None:
        self.signal_number = number
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous = {}
