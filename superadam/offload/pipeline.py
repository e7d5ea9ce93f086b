"""The path of a bucket: to the host, through the worker, and its new parameters back."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from superadam.devices import Event, Stream
from superadam.devices.worker import Worker
from superadam.handles.taken_gradient import HostSum
from superadam.host.signals import THIS_THREAD
from superadam.kernels import native
from superadam.kernels.hyperparameters import Hyperparameters
from superadam.kernels.torch_private import MayLackMemory
from superadam.offload.buckets import Bucket
from superadam.offload.placement import Autotuner, Work
from superadam.offload.prediction import Predictor
from superadam.offload.trace import Span
from superadam.offload.transfers import Transfers, norm_in
from superadam.state.parameter import ParameterState, Pending, Phase, Piece
from superadam.step.outcome import Applied, tell
from superadam.step.transaction import Transaction


class Pipeline:
    """Runs buckets through one worker, in order.

    The autotuner says on how many cores, and receives the times of each bucket.

    Attributes:
        transaction: changes only while nothing is under way.
        awaited_at: when the training thread last began to wait for the worker, by `time.perf_counter()`; inf if it has
            not since the last bucket, without which backward had not ended.
        worker: idle, it commits accepted gradients.
    """

    def __init__(self, transfers: Transfers, autotuner: Autotuner) -> None:
        self.transaction: Transaction | None = None
        self.awaited_at = math.inf
        self.predictor = Predictor()
        self._transfers, self._autotuner = transfers, autotuner
        self._device, self._statistics, self._trace = transfers.device, transfers.statistics, transfers.trace
        self.worker: Worker = self._device.start_worker(self._idle)

    def send(self, bucket: Bucket, hyper: Sequence[Hyperparameters], limit: float) -> None:
        """Start a bucket's copy to the host, or only its norm's where it is resident, and hand it to the worker.

        `hyper` holds the present hyper-parameters of all parameters, by row; `limit` is that of the norm, inf for none.
        """
        transaction = self.transaction
        assert transaction is not None
        begin, gradients, self.awaited_at = time.perf_counter(), bucket.gradients, math.inf
        for event in bucket.made:
            self._device.wait(Stream.CURRENT, event)
        if self._device.can_update:
            tell("counting buckets for the placement", self._autotuner.add_bucket, bucket)
        if bucket.is_resident:
            pending, arrived, norm = self._transfers.pack_resident(gradients, hyper)
            job = functools.partial(self._add_resident, transaction, pending, arrived, norm, begin)
        else:
            transaction.table.bring_home(gradients)
            able = transaction.able_to_speculate(gradients, hyper)
            pending, arrived = self._transfers.download(gradients, hyper, {*able})
            known = limit if transaction.ranks is None else None  # else it is for the gradients of all ranks
            job = functools.partial(self._speculate, transaction, pending, bucket.numel, known, arrived, begin)
        self._statistics.buckets += 1
        self.worker.submit(job)

    def add(self, total: HostSum, state: ParameterState | None, gradient: Tensor) -> bool:
        """Let the worker add a gradient on the device to a sum on the host; return whether it can."""
        is_sent = self._device.has_link and self._device.is_host(total.total) and not self._device.is_host(gradient)
        if state is None or not is_sent:
            return False
        sent = None
        with THIS_THREAD.without_handlers, MayLackMemory():
            sent = self._transfers.send_one(state, gradient)
        if sent is None:
            return False
        total.add(*sent)
        self.worker.submit(functools.partial(self._wait_for, total))
        return True

    def _add_resident(
        self,
        transaction: Transaction,
        pending: Mapping[Piece, Pending],
        arrived: Event,
        norm: Tensor,
        sent_at: float,
        is_awaited: Callable[[], bool],
    ) -> None:
        self._wait_for(arrived, is_awaited)
        seen = transaction.norm_so_far()
        transaction.speculate(pending, norm=norm_in(norm))
        elements, end = sum(piece.shape.numel() for piece in pending), time.perf_counter()
        self.predictor.total = transaction.table.numel
        tell("predicting factors", self.predictor.add_arrived, elements, seen)
        self._statistics.resident_buckets += 1
        tell("timing work for the placement", self._autotuner.add_work, Work(elements, end, is_resident=True))
        tell("tracing", self._trace.add, Span("norm to host", "download", sent_at, end, {"elements": elements}))

    def _speculate(
        self,
        transaction: Transaction,
        pending: Mapping[Piece, Pending],
        elements: int,
        limit: float | None,
        arrived: Event,
        sent_at: float,
        is_awaited: Callable[[], bool],
    ) -> None:
        """Speculate on a bucket, which starts the upload of its new values; runs in the worker."""
        self._wait_for(arrived, is_awaited)
        begin, has_state = time.perf_counter(), any(piece.state.has_state for piece in pending)
        self.predictor.total = transaction.table.numel
        prediction = self.predictor.predict(elements, transaction.norm_so_far(), transaction.expected_scale, limit)
        for piece, record in pending.items():
            if prediction is None or self.predictor.leaves_out(piece, prediction, transaction.expected_scale):
                record.slot = None
        written = dict.fromkeys(record.slot.shadow for record in pending.values() if record.slot is not None)
        is_hidden = not is_awaited()
        with transaction.lock, torch.no_grad():
            transaction.speculate(pending, self._num_threads() if is_hidden else None, prediction=prediction)
            listed = {piece: record.listed for piece, record in pending.items() if record.listed is not None}
        if prediction is not None and prediction.interval is not None:
            tell("learning how much is uncertain", self.predictor.add_lists, listed, prediction)
            self._statistics.interval_elements += sum(piece.shape.numel() for piece in listed)
            self._statistics.uncertain_elements += sum(uncertain.count for uncertain in listed.values())
            span = Span("predicted factor", "worker", begin, begin, {"factor": prediction.factor})
            tell("tracing", self._trace.add, span)
        for shadow in written:
            shadow.send()
        self._statistics.waiting_buckets += not written
        tell("tracing", self._trace.add, Span("gradients to host", "download", sent_at, begin, {"elements": elements}))
        self._tell_of_work("adam" if written else "norm", begin, elements)
        if has_state and self._device.can_update:  # else the step will create state, which says little of later ones
            end = time.perf_counter()
            work = Work(elements, end, end - begin, is_hidden, waits=not written)
            tell("timing work for the placement", self._autotuner.add_work, work)

    def _wait_for(self, arrived: Event, is_awaited: Callable[[], bool]) -> None:
        """Wait for a copy, and commit meanwhile: the host may have enqueued this bucket long before backward."""
        while not is_awaited() and not arrived.query() and self._idle():
            pass
        arrived.synchronize()

    def _num_threads(self) -> int:
        return min(self._autotuner.placement.num_threads, native.get_num_threads())

    def _idle(self) -> bool:
        """Commit a bucket's worth of accepted gradients, in the worker while no bucket waits; return if any were."""
        transaction = self.transaction
        if transaction is None or not transaction.in_phase(Phase.ACCEPTED):
            return False
        begin = time.perf_counter()
        elements = transaction.commit(self._autotuner.placement.bucket_numel, self._num_threads())
        self._tell_of_work("commit", begin, elements)
        return elements > 0

    def _tell_of_work(self, name: str, begin: float, elements: int) -> None:
        end = time.perf_counter()
        self._statistics.worker_seconds += end - begin
        tell("tracing", self._trace.add, Span(name, "worker", begin, end, {"elements": elements}))

    def learn(self, applied: Applied | None) -> None:
        """Learn from a step what to predict for the next; a predictor that fails is replaced by a new one."""
        try:
            self.predictor.add_verdict(applied)
        except BaseException:
            self.predictor = Predictor()
            raise

    def drain(self) -> None:
        """Return when the worker is done with every bucket.

        Raises WorkerError if it failed; work that was queued behind the failure is discarded.
        """
        if self.worker.is_idle:
            self.worker.drain()  # raises if it failed
            return
        if self._device.has_link:
            self._device.record(Stream.CURRENT).synchronize()  # until then, the worker's time is hidden
        self.awaited_at = begin = time.perf_counter()
        self.worker.drain()
        end = time.perf_counter()
        self._statistics.waited_seconds += end - begin
        tell("tracing", self._trace.add, Span("wait for worker", "training", begin, end))
