"""The way of a bucket: to the host, through the worker, and its new parameters back.

Owns the worker, what it does with a bucket and when, and what it does while there is none. Which gradients make a
bucket is decided before it, and what becomes of the step after it.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace

import torch

from superadam.devices import Device, Event, Stream
from superadam.devices.worker import Worker, WorkerError
from superadam.kernels import native
from superadam.kernels.hyperparameters import Hyperparameters
from superadam.offload.autotune import Placer
from superadam.offload.buckets import Bucket
from superadam.offload.governor import Governor
from superadam.offload.placement import BucketTimes
from superadam.offload.statistics import OverlapStatistics
from superadam.offload.trace import Trace
from superadam.offload.transfers import FlatShadow, Transfers, norm_in
from superadam.state.parameter import ParameterState, Pending, Phase
from superadam.step.transaction import Transaction


class Pipeline:
    """Runs buckets through one worker, in order.

    Args:
        device: of the model.
        transfers: over it.
        placer: says on how many cores, and is told how long each bucket took.
        statistics, trace: get what happened.
        limit: returns the present limit of the gradient norm.

    Attributes:
        transaction: over the present parameters; changed only while nothing is under way.
        governor: says whether to speculate.
    """

    def __init__(
        self,
        device: Device,
        transfers: Transfers,
        placer: Placer,
        statistics: OverlapStatistics,
        trace: Trace,
        limit: Callable[[], float | None],
    ) -> None:
        self.transaction: Transaction | None = None
        self.governor = Governor()
        self._device = device
        self._transfers = transfers
        self._placer = placer
        self._statistics, self._trace = statistics, trace
        self._limit = limit
        self._is_waited_for = False
        self._worker: Worker = device.start_worker(self._idle)

    def send(self, bucket: Bucket, hyper: Mapping[ParameterState, Hyperparameters]) -> None:
        """Start a bucket's way to the host, or only its norm's where it stays, and hand it to the worker.

        Args:
            bucket: of gradients on the device or on the host.
            hyper: present hyper-parameters of its parameters.
        """
        transaction = self.transaction
        assert transaction is not None
        begin, states = time.perf_counter(), bucket.states
        self._placer.note_bucket(bucket)
        if bucket.is_kept:
            ordered, arrived, norms = self._transfers.hold(states, bucket.gradients)
            kept = {s: transaction.pending(s, one, hyper[s], is_kept=True) for s, one in ordered.items()}
            job = functools.partial(self._keep, transaction, kept, arrived, norms, begin)
        else:
            transaction.table.bring_home(transaction.table.rows_of(states))
            able = {state for state in states if transaction.can_speculate(state, hyper[state])}
            places, arrived = self._transfers.download(states, bucket.gradients, able)
            pending = {
                state: transaction.pending(state, taken, hyper[state], places.get(state))
                for state, taken in zip(states, bucket.gradients, strict=True)
            }
            job = functools.partial(self._speculate, transaction, pending, arrived, begin)
        self._statistics.buckets += 1
        self._worker.submit(job)

    def _keep(
        self,
        transaction: Transaction,
        pending: Mapping[ParameterState, Pending],
        arrived: Event,
        norms: list[torch.Tensor],
        sent: float,
    ) -> None:
        """Take the norm of a bucket that stays on the device; runs in the worker."""
        arrived.synchronize()
        transaction.keep(pending, norm_in(norms))
        self._statistics.kept_buckets += 1
        self._trace.add("norm to host", "download", sent, time.perf_counter(), elements=_numel(pending))

    def _speculate(
        self, transaction: Transaction, pending: Mapping[ParameterState, Pending], arrived: Event, sent: float
    ) -> None:
        """Speculate on a bucket, which starts its new values' way to the device; runs in the worker."""
        arrived.synchronize()
        begin = time.perf_counter()
        if not self.governor.speculates(transaction.norm_so_far(), self._limit()):
            pending = {state: replace(record, place=None) for state, record in pending.items()}
        num_threads = 0 if self._is_waited_for else self._placer.placement.num_threads
        with torch.no_grad(), native.limited_threads(num_threads or None):
            transaction.speculate(pending)
        written = {id(one.place.shadow): one.place.shadow for one in pending.values() if one.place is not None}
        for shadow in written.values():
            assert isinstance(shadow, FlatShadow)
            shadow.send()
        self._statistics.waiting_buckets += not written
        self._trace.add("gradients to host", "download", sent, begin, elements=_numel(pending))
        self._note_work("adam" if written else "norm", begin, _numel(pending))
        if written:
            seconds, ready = time.perf_counter() - begin, arrived.passed_at()
            self._placer.note_times(BucketTimes(_numel(pending), ready, seconds, is_hidden=num_threads > 0))

    def _idle(self) -> bool:
        """Commit a bucket's worth of accepted gradients; runs in the worker while nothing else waits."""
        transaction = self.transaction
        if transaction is None or not transaction.in_phase(Phase.ACCEPTED):
            return False
        begin, placement = time.perf_counter(), self._placer.placement
        with native.limited_threads(placement.num_threads):
            elements = transaction.commit_some(placement.bucket_numel)
        self._note_work("commit", begin, elements)
        return True

    def _note_work(self, name: str, begin: float, elements: int) -> None:
        end = time.perf_counter()
        self._statistics.worker_seconds += end - begin
        self._trace.add(name, "worker", begin, end, elements=elements)

    def drain(self) -> None:
        """Return when the worker is done with every bucket.

        Raises:
            WorkerError: it failed; what was behind the failure is discarded.
        """
        if self._worker.is_idle:
            self._worker.drain()  # tells what went wrong
            return
        self._device.record(Stream.CURRENT).synchronize()  # until then, the worker hides behind the model
        begin = time.perf_counter()
        self._is_waited_for = True
        try:
            self._worker.drain()
        finally:
            self._is_waited_for = False
        end = time.perf_counter()
        self._statistics.waited_seconds += end - begin
        self._trace.add("wait for worker", "training", begin, end)

    def abandon(self) -> None:
        """Return when the worker does nothing, whatever went wrong, and forget what it speculated."""
        with suppress(WorkerError):
            self._worker.drain()
        if self.transaction is not None:
            self.transaction.drop()

    def wake(self) -> None:
        """Let the worker commit what is accepted."""
        self._worker.wake()

    def close(self) -> None:
        """Finish what is under way, and end the worker."""
        self._worker.close()


def _numel(states: Iterable[ParameterState]) -> int:
    return sum(state.shape.numel() for state in states)
