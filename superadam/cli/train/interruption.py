"""Interruption of a run by SIGINT or SIGTERM, which take effect between two steps.

The first signal asks the loop to stop after its step, so that the checkpoint is whole; the second one ends the process
at once, whatever it is doing: files are as `files` left them.
"""

from __future__ import annotations

import os
import signal
import threading
from contextlib import ExitStack
from types import FrameType
from typing import Self

SIGNALS = (signal.SIGINT, signal.SIGTERM)

SIGNAL_STATUS = 128
"""Added to a signal's number: the exit status of a run that the signal stopped or ended, as shells count."""


class Interruption(ExitStack):
    """A context in which SIGINT and SIGTERM are remembered instead of raised, and the second of them ends the process.

    `signal_number` is the signal that arrived, or by whose number the loop is to stop; None until then.
    """

    signal_number: int | None = None

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():  # Python allows handlers nowhere else
            reader, writer = os.pipe()
            os.set_blocking(writer, False)
            watcher = threading.Thread(target=_end_at_second, args=(reader,), name="superadam signals", daemon=True)
            watcher.start()
            self.callback(watcher.join)
            self.callback(os.close, writer)
            self.callback(signal.set_wakeup_fd, signal.set_wakeup_fd(writer))
            for number in SIGNALS:
                self.callback(signal.signal, number, signal.signal(number, self._remember))
        return self

    def _remember(self, number: int, frame: FrameType | None) -> None:
        self.signal_number = number


def _end_at_second(reader: int) -> None:
    """Read signal numbers, which arrive at once, while handlers wait for the main thread's next instruction."""
    with open(reader, "rb", buffering=0) as numbers:
        stops = (number for number in iter(lambda: numbers.read(1), b"") if number[0] in SIGNALS)
        next(stops, None)
        for number in stops:
            os._exit(SIGNAL_STATUS + number[0])
