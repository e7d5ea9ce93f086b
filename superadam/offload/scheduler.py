"""`OffloadScheduler`: the optimizer's step, bucket by bucket, while backward still runs.

One step: a gradient that is ready leaves a handle in `.grad` and goes into a bucket (`_gradient_ready`); a full bucket
goes to the host and through the worker, which computes new values for its parameters next to the present ones
(`_send`); `optimizer.step()` waits for that (`_catch_up`), reads every `.grad`, judges, and publishes the new values;
the worker commits accepted gradients in its idle time (`_conclude`). Neither parameters nor state change before the
verdict, which is over the gradients that `.grad` holds then.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from typing import Any, NoReturn, Self

import torch
from torch import Tensor, nn

from superadam.devices import Device, device_for
from superadam.distributed import shards
from superadam.handles.taken_gradient import GradientHolder, HostSum, TakenGradient
from superadam.host import forks
from superadam.host.signals import THIS_THREAD
from superadam.kernels import torch_private
from superadam.kernels.hyperparameters import Hyperparameters
from superadam.kernels.torch_private import check_can_take, is_short_of_memory, missing
from superadam.offload.arguments import check_count, check_device, check_model, check_transfer_dtype, is_one_group
from superadam.offload.buckets import Bucket, Bucketer, Hooks, Marked, ReducedGroups
from superadam.offload.needs import bytes_of_state, needs_of_run
from superadam.offload.pipeline import Pipeline
from superadam.offload.placement import Autotuner, Placement, last_pieces
from superadam.offload.statistics import OverlapStatistics
from superadam.offload.trace import Span, Trace
from superadam.offload.transfers import Transfers
from superadam.optim.adam import SpeculativeCPUAdam
from superadam.optim.arguments import parameters_of
from superadam.optim.binding import hyper_by_row
from superadam.state.parameter import pieces_of
from superadam.state.resident import ResidentStates
from superadam.step.outcome import Applied, StepOutcome, tell
from superadam.step.transaction import Transaction

_logger = logging.getLogger("superadam")
_NOTHING = nullcontext()


def _end(pipeline: Pipeline | None, device: Device | None) -> None:
    if pipeline is not None:
        pipeline.worker.close()
    if device is not None:
        device.close()


class OffloadScheduler(GradientHolder):
    """Runs a `SpeculativeCPUAdam` during backward.

    While the scheduler is at work, gradients are taken as backward computes them, and `optimizer.step()` only validates
    what was computed from them. `.grad` holds a handle that behaves as the gradient, parameters change in `step()`, and
    the bits are those of the optimizer alone; only its `last_outcome` and `statistics` tell more: gradients that others
    scaled down count as clipped. Use it as a context manager, or call `close()`.

    Args:
        optimizer: whose parameters are those of the model, or some of them; it may be in a framework's wrapper.
        model: that is trained.
        bucket_numel: elements that travel and are speculated on together; "auto" takes an eighth of the model, within 1
            Mi and 16 Mi. Larger parameters are cut into pieces.
        gpu_buckets: number of last-ready buckets whose state stays on the model's device, where their steps are made
            with the verdict, from the second step on; the next forward needs them first. "auto" keeps, within the free
            memory, what the CPU would not have finished when backward ends, by the times of the last steps.
        transfer_dtype: dtype in which gradients travel to the host; "auto" keeps theirs. A wider one gives the same
            bits; a narrower one rounds gradients, and norm and step then see the rounded ones, wherever they are made.
            fp64 gradients, and those that are not rounded to the dtype of `.grad`, stay as they are.
        num_threads: CPU threads that speculate while the model computes; more than `superadam.get_num_threads()` count
            as that many. "auto" takes the cores that the model leaves idle: those near the device if it computes
            elsewhere, those that torch does not use if it computes on the CPU. Without any, all work is left to
            `step()`, because during backward it would cost more than it hides.
        device: streams and memory of the model; default is the one that its parameters lie on.

    Attributes:
        statistics: counts of buckets, bytes and seconds since the scheduler was made.
        trace: what happened when, in the last steps.

    Raises:
        ValueError: an argument is out of range, the device cannot keep buckets, or the model has none of the
            optimizer's parameters.
        MemoryError: the host can never hold state, gradients and new values, or the device the state of `gpu_buckets`;
            where the host only seems to have too little, there is a warning.
        TypeError: the optimizer is not a `SpeculativeCPUAdam`, or the model not an `nn.Module`.
        RuntimeError: the model is wrapped in DistributedDataParallel or FSDP1, or is trained by several ranks without
            `fully_shard`, or the optimizer has a scheduler already.

    Whatever is raised, nothing is attached.

    What to set, and why it may be slower than expected: https://github.com/superadam/superadam/blob/main/docs/tuning.md
    """

    def __init__(
        self,
        optimizer: SpeculativeCPUAdam,
        model: nn.Module,
        *,
        bucket_numel: int | str = "auto",
        gpu_buckets: int | str = "auto",
        transfer_dtype: torch.dtype | str = "auto",
        num_threads: int | str = "auto",
        device: Device | None = None,
    ) -> None:
        optimizer = check_model(optimizer, model)
        check_count("bucket_numel", bucket_numel)
        check_count("gpu_buckets", gpu_buckets, least=0)
        check_count("num_threads", num_threads)
        check_transfer_dtype(transfer_dtype)
        check_device(device)
        if missing:
            _logger.warning("nothing overlaps: torch %s lacks %s", torch.__version__, ", ".join(missing))
        self.optimizer, self._binding, self._lock = optimizer, optimizer._binding, optimizer._binding._lock
        self.statistics, self.trace = OverlapStatistics(), Trace()
        counts = optimizer.statistics
        self._counted = counts.displaced, counts.resolve_seconds  # before the present step
        self._backward_began: float | None = None
        self._caught_up = 0.0  # when the last call of _catch_up() returned
        parameters = [*map(shards.local_of, parameters_of(optimizer))]
        self._device = device or device_for(parameters)
        owned_device = self._device if device is None else None
        self._resident = ResidentStates(self._device) if self._device.can_update else None
        total = sum(parameter.numel() for parameter in parameters)
        amsgrad = any(group["amsgrad"] for group in optimizer.param_groups)
        self._autotuner = Autotuner(
            *(self._device, total, gpu_buckets, bucket_numel, transfer_dtype, num_threads),
            bytes_of_state=bytes_of_state(self._binding.storage, amsgrad=amsgrad),
            bytes_of_gradient=max((parameter.itemsize for parameter in parameters), default=0),
        )
        if total > self.placement.bucket_numel and is_one_group(model):
            _logger.warning(
                "the model is one FSDP2 group, whose gradients come after backward, so that nothing overlaps; call "
                "fully_shard() for each layer, too, or give Accelerate TRANSFORMER_BASED_WRAP"
            )
        self._transfers = Transfers(self._device, self.statistics, self.trace, self.placement.transfer_dtype)
        self._transfers.staged_numel = self.placement.bucket_numel
        self._transfers.piece_numel = self.placement.bucket_numel if self.placement.num_threads else None
        round_taken = None if self._transfers.received is None else self._transfers.round_taken
        self._bucketer = Bucketer(self._device, self, self.placement.bucket_numel, round_taken)
        self._hooks = Hooks(self._gradient_ready)
        self._groups: ReducedGroups | None = None  # of DTensors
        self._error: Exception | None = None  # raised in a hook, where it would leave other ranks waiting
        self._hyper: list[Hyperparameters] = []
        self._closed = self._is_end_awaited = False
        self._transaction: Transaction | None = None
        self._pipeline: Pipeline | None = None  # None without a core for it
        self._check_process: Callable[[], object] = bool
        try:
            self._needs = needs_of_run(optimizer, self._device, self.placement)
            self._device.reserve(self._needs)
            with THIS_THREAD.deferred_signals:  # Ctrl-C finds all of it, to end it
                if self.placement.num_threads:
                    self._pipeline = Pipeline(self._transfers, self._autotuner)
                    self._check_process = self._pipeline.worker.check_process
                self._binding.attach(self, optimizer.param_groups)
                if self._pipeline is not None:
                    self._binding._lock.worker = getattr(self._pipeline.worker, "_thread", None)
                # The worker's thread keeps neither optimizer nor scheduler alive: frameworks drop them without closing.
                self._end = forks.finalize(self, _end, self._pipeline, owned_device)
        except BaseException:
            with THIS_THREAD.deferred_signals:
                self._hooks.remove()
                if self._binding.overlap is self:
                    self._binding.detach(optimizer.param_groups)
                _end(self._pipeline, owned_device)
            raise

    # ---- a gradient is ready -----------------------------------------------------------------------------------------

    def _gradient_ready(self, parameter: Tensor) -> None:
        begin = time.perf_counter()
        is_left = self._pipeline is None and self._bucketer.accumulation.sum_dtype is None
        if is_left or self._device.is_capturing():  # a graph's replays write to the gradient's memory, and call no hook
            return
        with self._lock(), _NOTHING if self._groups is None else THIS_THREAD.without_handlers:
            self._check_process()
            self._backward_began = self._backward_began or begin
            try:
                made = self._device.mark_ready(parameter)  # now, on the stream that made it, whenever it is taken
                self._take([(parameter, made)] if self._groups is None else self._groups.add(parameter, made))
                if self._groups is not None and not self._is_end_awaited:
                    self._is_end_awaited = True
                    with suppress(RuntimeError):  # outside of a backward, where something else calls hooks
                        torch_private.call_after_backward(self._backward_ended)
            except Exception as error:
                if self._groups is None:
                    raise
                self._error = self._error or error
            self.statistics.hook_seconds += time.perf_counter() - begin

    def _take(self, parameters: Iterable[Marked]) -> None:
        for parameter, made in parameters:
            for bucket in self._bucketer.add(parameter, made):
                self._send(bucket)

    def _backward_ended(self) -> None:
        """Take the last group, so that programs that change all gradients find them alike."""
        with self._lock(), THIS_THREAD.without_handlers:
            try:
                self._take_waiting()
            except Exception as error:
                self._error = self._error or error

    def _take_waiting(self) -> None:
        self._is_end_awaited = False
        if self._groups is not None:
            self._take(self._groups.rest())

    def _send(self, bucket: Bucket) -> None:
        """Send a bucket; `step()` makes the step of one that cannot be sent, because its gradients are in `.grad`."""
        if self._pipeline is None or self._transaction is None:
            return
        with THIS_THREAD.without_handlers, torch_private.inference_mode(False):
            torch.set_grad_enabled(False)
            try:
                self._hyper = self._hyper or hyper_by_row(self.optimizer.param_groups)
                self._binding.look()
                limit = self.optimizer.max_grad_norm
                if len(self._hyper) == len(self._transaction.table.states):  # or groups were changed since
                    self._pipeline.send(bucket, self._hyper, math.inf if limit is None else limit)
            except Exception as error:
                if not isinstance(error, ValueError) and not is_short_of_memory(error):
                    raise
                _logger.debug("a bucket is left to step(): %s", error)

    # ---- for the optimizer (binding.Overlap) -------------------------------------------------------------------------

    def _follow(self, transaction: Transaction | None) -> None:
        self._transaction = transaction
        if self._pipeline is not None:
            self._pipeline.transaction = transaction
        self._hyper = []
        self._transfers.forget_layouts()
        if transaction is not None:
            self._bucketer.take_from(transaction.table.states)
            self._groups = ReducedGroups() if transaction.table.is_distributed else None
            self._hooks.watch(() if self._closed else transaction.table.parameters)  # which close() may bind again

    def _catch_up(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise error
        begin = time.perf_counter()
        self._check_process()
        self._take_waiting()
        if self._pipeline is not None:
            for bucket in self._bucketer.rest():
                self._send(bucket)
            self.statistics.hook_seconds += time.perf_counter() - begin
            self._pipeline.drain()
        self._caught_up = time.perf_counter()

    def _conclude(self, outcome: StepOutcome, applied: Applied | None) -> None:
        """Tell of a step: each listener by itself, once nothing of the step is left to be read by the next."""
        now, began = time.perf_counter(), self._backward_began
        self._hyper, self._backward_began = [], None
        counts, (displaced, resolve_seconds) = self.optimizer.statistics, self._counted
        self._counted = counts.displaced, counts.resolve_seconds
        if self._pipeline is not None or began is not None:  # else nothing can have been taken
            tell("learning which gradients are the last ones", self._bucketer.end_step)
        tell("tracing", self._trace_step, outcome, began, now)
        if self._device.has_link:
            tell("tracing", self._transfers.trace_arrived)
            tell("looking for the device's memory", self._look_for_room)
        tell("looking for parameters that are no longer frozen", self._hooks.look_for_unfrozen)
        if self._pipeline is not None:
            tell("learning from the verdict", self._pipeline.learn, applied)
            if self._device.can_update:
                update_seconds = counts.resolve_seconds - resolve_seconds
                if tell("choosing the placement", self._autotuner.choose, self._pipeline.awaited_at, update_seconds):
                    tell("choosing the placement", self._apply_placement)
            if counts.displaced > displaced:
                tell("choosing the placement", self._make_room)
            tell("waking the worker", self._pipeline.worker.wake)
        self.statistics.step_seconds += time.perf_counter() - self._caught_up

    def _trace_step(self, outcome: StepOutcome | None, began: float | None, now: float) -> None:
        """Trace a step whose backward began then, if that is known; without an outcome where it was dropped."""
        if began is not None:
            self.trace.add(Span("backward and step", "training", began, now))
        if outcome is not None:
            self.trace.add(
                Span(f"verdict: {outcome.kind.value}", "training", now, now, {"grad_norm": outcome.grad_norm})
            )

    def _look_for_room(self) -> None:
        """Reserve memory of the host for new values that the device turns out to have no memory for."""
        waiting = self._transfers.bytes_without_room()
        if waiting:
            with suppress(MemoryError):  # then they wait in pageable memory
                shadows = max(self._needs.shadows, waiting)
                self._device.reserve(replace(self._needs, shadows=shadows, present=self._needs.total))

    # ---- for gradients that were taken (taken_gradient.GradientHolder) -----------------------------------------------

    def _nonfinite_of(self, taken: TakenGradient) -> int | None:
        with self._lock():
            self._catch_up()
            return None if self._transaction is None else self._transaction.nonfinite_of(taken)

    def _norm_was_asked(self, taken: TakenGradient) -> None:
        self._transfers.computes_norms = self._device.has_link

    def _adds(self, total: HostSum, taken: TakenGradient, new: Tensor) -> bool:
        with self._lock():
            return self._pipeline is not None and not self._closed and self._pipeline.add(total, taken.owner(), new)

    def _was_given_back(self, taken: TakenGradient) -> None:
        self.statistics.given_back_gradients += self._bucketer.forget(taken)

    # ---- placement ---------------------------------------------------------------------------------------------------

    @property
    def placement(self) -> Placement:
        """Where and how steps are made at present."""
        return self._autotuner.placement

    def place(
        self, *, gpu_buckets: int | None = None, bucket_numel: int | None = None, num_threads: int | None = None
    ) -> None:
        """Change the placement from the next gradient on, instead of what "auto" would choose; the bits stay the same.

        Args:
            gpu_buckets, bucket_numel, num_threads: as for the constructor; None for no change.

        Raises:
            ValueError: an argument is out of range, or cannot be met; nothing was changed.
            MemoryError: the device cannot hold the state of this many buckets; nothing was changed.
            RuntimeError: the scheduler was closed.
        """
        asked = {"gpu_buckets": gpu_buckets, "bucket_numel": bucket_numel, "num_threads": num_threads}
        changes: dict[str, Any] = {name: value for name, value in asked.items() if value is not None}
        for name, value in changes.items():
            check_count(name, value, least=0 if name == "gpu_buckets" else 1, may_be_auto=False)
        with self._lock():
            self._check_open()
            self._catch_up()
            self._autotuner.place(replace(self.placement, **changes), stays_automatic=gpu_buckets is None)
            self._apply_placement()

    def _apply_placement(self) -> None:
        states = [] if self._transaction is None else self._transaction.table.states
        distant = pieces_of(state for state in states if not self._device.is_host(state.local))
        resident = {*distant}.intersection(last_pieces(self._autotuner.order, self.placement))
        self._bucketer.bucket_numel, self._bucketer.resident = self.placement.bucket_numel, frozenset(resident)
        travelling = [piece for piece in self._autotuner.order if piece not in resident]
        self._bucketer.last = travelling[-1] if travelling and resident else None
        self._transfers.staged_numel = self.placement.bucket_numel
        if self._transaction is not None:
            self._transaction.table.bring_home(piece for piece in pieces_of(states) if piece not in resident)

    def _make_room(self) -> None:
        before = self.placement.gpu_buckets
        self._autotuner.shrink()
        _logger.warning(
            "the device has no memory left for the state of %d buckets, so their step was made on the host, and %d are "
            "resident from now on; free some, or set gpu_buckets",
            before,
            self.placement.gpu_buckets,
        )
        self._apply_placement()

    # ---- for the user ------------------------------------------------------------------------------------------------

    @contextmanager
    def accumulate(self, dtype: torch.dtype | None = None) -> Iterator[None]:
        """Declare that the backwards inside are not the last ones of their step, so that no speculation is wasted.

        This is optional unless `transfer_dtype` rounds: autograd adds to gradients that were taken as to any other, and
        the scheduler learns how many backwards make a step.

        Args:
            dtype: None adds in `.grad`, in its dtype, as autograd does; torch.float32 keeps the sum on the host, in
                fp32 (fp64 for fp64 parameters), and adds the gradients of the last backward, outside, there, too.

        Raises:
            ValueError: another dtype.
            RuntimeError: this torch lacks what sums on the host need, or the scheduler was closed.
        """
        self._check_open()
        if dtype is not None:
            check_can_take(parameters_of(self.optimizer), "accumulate() got torch.float32")
        with self._lock():
            self._take_waiting()
        with self._bucketer.accumulation.accumulate(dtype):
            yield
            with self._lock():
                self._take_waiting()

    def synchronize(self) -> None:
        """Return when nothing is under way: buckets speculated on, accepted steps committed, values published."""
        with self._lock():
            self._catch_up()
            self.optimizer.commit()
            self._transfers.settle()

    def export_trace(self, path: str | os.PathLike[str]) -> None:
        """Write the last steps as a Chrome trace, for chrome://tracing or ui.perfetto.dev.

        Unawaited uploads end when they are first seen complete.
        """
        self._check_process()
        self._transfers.trace_arrived()
        self.trace.write(path)

    def close(self) -> None:
        """Finish what is under way, give gradients back, and leave model and optimizer as without a scheduler."""
        with self._lock():
            if self._closed and self._binding.overlap is not self:  # else an error or Ctrl-C has ended an earlier call
                self._finish()
                return
            self._check_process()
            self._closed = True
            self._hooks.remove()
            try:
                self.optimizer.rollback()
            except BaseException:  # as of the worker, which is told once, before anything is rolled back, or Ctrl-C
                self.optimizer.rollback()
                raise
            finally:
                tell("tracing", self._trace_step, None, self._backward_began, time.perf_counter())
                self._binding.detach(self.optimizer.param_groups)
                self._bucketer.take_from(())  # for hooks that have waited
                self._finish()

    def _finish(self) -> None:
        """End worker and device once; what an error or Ctrl-C ends is left to the next call."""
        if (found := self._end.peek()) is not None:
            _, end, arguments, _ = found
            end(*arguments)
            self._end.detach()

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "an OffloadScheduler cannot be copied or pickled, because its worker belongs to one process; copy the "
            "optimizer and the model, and make a scheduler for the copies"
        )

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("the scheduler was closed, expected an open one; make another OffloadScheduler")

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"{self.statistics.hidden_share:.0%} hidden"
        return f"{type(self).__name__}({state}, {self.placement})"

    def __enter__(self) -> Self:
        self._check_open()
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None or self._pipeline is None or self._pipeline.worker.is_here:
            self.close()  # not where a forked process ends, as by sys.exit()
