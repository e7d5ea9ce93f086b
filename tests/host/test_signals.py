"""Signals wait while something is changed, come afterwards, and leave every handler as it was."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator

import pytest

from superadam.host.signals import deferred_signals


@pytest.fixture(autouse=True)
def usual_handlers() -> Iterator[None]:
    inherited = signal.signal(signal.SIGINT, signal.default_int_handler)  # it is ignored in a shell's background
    before = {one: signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)}
    yield
    assert {one: signal.getsignal(one) for one in before} == before
    signal.signal(signal.SIGINT, inherited)


def interrupted(reached: list[str], *, depth: int = 1, error: Exception | None = None) -> None:
    """Get a Ctrl-C inside contexts, and go on to their end."""
    with deferred_signals():
        if depth > 1:
            interrupted(reached, depth=depth - 1)
        else:
            signal.raise_signal(signal.SIGINT)
        reached.append("the end")
        if error is not None:
            raise error


def test_an_interruption_of_its_beginning_is_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(number: int, handler: object) -> None:
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(signal, "signal", interrupt)
    with pytest.raises(KeyboardInterrupt), deferred_signals():
        pytest.fail("nothing is to be done inside")


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_ctrl_c_comes_after_the_outermost_context(depth: int) -> None:
    for _ in range(2):  # usable again
        reached: list[str] = []
        with pytest.raises(KeyboardInterrupt):
            interrupted(reached, depth=depth)
        assert reached == ["the end"] * depth


def test_every_signal_comes_in_its_order() -> None:
    seen: list[int] = []
    before = [signal.signal(one, lambda number, frame: seen.append(number)) for one in (signal.SIGTERM, signal.SIGUSR1)]
    try:
        with deferred_signals():
            signal.raise_signal(signal.SIGUSR1)
            signal.raise_signal(signal.SIGTERM)
            assert seen == []
        assert seen == [signal.SIGUSR1, signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before[0])
        signal.signal(signal.SIGUSR1, before[1])


def test_an_error_inside_is_not_lost() -> None:
    with pytest.raises(KeyboardInterrupt) as caught:
        interrupted([], error=ValueError("inside"))
    assert isinstance(caught.value.__context__, ValueError)
    with pytest.raises(ValueError, match="inside"), deferred_signals():
        raise ValueError("inside")


def test_a_default_action_is_left_alone() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with deferred_signals():
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_other_threads_have_nothing_to_defer() -> None:
    def enter() -> None:
        with deferred_signals():
            handlers.append(signal.getsignal(signal.SIGINT))

    handlers: list[object] = []
    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert handlers == [signal.getsignal(signal.SIGINT)]
