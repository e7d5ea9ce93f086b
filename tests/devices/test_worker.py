"""The worker's thread: order, failures, sleep, idle work, the end."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator

import pytest
from children import exit_code_of_child
from overlap import PlantedError, end_thread

from superadam.devices.worker import ThreadWorker, WorkerError

pytestmark = pytest.mark.timeout(240)  # a hang fails with the stack of every thread


class Idle:
    """Idle work of a number of pieces; counts how often it was asked."""

    def __init__(self, pieces: int = 0) -> None:
        self.pieces, self.asked = pieces, 0
        self.done = threading.Event()

    def __call__(self) -> bool:
        self.asked += 1
        self.pieces -= 1
        if self.pieces <= 0:
            self.done.set()
        return self.pieces > 0


def fail(is_awaited: Callable[[], bool]) -> None:
    raise PlantedError("planted")


@pytest.fixture
def idle() -> Idle:
    return Idle()


@pytest.fixture
def worker(idle: Idle) -> Iterator[ThreadWorker]:
    one = ThreadWorker(idle)
    yield one
    one.close()


def test_jobs_run_in_order_beside_the_caller(worker: ThreadWorker) -> None:
    seen: list[tuple[int, int]] = []
    for i in range(100):
        worker.submit(lambda _, i=i: seen.append((i, threading.get_ident())))  # type: ignore[misc]
    worker.drain()
    assert [i for i, _ in seen] == list(range(100))
    assert {thread for _, thread in seen} != {threading.get_ident()}


def test_drain_waits_for_the_job_that_runs(worker: ThreadWorker) -> None:
    started, ended = threading.Event(), threading.Event()

    def slow(is_awaited: Callable[[], bool]) -> None:
        started.set()
        time.sleep(0.05)
        ended.set()

    worker.submit(slow)
    assert started.wait(60)
    worker.drain()
    assert ended.is_set()


def test_failure_is_raised_once_with_its_cause_and_discards_what_was_queued(worker: ThreadWorker) -> None:
    gate, ran = threading.Event(), []

    def wait_then_fail(is_awaited: Callable[[], bool]) -> None:
        assert gate.wait(60)
        fail(is_awaited)

    worker.submit(wait_then_fail)
    worker.submit(lambda _: ran.append(1))
    gate.set()
    with pytest.raises(
        WorkerError, match="worker failed with PlantedError: planted; nothing was changed, and the "
    ) as one:
        worker.drain()
    assert isinstance(one.value.__cause__, PlantedError)
    assert not ran
    worker.submit(lambda _: ran.append(2))
    worker.drain()
    assert ran == [2]


def test_jobs_after_a_failure_are_discarded_until_it_is_told(worker: ThreadWorker) -> None:
    """Backward goes on: the submitting thread has nothing to do with it."""
    ran: list[int] = []
    worker.submit(fail)
    for _ in range(500):
        if worker._error is not None:
            break
        time.sleep(0.01)
    worker.submit(lambda _: ran.append(1))
    with pytest.raises(WorkerError, match="planted"):
        worker.drain()
    assert not ran
    worker.submit(lambda _: ran.append(2))
    worker.drain()
    assert ran == [2]


def test_idle_is_who_has_neither_a_job_nor_one_under_way(worker: ThreadWorker) -> None:
    gate, started = threading.Event(), threading.Event()
    assert worker.is_idle

    def wait(is_awaited: Callable[[], bool]) -> None:
        started.set()
        assert gate.wait(60)

    worker.submit(wait)
    assert not worker.is_idle
    assert started.wait(60)
    assert not worker.is_idle
    gate.set()
    worker.drain()
    assert worker.is_idle


@pytest.mark.parametrize("with_job", [False, True], ids=["asleep", "at a job"])
def test_thread_that_has_ended_is_noticed_instead_of_waited_for(worker: ThreadWorker, with_job: bool) -> None:
    """Every time that it is waited for; what it was to do is forgotten."""
    end_thread(worker, with_job=with_job)
    ran: list[int] = []
    for _ in range(2):
        worker.submit(lambda _: ran.append(1))
        with pytest.raises(WorkerError, match="its thread has ended; make a new OffloadScheduler"):
            worker.drain()
        worker.drain()  # nothing is asked of it
    worker.wake()
    worker.close()
    assert not ran


@pytest.mark.parametrize("error", [SystemExit(), KeyboardInterrupt(), MemoryError()])
def test_nothing_that_a_job_raises_ends_the_thread(worker: ThreadWorker, error: BaseException) -> None:
    def stop(is_awaited: Callable[[], bool]) -> None:
        raise error

    worker.submit(stop)
    with pytest.raises(WorkerError) as caught:
        worker.drain()
    assert caught.value.__cause__ is error
    ran: list[int] = []
    worker.submit(lambda _: ran.append(1))
    worker.drain()
    assert ran == [1]


def test_idle_work_goes_on_until_there_is_none(worker: ThreadWorker, idle: Idle) -> None:
    idle.pieces = 3
    worker.wake()
    assert idle.done.wait(60)
    time.sleep(0.05)
    assert idle.asked == 3


def test_jobs_go_before_idle_work(worker: ThreadWorker, idle: Idle) -> None:
    """A job waits for at most one piece of idle work."""
    gate, ran_after = threading.Event(), []
    idle.pieces = 1_000_000

    def hold(is_awaited: Callable[[], bool]) -> None:
        assert gate.wait(60)

    worker.submit(hold)
    worker.wake()
    worker.submit(lambda _: ran_after.append(idle.asked))
    gate.set()
    worker.drain()
    assert ran_after == [0]
    idle.pieces = 0


def test_failing_idle_work_is_told(idle: Idle) -> None:
    failed = threading.Event()

    def fail_idly() -> bool:
        failed.set()
        raise PlantedError("planted")

    worker = ThreadWorker(fail_idly)
    worker.wake()
    assert failed.wait(60)
    time.sleep(0.05)
    with pytest.raises(WorkerError, match="planted"):
        worker.drain()
    worker.close()


def test_thread_sleeps_while_there_is_nothing_to_do(worker: ThreadWorker) -> None:
    worker.submit(lambda _: None)
    worker.drain()
    before = time.process_time()
    time.sleep(0.3)
    assert time.process_time() - before < 0.1  # of 0.3 s that a spinning thread would use; other threads are idle too


def test_after_a_failure_nothing_counts_as_work(worker: ThreadWorker) -> None:
    """Or the thread would ask for idle work again and again until it is noticed."""
    worker.submit(fail)
    while not worker.is_idle:
        time.sleep(0.001)
    assert not worker._run(lambda: True)
    with pytest.raises(WorkerError):
        worker.drain()
    assert worker._run(lambda: True)


def test_a_closed_worker_is_forgotten() -> None:
    """With everything that its idle work holds."""
    worker = ThreadWorker(Idle(3))
    is_alive = weakref.ref(worker)
    worker.close()
    del worker
    gc.collect()
    assert is_alive() is None


def test_close_finishes_the_jobs_and_refuses_others() -> None:
    ran: list[int] = []
    worker = ThreadWorker(lambda: False)
    for i in range(10):
        worker.submit(lambda _, i=i: (time.sleep(0.002), ran.append(i)))  # type: ignore[misc]
    worker.close()
    worker.close()
    assert ran == list(range(10))
    assert not worker._thread.is_alive()
    with pytest.raises(RuntimeError, match="worker is closed; make a new OffloadScheduler"):
        worker.submit(lambda _: None)
    worker.drain()


def test_forked_child_is_refused_even_while_a_job_runs(worker: ThreadWorker) -> None:
    gate = threading.Event()
    worker.submit(lambda _: gate.wait(60) and None)

    def in_child() -> None:
        for call in (worker.drain, lambda: worker.submit(lambda _: None)):
            with pytest.raises(RuntimeError, match="belongs to the process that this one was forked from"):
                call()
        worker.wake()
        worker.close()

    assert exit_code_of_child(in_child, seconds=60) == 0
    gate.set()
    worker.drain()
