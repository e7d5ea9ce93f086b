"""The worker's thread: order, failures, sleep, idle work, the end."""

import ctypes
import gc
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from support.children import exit_code_of_child
from support.float_modes import flushed_denormals
from support.overlap import PlantedError, ThreadDevice, end_thread, loss_of, train, twins
from support.waiting import wait_until

from superadam import OffloadScheduler
from superadam.devices.worker import Worker, WorkerError
from superadam.kernels import native

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


@pytest.fixture
def idle():
    return Idle()


@pytest.fixture
def worker(idle):
    one = Worker(idle)
    yield one
    one.close()


@pytest.mark.parametrize("is_behind", [True, False])
@pytest.mark.parametrize("error", [PlantedError("planted"), SystemExit(), KeyboardInterrupt(), MemoryError()])
def test_a_failure_is_raised_once_with_its_cause_and_later_jobs_are_discarded(worker, error, is_behind):
    """Whether they were there before it: backward goes on, and the submitting thread has nothing to do with it."""
    ran, gate = [], threading.Event()
    worker.submit(lambda _: gate.wait(60) and None)
    worker.submit(mock.Mock(side_effect=error))
    if not is_behind:
        gate.set()
        wait_until(lambda: worker.is_idle)
    worker.submit(lambda _: ran.append(1))
    gate.set()
    told = f"failed with {type(error).__name__}: {error}; nothing was changed, and the "
    with pytest.raises(WorkerError, match=told) as caught:
        worker.drain()
    assert caught.value.__cause__ is error
    worker.submit(lambda _: ran.append(2))
    worker.drain()
    assert ran == [2]


def test_jobs_have_the_usual_floating_point_mode_whoever_starts_the_thread(idle):
    with flushed_denormals():
        one = Worker(idle)
    modes = []
    one.submit(lambda _: modes.append(native.is_float_mode_usual()))
    one.close()
    assert modes == [True]


def test_jobs_are_awaited_only_while_somebody_waits(worker):
    seen = []
    for _ in range(2):
        worker.submit(lambda is_awaited: seen.append(is_awaited()))
        wait_until(lambda: worker.is_idle)
        worker.submit(lambda is_awaited: wait_until(is_awaited))
        worker.drain()
    assert seen == [False, False]


def test_idle_is_who_has_neither_a_job_nor_one_under_way(worker):
    """In another thread, for which `drain` waits."""
    gate, started, threads = threading.Event(), threading.Event(), []
    assert worker.is_idle

    def wait(is_awaited):
        started.set()
        assert gate.wait(60)
        time.sleep(0.05)
        threads.append(threading.current_thread())

    worker.submit(wait)
    assert not worker.is_idle
    assert started.wait(60)
    assert not worker.is_idle
    gate.set()
    worker.drain()
    assert worker.is_idle
    assert threads
    assert threading.current_thread() not in threads


@pytest.mark.timeout(60)
@pytest.mark.parametrize("with_job", [False, True], ids=["asleep", "at a job"])
def test_thread_that_has_ended_is_noticed_instead_of_waited_for(worker, with_job):
    """Every time that it is waited for; what it was to do is forgotten."""
    end_thread(worker, with_job=with_job)
    ran = []
    is_held = weakref.ref(held := Idle())
    worker.submit(lambda _, held=held: ran.append(held.asked))
    del held
    for _ in range(2):
        worker.submit(lambda _: ran.append(1))
        with pytest.raises(WorkerError, match="its thread has ended; make a new OffloadScheduler"):
            worker.drain()
        worker.drain()  # nothing is asked of it
    gc.collect()
    assert is_held() is None
    worker.wake()
    worker.close()
    assert not ran


def test_jobs_go_before_idle_work(worker, idle):
    """A job waits for at most one piece of idle work."""
    gate, ran_after = threading.Event(), []
    idle.pieces = 1_000_000
    worker.submit(lambda _: gate.wait(60) and None)
    worker.wake()
    worker.submit(lambda _: ran_after.append(idle.asked))
    gate.set()
    worker.drain()
    assert ran_after == [0]
    idle.pieces = 0


@pytest.mark.parametrize("fails", [False, True])
def test_idle_work_goes_on_until_there_is_none_or_it_fails_and_then_the_thread_sleeps(fails):
    """Where it has failed there may still be some, which is left until the failure is told."""
    idle = Idle(3)
    worker = Worker(lambda: idle() or (1 / 0 if fails else False))
    worker.wake()
    assert idle.done.wait(60)
    time.sleep(0.05)
    if fails:
        worker.submit(lambda _: None)  # wakes the thread, and is discarded
    clock = time.pthread_getcpuclockid(worker._thread.ident)
    before = time.clock_gettime(clock)
    time.sleep(0.3)
    assert time.clock_gettime(clock) - before < 0.1  # of 0.3 s that it would use if it spun
    assert idle.asked == 3
    with pytest.raises(WorkerError, match="failed with ZeroDivisionError") if fails else nullcontext():
        worker.drain()
    worker.close()


def test_close_finishes_the_jobs_and_refuses_others():
    ran = []
    worker = Worker(lambda: False)
    for i in range(10):
        worker.submit(lambda _, i=i: (time.sleep(0.002), ran.append(i)))
    worker.close()
    worker.close()
    assert ran == list(range(10))
    assert not worker._thread.is_alive()
    with pytest.raises(RuntimeError, match="worker is closed; make a new OffloadScheduler"):
        worker.submit(lambda _: None)
    worker.drain()


def test_forked_child_is_refused_even_while_a_job_runs(worker):
    gate = threading.Event()
    worker.submit(lambda _: gate.wait(60) and None)

    def in_child():
        with pytest.raises(RuntimeError, match="belongs to the process that this one was forked from"):
            worker.check_process()
        worker.wake()
        worker.close()

    assert exit_code_of_child(in_child) == 0
    gate.set()
    worker.drain()


def fail_in_queue(worker: Worker, error: BaseException, patch: pytest.MonkeyPatch) -> None:
    queue, errors = worker._calls, [error]

    def get(block: bool = True) -> Any:
        found = queue.get(block)
        if errors:
            raise errors.pop()
        return found

    worker._calls = SimpleNamespace(get=get, put=queue.put, empty=queue.empty)
    queue.put(bool)


def fail_at_finish(worker: Worker, error: BaseException, patch: pytest.MonkeyPatch) -> None:
    worker._finish = mock.Mock(side_effect=error)


def fail_anywhere(worker: Worker, error: BaseException, patch: pytest.MonkeyPatch) -> None:
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(worker._thread.ident), ctypes.py_object(type(error)))
    worker.wake()


def in_time(worker: Worker, call: Callable[[], object]) -> bool:
    """Call, and return whether WorkerError was raised; fail where that waits long for the thread."""
    failed = False
    with mock.patch.object(worker, "_look", wraps=worker._look) as look:
        try:
            call()
        except WorkerError:
            failed = True
    assert look.call_count <= 8  # at whether it is alive, each after a quarter of a second, however slow the machine is
    return failed


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("late", [0.0, 0.001, 0.01])
@pytest.mark.parametrize("error", [SystemExit(), KeyboardInterrupt(), MemoryError()], ids=repr)
@pytest.mark.parametrize("end", [fail_in_queue, fail_at_finish, fail_anywhere, lambda worker, *_: end_thread(worker)])
def test_no_call_waits_for_a_thread_that_is_gone(end, error, late, monkeypatch):
    """Each returns or raises WorkerError; steps that are made have the bits of training without a worker."""
    plain_model, plain, model, optimizer = twins()
    scheduler = OffloadScheduler(optimizer, model, device=ThreadDevice(), bucket_numel=50)
    worker = scheduler._pipeline.worker
    calls = [
        optimizer.speculate,
        optimizer.rollback,
        lambda: optimizer.state,
        optimizer.state_dict,
        lambda: optimizer.load_state_dict(optimizer.state_dict()),
        lambda: scheduler.place(num_threads=1),
        scheduler.synchronize,
        lambda: scheduler.statistics,
        lambda: optimizer.clip_grad_norm_(20.0),
        bool,
    ]
    for number, call in enumerate([bool, *calls]):
        train(plain_model, plain, range(number, number + 1))
        optimizer.zero_grad()
        timer = threading.Timer(late, end, (worker, error, monkeypatch))
        if number == 1:
            timer.start()
        loss_of(model, number).backward()
        if number == 1:
            timer.join()
        in_time(worker, call)
        tries = (in_time(worker, optimizer.resolve if number % 2 else optimizer.step) for _ in range(3))
        assert not all(tries), "no step was made"
        if number == len(calls) - 1:
            in_time(worker, scheduler.close)
            in_time(worker, scheduler.close)
            assert not worker._thread.is_alive()
        assert all(map(torch.equal, plain_model.parameters(), model.parameters())), number
