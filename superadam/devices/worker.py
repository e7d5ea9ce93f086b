"""A worker thread that runs jobs in order, next to the training thread.

A job that raises stops the queue: later jobs are discarded, and the training thread's next call raises the error.
"""

from __future__ import annotations

import atexit
import functools
import os
import queue
import sys
import threading
from collections.abc import Callable

from superadam.host.signals import THIS_THREAD
from superadam.kernels import native

_LOOK_SECONDS = 0.25  # how often a thread that waits for the worker's thread checks that it is still alive

Job = Callable[[Callable[[], bool]], object]
"""Something to run once; its argument is whether the training thread waits for it."""

Work = Callable[[], bool]
"""Something to run while there are no jobs: does one short piece, and returns whether there was one."""


class WorkerError(RuntimeError):
    """A job failed in the worker; its exception is the cause."""


class Worker:
    """A daemon thread that runs jobs in order, and `idle` while there are none; it sleeps where that does nothing.

    Callers call `check_process` before they use it or the device. Its queue and locks are acquired by single calls into
    C, which a signal handler that raises cannot leave half done; methods of `threading.Thread` can be, so signals are
    deferred around them.
    """

    def __init__(self, idle: Work) -> None:
        self._idle = idle
        self._error: BaseException | None = None
        self._process = os.getpid()
        self._calls: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._is_closed = self._is_abandoned = self._has_ended = False
        self._submitted = self._finished = 0  # jobs; each is counted by one thread
        self._is_awaited = False
        self._start()

    def _start(self) -> None:
        """Start the thread, which workers of tests do without."""
        self._thread = threading.Thread(target=self._loop, name="superadam-worker", daemon=True)
        with THIS_THREAD.deferred_signals:
            try:
                self._thread.start()
            except RuntimeError as error:
                raise RuntimeError(
                    f"the scheduler's worker has no thread ({error}), expected one more in this process; allow it more "
                    "threads (ulimit -u, pids.max of its control group) or memory, or train without a scheduler"
                ) from error
            atexit.register(self._end_with_interpreter)  # which would kill the thread inside C++, and abort

    @property
    def is_here(self) -> bool:
        """Whether this is no forked process, which lacks the thread and must not use the device."""
        return os.getpid() == self._process

    def check_process(self) -> None:
        """Raise RuntimeError unless the worker is of this process."""
        if not self.is_here:
            raise RuntimeError(
                "the scheduler's worker belongs to the process that this one was forked from; close() the scheduler "
                "before forking a process that trains on or saves, and make a new one there"
            )

    def submit(self, job: Job) -> None:
        """Add a job; discarded if an earlier one failed or the interpreter ends. Raises RuntimeError when closed."""
        if self._is_abandoned:  # handlers of programs may still make a step, or close the scheduler
            return
        if self._is_closed:
            raise RuntimeError("the scheduler's worker is closed; make a new OffloadScheduler")
        if not self._has_ended:
            self._calls.put(functools.partial(self._finish, job))
        self._submitted += 1

    @property
    def is_idle(self) -> bool:
        """Whether every submitted job is done."""
        return self._finished >= self._submitted

    def drain(self) -> None:
        """Wait for every submitted job; raises WorkerError where one failed."""
        self._is_awaited = True
        try:
            self._wait()
        finally:
            self._is_awaited = False
        if self._has_ended and not self.is_idle:
            self._error = self._error or RuntimeError("its thread has ended; make a new OffloadScheduler")
            self._finished = self._submitted
        self._raise_error()

    def _raise_error(self) -> None:
        if self._error is not None:
            error, self._error = self._error, None
            raise WorkerError(
                f"the scheduler's worker failed with {type(error).__name__}: {error}; nothing was changed, and the "
                "gradients are in .grad, so call step() again to make the step without it, or stop and mend the cause"
            ) from error

    def _wait(self) -> None:
        """Return when everything in the queue was run, or the thread has ended."""
        if self._has_ended:
            return
        passed = threading.Lock()
        passed.acquire()
        self._calls.put(passed.release)
        while not self._has_ended and not passed.acquire(timeout=_LOOK_SECONDS):
            self._look()

    def _look(self) -> None:
        """Notice that the thread has ended, however it did, and forget what it was to do."""
        with THIS_THREAD.deferred_signals:
            self._has_ended = not self._thread.is_alive()
        while self._has_ended and not self._calls.empty():
            self._calls.get()

    def wake(self) -> None:
        """Signal that idle work may be available."""
        if not self._has_ended:
            self._calls.put(bool)

    def close(self) -> None:
        """Finish the jobs, then end."""
        self._is_closed = True
        self._calls.put(sys.exit)
        while self._thread is not threading.current_thread() and not self._has_ended:
            with THIS_THREAD.deferred_signals:
                self._thread.join(_LOOK_SECONDS)
            self._look()
        atexit.unregister(self._end_with_interpreter)

    def _end_with_interpreter(self) -> None:
        if self.is_here:  # the running job is finished, others are discarded
            self._is_abandoned = True
            self.close()

    def _run(self, work: Callable[[], object]) -> bool:
        """Run something unless something before it has failed; return whether its result is true."""
        if self._error is not None or self._is_abandoned:
            return False
        try:
            return bool(work())
        except BaseException as error:
            self._error = error
            return False

    def is_awaited(self) -> bool:
        """Whether the training thread waits for the jobs."""
        return self._is_awaited

    def _finish(self, job: Job) -> None:
        self._run(lambda: job(self.is_awaited))
        self._finished += 1

    def _loop(self) -> None:
        may_idle = False
        native.keep_usual_float_mode()  # not that of the thread that started this one, nor its traps
        try:
            while True:
                try:
                    self._calls.get(block=not may_idle)()  # bound to no name: what it holds may be large
                except queue.Empty:
                    may_idle = self._run(self._idle)
                else:
                    may_idle = True
        except SystemExit:
            pass
        except BaseException as error:
            self._error = self._error or error
