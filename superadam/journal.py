"""What is told of a scheduler's work: statistics of its buckets and a trace of its steps.

Owns both. It decides nothing.
"""

from __future__ import annotations

import copy
import time

from superadam.outcome import Statistics, StepOutcome
from superadam.overlap_statistics import OverlapStatistics
from superadam.trace import Trace


class Journal:
    """Statistics and trace, kept up by the scheduler's reports.

    Args:
        counts: of the optimizer, when the scheduler was made.

    Attributes:
        statistics: since the scheduler was made.
        trace: of the last steps.
    """

    def __init__(self, counts: Statistics) -> None:
        self.statistics = OverlapStatistics()
        self.trace = Trace()
        self._counts = copy.copy(counts)
        self._backward_began: float | None = None

    def note_gradient(self) -> None:
        """A gradient was taken; the first one of a step begins its span."""
        self._backward_began = self._backward_began or time.perf_counter()

    def note_bucket(self, elements: int, *, sent: float, arrived: float, is_written: bool) -> None:
        """A bucket was speculated on just now, or only its norm was taken.

        Args:
            elements: of its gradients.
            sent, arrived: seconds of `time.perf_counter()` when it left the model and when the worker had it.
            is_written: whether it was speculated on.
        """
        if not is_written:
            self.statistics.waiting_buckets += 1
        self.trace.add("gradients to host", "download", sent, arrived, elements=elements)
        self._note_work("adam" if is_written else "norm", arrived, elements)

    def note_commit(self, begin: float, elements: int) -> None:
        """Accepted gradients were folded into the state since `begin`, seconds of `time.perf_counter()`."""
        self._note_work("commit", begin, elements)

    def _note_work(self, name: str, begin: float, elements: int) -> None:
        end = time.perf_counter()
        self.statistics.worker_seconds += end - begin
        self.trace.add(name, "worker", begin, end, elements=elements)

    def note_kept(self, elements: int, *, sent: float) -> None:
        """The norm of a bucket that stays on the device has arrived just now."""
        self.statistics.kept_buckets += 1
        self.trace.add("norm to host", "download", sent, time.perf_counter(), elements=elements)

    def note_upload(self, begin: float, elements: int) -> None:
        """New values that left at `begin`, seconds of `time.perf_counter()`, were just seen to have arrived."""
        self.trace.add("parameters to device", "upload", begin, time.perf_counter(), elements=elements)

    def note_wait(self, begin: float) -> None:
        """The training thread has waited for the worker since `begin`, seconds of `time.perf_counter()`."""
        end = time.perf_counter()
        self.statistics.waited_seconds += end - begin
        self.trace.add("wait for worker", "training", begin, end)

    def note_verdict(self, outcome: StepOutcome | None, counts: Statistics) -> None:
        """The open step was concluded.

        Args:
            outcome: what came of it; None where it was dropped.
            counts: of the optimizer, now.
        """
        now = time.perf_counter()
        statistics, before = self.statistics, self._counts
        if counts.respeculated > before.respeculated:
            statistics.respeculated_buckets += statistics.open_buckets
        elif counts.accepted > before.accepted:
            statistics.accepted_buckets += statistics.open_buckets
        else:
            statistics.dropped_buckets += statistics.open_buckets
        self._counts = copy.copy(counts)
        if self._backward_began is not None:
            self.trace.add("backward and step", "training", self._backward_began, now)
            self._backward_began = None
        if outcome is not None:
            self.trace.add(f"verdict: {outcome.kind.value}", "training", now, now, grad_norm=outcome.grad_norm)
