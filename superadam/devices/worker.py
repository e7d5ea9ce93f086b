"""One thread that runs jobs beside the training thread, in order.

Owns the queue and what went wrong in it. A job that raises stops the queue; the error is raised in the training thread
at its next call, and everything queued behind it is discarded. It knows nothing of what the jobs do.
"""

from __future__ import annotations

import abc
import atexit
import functools
import logging
import os
import queue
import sys
import threading
from collections.abc import Callable

_logger = logging.getLogger("superadam")

_LOOK_SECONDS = 1.0
"""How often a thread that waits for the worker's looks whether that is still alive."""

Job = Callable[[bool], object]
"""Something to run once; gets whether the training thread waits for it."""

Work = Callable[[], bool]
"""Something to run while nothing else waits: does one short piece, and returns whether there was one."""


class WorkerError(RuntimeError):
    """A job failed in the worker; its exception is the cause."""


def _refuse_fork(process: int) -> None:
    """Raise in a child that was forked from this process: a thread is not there, and a device is not to be touched.

    Raises:
        RuntimeError: this is another process.
    """
    if os.getpid() != process:
        raise RuntimeError(
            "the scheduler's worker belongs to the process that this one was forked from; close() the scheduler "
            "before forking a process that trains on or saves, and make a new one there"
        )


class Worker(abc.ABC):
    """Runs jobs in order, beside or interleaved with the caller.

    Args:
        idle: work for while there are no jobs.
    """

    def __init__(self, idle: Work) -> None:
        self._idle = idle
        self._error: BaseException | None = None

    @property
    @abc.abstractmethod
    def is_idle(self) -> bool:
        """Whether every submitted job is done."""

    @abc.abstractmethod
    def submit(self, job: Job) -> None:
        """Add a job; it is discarded if an earlier one has failed, which `drain` tells."""

    @abc.abstractmethod
    def drain(self) -> None:
        """Return when every submitted job is done.

        Raises:
            WorkerError: a job failed.
        """

    @abc.abstractmethod
    def wake(self) -> None:
        """Say that there may be idle work now."""

    @abc.abstractmethod
    def close(self) -> None:
        """Finish the jobs, then end."""

    def _raise_error(self) -> None:
        if self._error is not None:
            error, self._error = self._error, None
            raise WorkerError(
                f"the scheduler's worker failed with {type(error).__name__}: {error}; nothing was changed, and the "
                "gradients are in .grad, so call step() again to make the step without it, or stop and mend the cause"
            ) from error


class ThreadWorker(Worker):
    """A daemon thread that sleeps while it has nothing to do.

    Its queue and locks are taken by single calls into C: a signal's handler that raises leaves none of them half taken.
    """

    def __init__(self, idle: Work) -> None:
        super().__init__(idle)
        self._calls: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._is_closed = self._is_abandoned = self._has_ended = False
        self._submitted = self._finished = 0  # jobs; each is counted by one thread
        self._is_awaited = False
        self._process = os.getpid()
        self._thread = threading.Thread(target=self._loop, name="superadam-worker", daemon=True)
        self._thread.start()
        atexit.register(self._end_with_interpreter)  # which would kill the thread inside C++, and abort

    def submit(self, job: Job) -> None:
        """Add a job, unless an earlier one has failed.

        Raises:
            RuntimeError: the worker is closed, or belongs to the process that this one was forked from.
        """
        _refuse_fork(self._process)
        if self._is_closed:
            raise RuntimeError("the scheduler's worker is closed; make a new OffloadScheduler")
        self._calls.put(functools.partial(self._finish, job))
        self._submitted += 1

    @property
    def is_idle(self) -> bool:
        """Whether every submitted job is done."""
        return self._finished >= self._submitted

    def drain(self) -> None:
        """Wait for every submitted job.

        Raises:
            WorkerError: a job failed.
            RuntimeError: the worker belongs to the process that this one was forked from.
        """
        _refuse_fork(self._process)
        passed = threading.Lock()
        passed.acquire()
        self._is_awaited = True
        try:
            self._calls.put(passed.release)
            while not self._has_ended and not passed.acquire(timeout=_LOOK_SECONDS):
                pass
        finally:
            self._is_awaited = False
        if self._has_ended and not self.is_idle:  # not is_alive(): interrupted, that takes a thread for dead
            self._error = self._error or RuntimeError("its thread has ended; make a new OffloadScheduler")
            self._finished = self._submitted
        self._raise_error()

    def wake(self) -> None:
        """Say that there may be idle work now."""
        self._calls.put(bool)

    def close(self) -> None:
        """Let the thread finish its jobs and wait for it."""
        self._is_closed = True
        self._calls.put(sys.exit)
        if self._thread is not threading.current_thread():
            self._thread.join()
        atexit.unregister(self._end_with_interpreter)

    def _end_with_interpreter(self) -> None:
        """Let the running job finish and forget the others: nobody waits for them any more."""
        if os.getpid() == self._process:
            self._is_abandoned = True
            self.close()

    def _run(self, work: Callable[[], object]) -> bool:
        """Run something unless something before it has failed; return whether its result is true."""
        if self._error is not None or self._is_abandoned:
            return False
        try:
            return bool(work())
        except BaseException as error:
            _logger.debug("the scheduler's worker failed", exc_info=True)
            self._error = error
            return False

    def _finish(self, job: Job) -> None:
        self._run(lambda: job(self._is_awaited))
        self._finished += 1

    def _loop(self) -> None:
        may_idle = False
        try:
            while True:
                try:
                    self._calls.get(block=not may_idle)()  # bound to no name: what it holds may be large
                except queue.Empty:
                    may_idle = self._run(self._idle)
                else:
                    may_idle = True
        except SystemExit:
            self._has_ended = True
