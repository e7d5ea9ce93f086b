"""One thread that runs jobs beside the training thread, in order.

Owns the queue and what went wrong in it. A job that raises stops the queue; the error is raised in the training thread
at its next call, and everything queued behind it is discarded. It knows nothing of what the jobs do.
"""

from __future__ import annotations

import abc
import atexit
import collections
import logging
import os
import threading
from collections.abc import Callable

_logger = logging.getLogger("superadam")

_LOOK_SECONDS = 1.0
"""How often whoever waits for the thread looks whether it is still alive."""

Job = Callable[[], None]
"""Something to run once."""

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
        self._jobs: collections.deque[Job] = collections.deque()
        self._error: BaseException | None = None

    @property
    def is_idle(self) -> bool:
        """Whether every submitted job is done."""
        return not self._jobs

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

    def _fail(self, error: BaseException) -> None:
        """Remember what a job raised, and discard what was queued behind it."""
        self._error = error
        self._jobs.clear()

    def _raise_error(self) -> None:
        if self._error is not None:
            error, self._error = self._error, None
            raise WorkerError(
                f"the scheduler's worker failed with {type(error).__name__}: {error}; nothing was changed, and the "
                "gradients are in .grad, so call step() again to make the step without it, or stop and mend the cause"
            ) from error


class ThreadWorker(Worker):
    """A daemon thread that sleeps on a condition while it has nothing to do."""

    def __init__(self, idle: Work) -> None:
        super().__init__(idle)
        self._changed = threading.Condition()
        self._running = False
        self._closing = False
        self._may_idle = False
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
        with self._changed:
            if self._error is not None:
                return
            if self._closing:
                raise RuntimeError("the scheduler's worker is closed; make a new OffloadScheduler")
            self._jobs.append(job)
            self._may_idle = True
            self._changed.notify_all()

    @property
    def is_idle(self) -> bool:
        """Whether every submitted job is done."""
        return not (self._jobs or self._running)

    def drain(self) -> None:
        """Wait for every submitted job.

        Raises:
            WorkerError: a job failed.
            RuntimeError: the worker belongs to the process that this one was forked from.
        """
        _refuse_fork(self._process)
        with self._changed:
            while (self._jobs or self._running) and self._error is None:
                if not self._changed.wait(_LOOK_SECONDS) and not self._thread.is_alive():
                    self._running = False
                    self._fail(RuntimeError("its thread has ended; make a new OffloadScheduler"))
            self._raise_error()

    def wake(self) -> None:
        """Say that there may be idle work now."""
        with self._changed:
            self._may_idle = True
            self._changed.notify_all()

    def close(self) -> None:
        """Let the thread finish its jobs and wait for it."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if self._thread is not threading.current_thread():
            self._thread.join()
        atexit.unregister(self._end_with_interpreter)

    def _end_with_interpreter(self) -> None:
        """Let the running job finish and forget the others: nobody waits for them any more."""
        if os.getpid() == self._process:
            self._jobs.clear()
            self.close()

    def _next(self) -> Job | None:
        """Wait for a job, or for a chance to do idle work (returned as None)."""
        with self._changed:
            while True:
                if self._jobs:
                    self._running = True
                    return self._jobs.popleft()
                if self._closing:
                    raise SystemExit
                if self._may_idle:
                    self._may_idle = False
                    return None
                self._changed.wait()

    def _loop(self) -> None:
        while True:
            try:
                job = self._next()
            except SystemExit:
                return
            try:
                if job is not None:
                    job()
                else:
                    more = self._idle()
                    with self._changed:
                        self._may_idle = self._may_idle or more
            except BaseException as error:
                _logger.debug("the scheduler's worker failed", exc_info=True)
                with self._changed:
                    self._fail(error)
            finally:
                job = None  # what it holds may be large
                with self._changed:
                    self._running = False
                    self._changed.notify_all()
