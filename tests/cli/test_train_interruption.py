"""`superadam.cli.train.interruption`: the first signal waits for the step, the second one does not."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import threading
from collections.abc import Callable

import pytest
from support.children import exit_code_of_child, wait_until_delivered

from superadam.cli.train.interruption import Interruption
from superadam.host.signals import deferred_signals


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_first_signal_is_remembered(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with Interruption() as interruption:
        assert interruption.signal_number is None
        os.kill(os.getpid(), number)
        assert interruption.signal_number == number
    assert signal.getsignal(number) is before


def in_python() -> None:
    """Never return, but let handlers run, except those that are deferred."""
    with deferred_signals():
        threading.Event().wait()


def in_c() -> None:
    """Never return, not even to run a handler."""
    mutex = ctypes.create_string_buffer(64)  # of zeros: PTHREAD_MUTEX_INITIALIZER
    for _ in range(2):
        ctypes.CDLL(None).pthread_mutex_lock(mutex)


@pytest.mark.parametrize("block", [in_python, in_c])
@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("second", [signal.SIGINT, signal.SIGTERM])
def test_second_signal_ends_the_process_at_once(
    block: Callable[[], None], first: signal.Signals, second: signal.Signals
) -> None:
    reader, writer = os.pipe()

    def work() -> None:
        with Interruption():
            os.write(writer, b"%d" % os.getpid())
            block()

    def interrupt() -> None:
        process = int(os.read(reader, 16))
        for number in (first, second):
            os.kill(process, number)
            wait_until_delivered(process, number)

    interrupter = threading.Thread(target=interrupt)
    interrupter.start()
    assert exit_code_of_child(work) in (128 + first, 128 + second)  # two of different numbers may come in any order
    interrupter.join()


def test_other_signals_do_not_count() -> None:
    seen: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: seen.append(number))
    with Interruption() as interruption:
        for number in (signal.SIGUSR1, signal.SIGINT, signal.SIGUSR1):
            os.kill(os.getpid(), number)
    signal.signal(signal.SIGUSR1, before)
    assert (seen, interruption.signal_number) == ([signal.SIGUSR1] * 2, signal.SIGINT)


def test_everything_is_as_before_afterwards() -> None:
    threads, files = threading.enumerate(), os.listdir("/proc/self/fd")
    reader, writer = socket.socketpair()
    with reader, writer:
        writer.setblocking(False)
        signal.set_wakeup_fd(writer.fileno())
        with Interruption():
            pass
        assert signal.set_wakeup_fd(-1) == writer.fileno()
    assert (threading.enumerate(), os.listdir("/proc/self/fd")) == (threads, files)


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
