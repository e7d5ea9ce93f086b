"""`OffloadScheduler`: the optimizer's step, bucket by bucket, while backward still runs.

The story of one step: a gradient is ready and goes into a bucket (`gradient_ready`); a full bucket goes its way, on
which the worker speculates on it (`_send`); `optimizer.step()` waits for that (`catch_up`), judges, and lets the
model's stream wait for the new parameters (`conclude`); in the worker's idle time accepted gradients are committed.

Owns the order of these things. Arithmetic and verdicts are the optimizer's, streams and copies those of `Transfers`,
`Pipeline` runs the worker, and `ModelWatch` sees to it that nobody reads a parameter of an open step.
"""

from __future__ import annotations

import logging
import os
import time
from contextlib import AbstractContextManager
from dataclasses import replace
from types import TracebackType
from typing import Self

import torch
from torch import Tensor, nn

from superadam.admission import check_count, check_link_dtype, check_model, check_overlap, check_scaler
from superadam.buckets import Bucket
from superadam.devices import Device, device_for
from superadam.grad_scaler import GradScaler
from superadam.hyperparameters import Hyperparameters
from superadam.intake import Intake
from superadam.journal import Journal
from superadam.optimizer import SpeculativeCPUAdam
from superadam.outcome import StepOutcome
from superadam.overlap_statistics import OverlapStatistics
from superadam.parameter import ParameterState
from superadam.pipeline import Pipeline
from superadam.placement import Placement, last_parameters
from superadam.placer import Placer
from superadam.residence import Residence
from superadam.trace import Trace
from superadam.transaction import Transaction
from superadam.transfers import Transfers
from superadam.watch import REMEDY, ModelWatch, present_backward

_logger = logging.getLogger("superadam")


class OffloadScheduler:
    """Runs a `SpeculativeCPUAdam` during backward.

    While the scheduler is at work, gradients are taken as backward makes them (`.grad` is None afterwards), and
    `optimizer.step()` only validates what was speculated. The bits are those of the optimizer alone. Use it as a
    context manager, or call `close()`.

    A graph that needs a parameter's old value after its gradient is complete is refused, by us or by autograd
    ("modified by an inplace operation"); the error tells what to do. Nobody can notice a value that is read past
    autograd: through `p.data`, or detached by a checkpointed function that calls no module. For such models use
    overlap=False. Post-accumulate-grad hooks that were registered after the scheduler was made find `.grad` None.

    Args:
        optimizer: with an explicit `max_grad_norm`, `math.inf` for none: code that clips afterwards would find no
            gradients.
        model: every forward of it is watched, so that none reads parameters whose step has no verdict yet.
        bucket_numel: elements that travel and are speculated on together; "auto" takes an eighth of the model, within
            1 Mi and 16 Mi, or less where first steps show that smaller buckets cost nothing. A parameter is never cut.
        gpu_buckets: so many of the last buckets to become ready keep their state on the model's device, and are stepped
            there with the verdict, from the second step on; they are the first that the next forward needs. "auto"
            keeps, within the free memory, what the CPU was not done with in the first steps when backward ended.
        link_dtype: dtype in which gradients travel to the host; "auto" keeps theirs, or widens them to fp32 where first
            steps show that to be faster. A wider one gives the same bits; a narrower one rounds gradients, and norm and
            step then see the rounded ones, wherever they are made. fp64 gradients stay fp64.
        cores: CPU threads that speculate while the model computes, at most `superadam.get_num_threads()`. "auto" takes
            the cores that the model leaves idle: those near the device if it computes elsewhere, those that torch does
            not use if it computes on the CPU, or half of them where first steps show that to be enough. Without any,
            the work waits for `step()`, because beside backward it would cost more than it hides.
        overlap_forward: let each block (element of an `nn.ModuleList` or `nn.Sequential`) wait for its own parameters
            in its next forward, instead of all in `step()`. Whoever reads parameters otherwise than in such a forward,
            through the model's `state_dict()` or through the optimizer calls `synchronize()` first.
        grad_scaler: a `superadam.GradScaler`, for loss scaling.
        overlap: False leaves everything to `optimizer.step()`: for models that reuse parameters in ways that forbid
            writing them during backward.
        device: streams and memory of the model; default is the one that its parameters lie on.

    Attributes:
        statistics: counts of buckets, bytes and seconds since the scheduler was made.
        trace: what happened when, in the last steps.
        delivery, residence: for the optimizer.

    Raises:
        ValueError: no explicit `max_grad_norm`, an argument is out of range, or the device cannot keep buckets.
        MemoryError: the host cannot hold the gradients of a step, or the device the state of `gpu_buckets`.
        TypeError: the optimizer is not a `SpeculativeCPUAdam`, or the model no `nn.Module`.
        RuntimeError: the model is wrapped in DistributedDataParallel, or is trained by several ranks without DTensors,
            or the optimizer has a scheduler already.
    """

    def __init__(
        self,
        optimizer: SpeculativeCPUAdam,
        model: nn.Module,
        *,
        bucket_numel: int | str = "auto",
        gpu_buckets: int | str = "auto",
        link_dtype: torch.dtype | str = "auto",
        cores: int | str = "auto",
        overlap_forward: bool = False,
        grad_scaler: GradScaler | None = None,
        overlap: bool = True,
        device: Device | None = None,
    ) -> None:
        check_model(optimizer, model)
        check_count("bucket_numel", bucket_numel)
        check_count("gpu_buckets", gpu_buckets, least=0)
        check_count("cores", cores)
        check_link_dtype(link_dtype)
        check_overlap(overlap, overlap_forward=overlap_forward)
        check_scaler(grad_scaler)
        self.optimizer = optimizer
        self.model = model
        self._journal = Journal(optimizer.statistics.respeculated)
        self.statistics: OverlapStatistics = self._journal.statistics
        self.trace: Trace = self._journal.trace
        self._scaler = grad_scaler
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        self._device = device or device_for(parameters)
        self._owns_device = device is None
        total = sum(parameter.numel() for parameter in parameters)
        self._placer = Placer(self._device, total, gpu_buckets, bucket_numel, link_dtype, cores)
        self._transfers = self.delivery = Transfers(self._device, self._journal, self.placement.link_dtype)
        self.residence = Residence(self._device)
        self._watch = ModelWatch(model, self)
        self._hyper: dict[ParameterState, Hyperparameters] = {}
        self._bound_in: int | None = None  # backward in which the optimizer was asked for its parameters last
        self._overlaps = overlap
        self._overlaps_forward = overlap_forward
        self._closed = False
        optimizer.bound_transaction()  # what cannot be bound raises before anything is attached
        sends_early = self.placement.cores > 0 or self._device.has_link
        numel = self.placement.bucket_numel
        self._intake = Intake(self._watch, self._transfers, numel, self._send, sends_early=sends_early)
        self._pipeline = Pipeline(
            self._device, self._transfers, self._placer, self._journal, lambda: optimizer.max_grad_norm
        )
        try:
            if overlap:
                self._transfers.reserve(parameters, self.placement.bucket_numel)
            optimizer.attach_overlap(self)
            self._follow(optimizer.bound_transaction())
        except BaseException:
            self._end()
            raise

    # ---- a gradient is ready (watch.Keeper) --------------------------------------------------------------------------

    def gradient_ready(self, parameter: Tensor) -> None:
        """Take a parameter's gradient; called by autograd in the middle of backward."""
        gradient = parameter.grad
        if gradient is None or self._intake.accumulation.is_in_grad:
            return
        begin = time.perf_counter()
        try:
            if present_backward() != self._bound_in:
                self._begin_backward()
            self._intake.take(parameter, gradient)
        except BaseException:  # also Ctrl-C
            self.abandon()
            raise
        self.statistics.hook_seconds += time.perf_counter() - begin

    def _begin_backward(self) -> None:
        self._bound_in = present_backward()
        self._watch.note_backward()
        if not self._watch.has_unsettled:
            self._follow(self.optimizer.bound_transaction())  # a look at every parameter: once in a backward is enough
            self._journal.note_gradient()

    def _send(self, bucket: Bucket) -> None:
        """Let a bucket go its way; called by the intake when it is full."""
        self._hyper = self._hyper or self.optimizer.hyperparameters()
        self._pipeline.send(bucket, self._hyper, self.unscale)

    # ---- what the optimizer asks (binding.Overlap) -------------------------------------------------------------------

    @property
    def unscale(self) -> float:
        """Factor that undoes the loss scaling of gradients that arrive now."""
        return 1.0 if self._scaler is None else self._scaler.inverse_scale

    def is_host(self, parameter: Tensor) -> bool:
        """Whether kernels on the CPU may write this parameter."""
        return self._device.is_host(parameter)

    def hand_over_sums(self) -> None:
        """Speculate on what was accumulated and got no gradient outside `accumulate()`."""
        try:
            self._look_at_left()
            self._intake.take_sums()
        except BaseException:
            self.abandon()
            raise

    def accumulated(self) -> dict[Tensor, Tensor]:
        """Return what `hand_over_sums` would hand over, per parameter."""
        self._look_at_left()
        return self._intake.sums()

    def _look_at_left(self) -> None:
        """Treat gradients that were left in `.grad`, also of parameters that came since, as if they had travelled."""
        if not (self._transfers.narrows or self._intake.accumulation.sums):
            return
        if not self._watch.has_unsettled:
            self._follow(self.optimizer.bound_transaction())
        self._intake.narrow_left()

    def forget_sums(self) -> None:
        """Drop what was accumulated."""
        self._intake.accumulation.take()

    def catch_up(self) -> None:
        """Return when everything that was handed over is speculated on.

        Raises:
            WorkerError: the worker failed; the open step was dropped.
        """
        try:
            self._intake.flush()
            self._pipeline.drain()
        except Exception:
            self.abandon()
            raise

    def conclude(self, outcome: StepOutcome | None) -> None:
        """Make parameters safe to read after a verdict, or after a rollback (None), and let commits begin."""
        self._transfers.await_parameters(self._watch.unreported if self._overlaps_forward else None)
        self._watch.reports_reads = not self._transfers.is_awaited
        self._transfers.note_arrived()
        self._journal.note_verdict(outcome, self.optimizer.statistics.respeculated)
        if outcome is not None:
            self._pipeline.governor.note(outcome.kind)
        elif self._watch.is_backward_broken():
            _logger.warning(
                "the step of a backward that failed was dropped; if it failed because a variable was modified by an "
                "inplace operation, %s",
                REMEDY,
            )
        self._watch.note_verdict()
        self._hyper = {}
        if self._pipeline.transaction is not None:
            self._follow(self.optimizer.bound_transaction())
        if self._placer.end_step(is_whole=outcome is not None):
            self._apply_placement()
        if self.residence.is_full:
            self._make_room()
        self._pipeline.wake()

    def await_parameters(self, parameters: frozenset[int] | None = None) -> None:
        """Let the model's stream wait for the uploads of parameters, by default all (also watch.Keeper)."""
        self._transfers.await_parameters(parameters)
        self._watch.reports_reads = not self._transfers.is_awaited

    # ---- placement ---------------------------------------------------------------------------------------------------

    @property
    def placement(self) -> Placement:
        """Where and how steps are made at present."""
        return self._placer.placement

    def place(
        self, *, gpu_buckets: int | None = None, bucket_numel: int | None = None, cores: int | None = None
    ) -> None:
        """Change the placement from the next step on, instead of what "auto" would choose; the results keep their bits.

        Args:
            gpu_buckets, bucket_numel, cores: as for the constructor; None for no change.

        Raises:
            ValueError: an argument is out of range, or cannot be met; nothing was changed.
            MemoryError: the device cannot hold the state of so many buckets; nothing was changed.
            RuntimeError: a step is open.
        """
        placement = self.placement
        if gpu_buckets is not None:
            check_count("gpu_buckets", gpu_buckets, least=0, may_be_auto=False)
            placement = replace(placement, gpu_buckets=gpu_buckets)
        if bucket_numel is not None:
            check_count("bucket_numel", bucket_numel, may_be_auto=False)
            placement = replace(placement, bucket_numel=bucket_numel)
        if cores is not None:
            check_count("cores", cores, may_be_auto=False)
            placement = replace(placement, cores=cores)
        if self._watch.has_unsettled:
            raise RuntimeError("place() was called in the middle of a step; call it after optimizer.step()")
        self._placer.place(placement)
        self._apply_placement()

    def _apply_placement(self) -> None:
        kept = [one for one in last_parameters(self._placer.order, self.placement) if self._can_keep(one)]
        self._intake.place(self.placement.bucket_numel, kept)
        self._transfers.link_dtype = self.placement.link_dtype
        self.residence.bring_home(s for s in self.residence.states if id(s.parameter) not in self._intake.kept)

    def _make_room(self) -> None:
        """Keep half as many buckets, because the device has no memory for so many."""
        fewer = replace(self.placement, gpu_buckets=self.placement.gpu_buckets // 2)
        _logger.warning(
            "the device has no memory left for the state of %d buckets, so their step was made on the host, and %d are "
            "kept from now on; free some, or set gpu_buckets",
            self.placement.gpu_buckets,
            fewer.gpu_buckets,
        )
        self.residence.is_full = False
        self._placer.place(fewer)
        self._apply_placement()

    def _can_keep(self, parameter: Tensor) -> bool:
        state = self._intake.state_of(parameter)
        return state is not None and not self.is_host(parameter) and parameter.stride() == state.strides

    # ---- for the user ------------------------------------------------------------------------------------------------

    def accumulate(self, dtype: torch.dtype | None = None) -> AbstractContextManager[None]:
        """Leave the gradients of the backwards inside to be added up: for all micro-batches but the last.

        Args:
            dtype: None adds in `.grad`, in its dtype, as autograd does; torch.float32 keeps the sum in fp32 on the
                host.

        Raises:
            ValueError: another dtype.
            RuntimeError: sums on the host were asked for with overlap=False, where gradients stay in `.grad`.
        """
        if dtype is not None and not self._overlaps:
            raise RuntimeError(
                f"accumulate({dtype}) needs a scheduler that takes gradients, but this one has overlap=False; "
                "call accumulate() without a dtype"
            )
        return self._intake.accumulation.during(dtype)

    def synchronize(self) -> None:
        """Return when nothing is under way: buckets speculated on, accepted steps committed, values uploaded."""
        self.catch_up()
        self.optimizer.commit()
        self._transfers.settle()
        self._transfers.await_parameters()

    def export_trace(self, path: str | os.PathLike[str]) -> None:
        """Write the last steps as a Chrome trace, for chrome://tracing or ui.perfetto.dev.

        Where nobody waits for an upload, its span ends when it is first seen to have arrived.
        """
        self._transfers.note_arrived()
        self.trace.write(path)

    def close(self) -> None:
        """Finish what is under way, drop an open step, and leave model and optimizer as without a scheduler."""
        if self._closed:
            return
        self._closed = True
        self._watch.let_go()
        self.forget_sums()
        try:
            self.optimizer.rollback()
            self.optimizer.commit()
            self._transfers.await_parameters()
        finally:
            self.optimizer.detach_overlap()
            self._end()

    def _end(self) -> None:
        self._pipeline.close()
        if self._owns_device:
            self._device.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if isinstance(error, RuntimeError) and "modified by an inplace operation" in str(error):
            error.add_note(f"The scheduler had written a parameter that this backward still needed: {REMEDY}.")
        self.close()

    # ---- keeping up with the model -----------------------------------------------------------------------------------

    def _follow(self, transaction: Transaction) -> None:
        """Watch the parameters that the optimizer has now."""
        if transaction is self._pipeline.transaction:
            return
        self._pipeline.transaction = transaction
        self._intake.follow(transaction.table.states)
        self.residence.forget(but=transaction.table.states)
        if self._overlaps:
            self._watch.follow(transaction.table.parameters)

    def accepted_value(self, parameter: Tensor) -> Tensor | None:
        """Return a parameter's value after the last accepted step, if it shows a speculated one (watch.Keeper)."""
        self.catch_up()
        state = self._intake.state_of(parameter)
        return state.speculation_master.detach() if state is not None and state.shows_open_step else None

    def abandon(self) -> None:
        """Drop the open step, also from inside backward."""
        self._intake.forget()
        self._pipeline.abandon()
        self.conclude(None)
