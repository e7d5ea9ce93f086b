"""`superadam.training.interruption`: the first signal waits for the step, the second one does not."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from superadam.training.interruption import Interruption


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_first_signal_is_remembered(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with Interruption() as interruption:
        assert interruption.signal_number is None
        os.kill(os.getpid(), number)
        assert interruption.signal_number == number
    assert signal.getsignal(number) is before


def test_second_signal_interrupts() -> None:
    with Interruption() as interruption:
        os.kill(os.getpid(), signal.SIGINT)
        assert interruption.signal_number == signal.SIGINT
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_handlers_are_left_alone_outside_the_main_thread() -> None:
    before = signal.getsignal(signal.SIGINT)
    seen = []

    def work() -> None:
        with Interruption() as interruption:
            seen.append((signal.getsignal(signal.SIGINT), interruption.signal_number))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [(before, None)]
