"""The way of a bucket: to the host, through the worker, and its new parameters back.

Owns the worker, what it does with a bucket and when, and what it does while there is none. Which gradients make a
bucket is decided before it, and what becomes of the step after it.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass

import torch

from superadam import native
from superadam.arrivals import Arrivals
from superadam.buckets import Bucket
from superadam.devices import Device, Event, Stream
from superadam.governor import Governor
from superadam.hyperparameters import Hyperparameters
from superadam.journal import Journal
from superadam.parameter import ParameterState, Phase
from superadam.placement import BucketTimes, Placement
from superadam.placer import Placer
from superadam.transaction import Transaction
from superadam.transfers import Held, Transfers
from superadam.worker import DeferredWorker, Worker, WorkerError


@dataclass(frozen=True, slots=True)
class _Sent:
    """What the worker is told of a bucket beside its gradients.

    Attributes:
        at: seconds of `time.perf_counter()`.
        handing_seconds: that sending it took.
        arrived: after which the gradients may be read.
        placement: how it is to be treated.
        unscale: factor that undoes loss scaling.
    """

    at: float
    handing_seconds: float
    arrived: Event
    placement: Placement
    unscale: float


class Pipeline:
    """Runs buckets through one worker, in order.

    Args:
        device: of the model.
        transfers: over it.
        placer: says how a bucket is treated, and is told how long it took.
        journal: is told what happened.
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
        journal: Journal,
        limit: Callable[[], float | None],
    ) -> None:
        self.transaction: Transaction | None = None
        self.governor = Governor()
        self._device = device
        self._transfers = transfers
        self._placer = placer
        self._journal = journal
        self._limit = limit
        self._is_waited_for = False
        self._worker: Worker = device.start_worker(self._idle) if placer.placement.cores else DeferredWorker()

    def send(self, bucket: Bucket, hyper: Mapping[ParameterState, Hyperparameters], unscale: float) -> None:
        """Start a bucket's way to the host, or only its norm's where it stays, and hand it to the worker.

        Args:
            bucket: of gradients on the device or on the host.
            hyper: present hyper-parameters of its parameters.
            unscale: factor that undoes loss scaling.

        Raises:
            TypeError, ValueError: a gradient does not fit its parameter.
            WorkerError: an earlier bucket failed.
        """
        assert self.transaction is not None
        begin = time.perf_counter()
        placement = self._placer.begin_bucket(bucket)
        self._journal.statistics.buckets += 1

        def arrivals(states: list[ParameterState], gradients: list[torch.Tensor]) -> Arrivals:
            return Arrivals(states, gradients, [(hyper[state], 1) for state in states])

        if bucket.is_kept:
            held = self._transfers.hold(bucket.states, bucket.gradients)
            kept = arrivals(held.states, held.gradients)
            self._worker.submit(functools.partial(self._keep, self.transaction, kept, held, unscale, begin))
            return
        # From now on parameters may be overwritten: whoever still needs old values in this backward must notice.
        self.transaction.table.announce(bucket.states)
        widens = placement.link_dtype != self._placer.placement.link_dtype
        hosts, arrived = self._transfers.download(bucket.states, bucket.gradients, widens=widens)
        sent = _Sent(begin, time.perf_counter() - begin, arrived, placement, unscale)
        self._worker.submit(functools.partial(self._speculate, self.transaction, arrivals(bucket.states, hosts), sent))

    def _keep(self, transaction: Transaction, arrivals: Arrivals, held: Held, unscale: float, sent: float) -> None:
        """Take the norm of a bucket that stays on the device; runs in the worker."""
        held.arrived.synchronize()
        transaction.keep(arrivals, held.norm(), unscale)
        self._journal.note_kept(arrivals.numel, sent=sent)

    def _speculate(self, transaction: Transaction, arrivals: Arrivals, sent: _Sent) -> None:
        """Speculate on a bucket, which starts its parameters' way back; runs in the worker."""
        sent.arrived.synchronize()
        begin = time.perf_counter()
        cores = sent.placement.cores
        writes = cores > 0 and self.governor.speculates(transaction.norm_so_far() * sent.unscale, self._limit())
        cores = 0 if self._is_waited_for else cores
        with torch.no_grad(), self._transfers.following_download(), native.limited_threads(cores or None):
            transaction.speculate(arrivals, sent.unscale, writes=writes)
        self._journal.note_bucket(arrivals.numel, sent=sent.at, arrived=begin, is_written=writes)
        if writes:
            self._placer.note_times(
                BucketTimes(
                    elements=arrivals.numel,
                    gradient_bytes=arrivals.gradients[0].element_size(),
                    is_widened=sent.placement.link_dtype != self._placer.placement.link_dtype,
                    cores=cores,
                    ready=sent.arrived.passed_at(),
                    worker_seconds=time.perf_counter() - begin,
                    handing_seconds=sent.handing_seconds,
                )
            )

    def _idle(self) -> bool:
        """Commit a bucket's worth of accepted gradients; runs in the worker while nothing else waits."""
        transaction = self.transaction
        if transaction is None or not transaction.in_phase(Phase.ACCEPTED):
            return False
        begin, placement = time.perf_counter(), self._placer.placement
        with native.limited_threads(placement.cores):
            elements = transaction.commit_some(placement.bucket_numel)
        self._journal.note_commit(begin, elements)
        return True

    def drain(self) -> None:
        """Return when the worker is done with every bucket.

        Raises:
            WorkerError: it failed; what was behind the failure is discarded.
        """
        if self._worker.is_idle:
            self._worker.drain()  # tells what went wrong
            return
        if self._placer.placement.cores:
            self._device.record(Stream.CURRENT).synchronize()  # until then, the worker hides behind the model
        begin = time.perf_counter()
        self._is_waited_for = True
        try:
            self._worker.drain()
        finally:
            self._is_waited_for = False
        self._journal.note_wait(begin)

    def abandon(self) -> None:
        """Return when the worker does nothing, whatever went wrong, and take back what it speculated."""
        with suppress(WorkerError):
            self._worker.drain()
        if self.transaction is not None:
            with torch.no_grad():
                self.transaction.roll_back()

    def wake(self) -> None:
        """Let the worker commit what is accepted."""
        self._worker.wake()

    def close(self) -> None:
        """Finish what is under way, and end the worker."""
        self._worker.close()
