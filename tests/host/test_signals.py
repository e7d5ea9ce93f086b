"""Signals wait while something is changed, come afterwards, and leave every handler as it was."""

from __future__ import annotations

import _thread
import ctypes
import faulthandler
import gc
import mmap
import operator
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any

import pytest
from support.children import exit_code_of_child, without_torch
from support.deep import TIMES

from superadam.host.signals import THIS_THREAD

LIBRARY = ctypes.CDLL(None)
CAUGHT = sorted(signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP})
SOME = (signal.SIGINT, signal.SIGTERM, signal.SIGVTALRM, signal.SIGPROF, signal.SIGXCPU)


class PlantedError(Exception):
    """What handlers raise; its argument is the signal's number."""


@pytest.fixture(autouse=True)
def usual_handlers():
    others = set(CAUGHT) - {signal.SIGALRM}  # which the limit of a test's time uses
    before = {one: signal.getsignal(one) for one in others}
    yield
    assert {one: signal.getsignal(one) for one in others} == before


class Handlers:
    """A context in which the handlers of some signals are its own; counts their calls.

    Attributes:
        seen: number of each signal whose handler was called, in order.
        inside: whether a section is under way, in which none may be called.
        then: what a handler does; by default it raises.
        armed: how many errors `fail_inside` will raise.
    """

    def __init__(self, numbers: Any = SOME, then: Callable[[int], object] | None = None) -> None:
        self.numbers, self.seen, self.inside, self.then = numbers, [], False, then or self.fail
        self.armed = self.begun = self.ended = 0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Handlers:
        self._before = {number: signal.signal(number, self.handle) for number in self.numbers}
        self._actions = [action_of(number) for number in self.numbers]
        return self

    def __exit__(self, *raised: object) -> None:
        self.check()
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def check(self) -> None:
        """Check that all is as it was."""
        assert {number: signal.getsignal(number) for number in self.numbers} == dict.fromkeys(self.numbers, self.handle)
        assert [action_of(number) for number in self.numbers] == self._actions

    def handle(self, number: int, frame: FrameType | None) -> None:
        assert not self.inside
        self.seen.append(number)
        self.frame = frame
        self.then(number)

    def fail(self, number: int) -> None:
        raise PlantedError(number)

    def fail_inside(self, number: int) -> None:
        """Raise where the signal has come in or below `many_sections`."""
        frame = self.frame
        while self.armed and frame is not None and frame.f_code is not Handlers.many_sections.__code__:
            frame = frame.f_back
        if self.armed and frame is not None:
            self.armed -= 1
            raise PlantedError(number)

    def many_sections(self) -> None:
        for _ in range(20):
            with THIS_THREAD.deferred_signals:
                self.inside = True
                self.begun += 1
                sum(range(200))
                self.ended += 1
                self.inside = False


def action_of(number: int) -> bytes:
    """Return what the system does at a signal: of C's `struct sigaction` function, mask and flags."""
    action = ctypes.create_string_buffer(152)
    LIBRARY.sigaction(int(number), None, action)
    return action.raw[:16] + action.raw[136:140]


def at_once(*calls: Callable[[], object]) -> None:
    """Call C functions without an instruction of Python in between, at which handlers would run."""
    list(map(operator.call, calls))


def mark(*numbers: int) -> list[Callable[[], object]]:
    """Return what lets handlers be due, as signals do."""
    return [partial(_thread.interrupt_main, number) for number in numbers]


def shielded(work: Callable[[], object], depth: int = 20) -> None:
    """Call it, and let so many planted errors pass that are raised by it or afterwards."""
    if depth == 0:
        work()
        return
    try:
        shielded(work, depth - 1)
        time.sleep(0)  # after a call, what is due comes
    except PlantedError:
        pass


def chain(error: BaseException | None) -> list[Any]:
    """Return the numbers of planted errors, and other errors, from the last to the first."""
    found: list[Any] = []
    while error is not None:
        found.append(error.args[0] if isinstance(error, PlantedError) else error)
        error = error.__context__
    return found


def interrupted(reached: list[str], *, depth: int = 1, error: Exception | None = None) -> None:
    """Get a Ctrl-C inside contexts, and go on to their end."""
    with THIS_THREAD.deferred_signals:
        if depth > 1:
            interrupted(reached, depth=depth - 1)
        else:
            signal.raise_signal(signal.SIGINT)
        reached.append("the end")
        if error is not None:
            raise error


def in_section(work: Callable[[], object]) -> None:
    with THIS_THREAD.deferred_signals:
        work()


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_ctrl_c_comes_after_the_outermost_context(depth):
    for _ in range(2):  # usable again
        reached = []
        with pytest.raises(KeyboardInterrupt):
            interrupted(reached, depth=depth)
        assert reached == ["the end"] * depth


@pytest.mark.parametrize("send", [signal.raise_signal, _thread.interrupt_main], ids=["a signal", "interrupt_main"])
def test_every_signal_comes_in_its_order_and_all_their_errors_are_told(send):
    order = random.Random(0).sample(CAUGHT, len(CAUGHT)) + [signal.SIGINT] * 3
    with Handlers(CAUGHT) as handlers:

        def send_all():
            for number in order:
                send(number)
            assert handlers.seen == []

        with pytest.raises(PlantedError) as caught:
            in_section(send_all)
        assert handlers.seen == order
        assert chain(caught.value) == order[::-1]
        assert caught.traceback[-1].name == "fail"
        handlers.check()
        with pytest.raises(PlantedError) as caught:
            interrupted([], error=(body := ValueError("inside")))
        assert chain(caught.value) == [signal.SIGINT, body]


@pytest.mark.parametrize("marked", [SOME[:1], SOME[:2], SOME])
def test_what_was_due_before_comes_before(marked):
    """All of it; where it raises, nothing has begun."""
    section = THIS_THREAD.deferred_signals
    with Handlers() as handlers:
        shielded(lambda: at_once(*mark(*marked), section.__enter__, partial(pytest.fail, "it has begun")))
        assert Counter(handlers.seen) == dict.fromkeys(marked, 1)
        handlers.check()
        handlers.then = lambda number: None
        at_once(*mark(*marked), section.__enter__)
        handlers.inside = True
        at_once(*mark(*marked))
        handlers.inside = False
        handlers.then = handlers.fail
        with pytest.raises(PlantedError) as caught:
            at_once(*mark(*marked), partial(section.__exit__, None, None, None))
        assert Counter(handlers.seen) == dict.fromkeys(marked, 4)
        assert Counter(chain(caught.value)) == dict.fromkeys(marked, 2)


def test_a_handler_may_do_as_it_likes():
    """Enter contexts of its own, raise and get signals, set handlers: also while another context begins or ends."""
    left = 5

    def act(number):
        nonlocal left
        with THIS_THREAD.deferred_signals:
            before = len(handlers.seen)
            if left:
                left -= 1
                at_once(*mark(*SOME))
            assert len(handlers.seen) == before
        signal.signal(signal.SIGTERM, handlers.handle)
        raise PlantedError(number)

    with Handlers(then=act) as handlers:
        with pytest.raises(PlantedError):
            at_once(*mark(*SOME), THIS_THREAD.deferred_signals.__enter__)
        assert (left, set(handlers.seen)) == (0, set(SOME))
        handlers.check()
        left, handlers.seen[:] = 5, []
        with pytest.raises(PlantedError):
            in_section(lambda: (at_once(*mark(*SOME)), handlers.seen and pytest.fail("it came inside")))
        assert (left, set(handlers.seen)) == (0, set(SOME))


def test_a_section_of_what_a_handler_lets_go_of_takes_no_errors_along(monkeypatch):
    """A finalizer's errors are lost, and the collector may run one at any moment."""

    class Finalized:
        def __del__(self):
            in_section(partial(signal.raise_signal, signal.SIGPROF))

    order = [number for number in SOME if number != signal.SIGPROF]
    kept = [Finalized(), Finalized()]
    lost = []

    def then(number):
        if number == signal.SIGPROF:
            lost.append(number)
        elif kept:
            kept.pop()
        raise PlantedError(number)

    monkeypatch.setattr(sys, "unraisablehook", lambda told: lost.append(chain(told.exc_value)[0]))
    with Handlers(then=then), pytest.raises(PlantedError) as caught:
        in_section(lambda: [signal.raise_signal(number) for number in order])
    assert chain(caught.value) == order[::-1]
    assert lost == [signal.SIGPROF] * 4  # the call, and its error


def test_a_section_defers_all_although_handlers_had_their_own_while_it_began():
    """Each of those has put handlers back; the next one is due while half of them are replaced again."""
    left = 10

    def act(number):
        nonlocal left
        in_section(bool)
        if left:
            left -= 1
            marking = map(operator.call, mark(signal.SIGTERM))
            _ = [*marking]  # unlike a call, this lets the handler return before another one runs

    section = THIS_THREAD.deferred_signals
    with Handlers(then=act) as handlers:
        at_once(*mark(signal.SIGTERM), section.__enter__)
        handlers.inside = True
        at_once(*mark(*SOME))
        handlers.inside = False
        section.__exit__(None, None, None)
        assert set(handlers.seen) == set(SOME)


def test_a_handler_that_was_replaced_is_not_called():
    """By another one at the first signal, which is to get the second; or inside, after which it stays."""
    second = []
    with Handlers(then=lambda number: signal.signal(number, lambda number, frame: second.append(number))) as handlers:
        with THIS_THREAD.deferred_signals:
            signal.raise_signal(signal.SIGTERM)
            signal.raise_signal(signal.SIGTERM)
        assert (handlers.seen, second) == ([signal.SIGTERM], [signal.SIGTERM])
        with THIS_THREAD.deferred_signals:
            signal.raise_signal(signal.SIGXCPU)
            signal.signal(signal.SIGXCPU, signal.SIG_IGN)
        assert signal.getsignal(signal.SIGXCPU) is signal.SIG_IGN
        for number in (signal.SIGTERM, signal.SIGXCPU):
            signal.signal(number, handlers.handle)


def test_a_handler_that_was_replaced_inside_is_not_called_while_the_section_ends():
    """Not even for a moment: one signal after the other comes, each while the handlers are put back."""
    left = 20
    seen = []

    def act(number, frame):
        nonlocal left
        if left:
            left -= 1
            marking = map(operator.call, mark(signal.SIGXCPU, number))
            _ = [*marking]  # unlike a call, this lets the handler return before another one runs

    def replacing(number, frame):
        seen.append(number)
        raise PlantedError(number)

    section = THIS_THREAD.deferred_signals
    with Handlers(then=lambda number: None) as handlers:
        section.__enter__()
        signal.signal(signal.SIGXCPU, replacing)
        signal.signal(signal.SIGVTALRM, act)
        with pytest.raises(PlantedError) as caught:
            at_once(*mark(signal.SIGVTALRM), partial(section.__exit__, None, None, None))
        assert handlers.seen == []
        assert chain(caught.value) == seen
        for number in (signal.SIGXCPU, signal.SIGVTALRM):
            signal.signal(number, handlers.handle)


def test_nothing_is_kept_of_signals_that_came():
    """Frames would keep their variables."""
    counts = []
    for _ in range(3):
        for _ in range(20):
            test_ctrl_c_comes_after_the_outermost_context(2)
            test_every_signal_comes_in_its_order_and_all_their_errors_are_told(signal.raise_signal)
            test_what_was_due_before_comes_before(SOME)
            test_a_handler_that_was_replaced_is_not_called()
        gc.collect()
        counts.append(sys.getallocatedblocks())
    assert counts[2] - counts[1] < 10


def test_a_second_signal_may_end_the_process():
    def twice():
        signal.signal(signal.SIGINT, lambda number, frame: signal.signal(number, signal.SIG_DFL))
        with THIS_THREAD.deferred_signals:
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)

    assert exit_code_of_child(twice) == -signal.SIGINT


@pytest.mark.slow
@pytest.mark.parametrize("errors", [0, 3])
def test_each_signal_of_another_process_comes_once(errors):
    """At whichever instruction of the C functions: each is sent when the one before has been seen."""
    count = 4_000 * TIMES
    numbers = memoryview(mmap.mmap(-1, 8)).cast("Q")
    process = os.getpid()

    def send():
        chance = random.Random(3)
        for i in range(count):
            os.kill(process, chance.choice(SOME))
            while numbers[0] == i and os.getppid() == process:
                os.sched_yield()
            for _ in range(chance.randrange(60)):
                pass

    def seen(number):
        try:
            handlers.fail_inside(number)
        finally:
            numbers[0] += 1

    with Handlers(then=seen) as handlers:
        child = os.fork()
        if child == 0:
            send()
            os._exit(0)
        while numbers[0] < count:
            handlers.armed = errors
            shielded(handlers.many_sections)
            handlers.check()
            assert handlers.begun == handlers.ended
        os.waitpid(child, 0)
        assert len(handlers.seen) == count


def test_a_wakeup_fd_gets_each_signal_at_once_and_once():
    reader, writer = socket.socketpair()
    with reader, writer, Handlers(then=lambda number: None):
        reader.setblocking(False)
        writer.setblocking(False)
        before = signal.set_wakeup_fd(writer.fileno())
        try:
            with THIS_THREAD.deferred_signals:
                for number in SOME:
                    signal.raise_signal(number)
                assert reader.recv(100) == bytes(SOME)
            with pytest.raises(BlockingIOError):
                reader.recv(100)
        finally:
            signal.set_wakeup_fd(before)


def test_an_action_of_the_system_stays_as_it_was():
    """Flags that Python did not set, and functions in C that call Python's."""
    with Handlers((signal.SIGUSR1, signal.SIGUSR2), lambda number: None), tempfile.TemporaryFile() as file:
        signal.siginterrupt(signal.SIGUSR1, False)
        faulthandler.register(signal.SIGUSR2, file=file, chain=True)
        actions = [action_of(number) for number in CAUGHT]
        with THIS_THREAD.deferred_signals:
            assert [action_of(number) for number in CAUGHT] == actions
            signal.raise_signal(signal.SIGUSR2)
        assert [action_of(number) for number in CAUGHT] == actions
        faulthandler.unregister(signal.SIGUSR2)
        signal.siginterrupt(signal.SIGUSR1, True)


def test_a_handler_that_was_found_inside_is_the_one_that_it_stood_for():
    seen: list[str] = []
    before = signal.signal(signal.SIGUSR1, lambda *_: seen.append("first"))
    with THIS_THREAD.deferred_signals:
        found: Any = signal.getsignal(signal.SIGUSR1)
        signal.signal(signal.SIGUSR1, lambda *both: (seen.append("second"), found(*both)))
    for expected, handler in ((["second", "first"], signal.getsignal(signal.SIGUSR1)), (["first"], found)):
        signal.signal(signal.SIGUSR1, handler)
        seen.clear()
        with THIS_THREAD.deferred_signals:
            signal.raise_signal(signal.SIGUSR1)
            assert seen == []
        assert seen == expected
    with pytest.raises(ValueError, match="out of range"), THIS_THREAD.deferred_signals:
        operator.call(signal.getsignal(signal.SIGUSR1), 10**6, None)
    signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize("by", ["this thread", "another"])
def test_the_garbage_collector_runs_outside_alone(by):
    run = operator.call if by == "this thread" else in_thread
    for is_enabled in (True, False):
        seen = []
        (gc.enable if is_enabled else gc.disable)()
        run(lambda seen=seen: in_section(lambda: in_section(lambda: seen.append(gc.isenabled()))))
        seen.append(gc.isenabled())
        gc.enable()
        assert seen == [False, is_enabled]


@pytest.mark.parametrize("ends_first", ["this thread", "another"])
def test_the_garbage_collector_waits_for_the_sections_of_all_threads(ends_first):
    began, may_end, seen = threading.Event(), threading.Event(), []
    other = threading.Thread(target=lambda: in_section(lambda: (began.set(), may_end.wait(60))))

    def meet():
        other.start()
        began.wait(60)
        if ends_first == "another":
            may_end.set()
            other.join()
        seen.append(gc.isenabled())

    in_section(meet)
    seen.append(gc.isenabled())
    may_end.set()
    other.join()
    assert [*seen, gc.isenabled()] == [False, ends_first == "another", True]


def test_other_threads_have_no_handlers_to_defer(monkeypatch):
    """Also where the garbage collector runs a finalizer while a new thread is asked."""
    seen, ask = [], signal.set_wakeup_fd
    monkeypatch.setattr(signal, "set_wakeup_fd", lambda descriptor: (in_section(int), ask(descriptor)))
    in_thread(lambda: in_section(lambda: seen.append(signal.getsignal(signal.SIGINT))))
    assert seen == [signal.getsignal(signal.SIGINT)]


def in_thread(work: Callable[[], object]) -> None:
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


def test_a_child_that_is_forked_inside_has_its_handlers():
    """By another thread in a process of its own: what other tests have loaded need not survive that."""
    check_a_child_that_is_forked_inside(operator.call)
    code = "import _thread; _thread.start_new_thread(__import__, ('threading',))"  # which is no main thread for that
    code += "\nwhile 'threading' not in sys.modules: pass\nfrom host import test_signals as it"
    code += "\nit.check_a_child_that_is_forked_inside(it.in_thread)"
    subprocess.run(without_torch(code), check=True)


def check_a_child_that_is_forked_inside(by: Callable[[Callable[[], object]], object]) -> None:
    codes = []

    def in_child():
        assert gc.isenabled()
        handlers.check()
        assert not handlers.seen  # what came before the fork is the parent's
        for _ in range(2):
            with pytest.raises(PlantedError):
                signal.raise_signal(signal.SIGINT)
            with pytest.raises(PlantedError):
                interrupted([])
        assert handlers.seen == [signal.SIGINT] * 4

    def fork_inside():
        signal.raise_signal(signal.SIGTERM)
        by(lambda: codes.append(exit_code_of_child(in_child)))
        assert handlers.seen == []

    with Handlers() as handlers:
        if by is in_thread:  # and the section is that of another one
            in_thread(lambda: in_section(lambda: by(lambda: codes.append(exit_code_of_child(in_child)))))
        with pytest.raises(PlantedError):
            in_section(lambda: in_section(fork_inside))
        assert handlers.seen == [signal.SIGTERM]
    assert codes == [0] * (1 + (by is in_thread))
