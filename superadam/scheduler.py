"""`OffloadScheduler`: the optimizer's step, bucket by bucket, while backward still runs.

The story of one step: a gradient is ready (`gradient_ready`), a bucket is full and starts its way to the host
(`_send`), the worker speculates on it and starts the way back (`_speculate`, `deliver`), `optimizer.step()` waits for
the worker (`catch_up`), judges, and lets the model's stream wait for the uploads (`conclude`); in the worker's idle
time accepted gradients are committed (`_idle`).

Owns the order of these things. Arithmetic and verdicts are the optimizer's, streams and copies the device's.
"""

from __future__ import annotations

import functools
import logging
import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.utils.hooks import RemovableHandle

from superadam import native
from superadam.arrivals import Arrivals
from superadam.buckets import DEFAULT_NUMEL, Bucket, Filler
from superadam.devices import Device, Event, PlainDevice, Stream
from superadam.governor import Governor
from superadam.grad_scaler import GradScaler
from superadam.hooks import attach
from superadam.hyperparameters import Hyperparameters
from superadam.optimizer import SpeculativeCPUAdam
from superadam.outcome import StepOutcome
from superadam.parameter import ParameterState, Phase
from superadam.trace import Trace
from superadam.transaction import Transaction
from superadam.worker import WorkerError

_logger = logging.getLogger("superadam")

_NO_BACKWARD = -1
"""What autograd calls its running backward when there is none."""

_REMEDY = (
    "leave gradients to accumulate() for all but the last backward, call optimizer.step() before the next forward, "
    "or make the scheduler with overlap=False for this model"
)


@dataclass(slots=True)
class OverlapStatistics:
    """What the scheduler did since it was made.

    Attributes:
        buckets: that were handed to the worker.
        speculated_buckets, waiting_buckets: of these, speculated on at once, or only summed because clipping was
            likely.
        downloaded_bytes, uploaded_bytes: moved between host and device; 0 for models in host memory.
        worker_seconds: time in which the worker worked.
        waited_seconds: of that, time in which the training thread waited for it in `step()`.
        hidden_share: 1 - waited / worker time; 0 before any work.
    """

    buckets: int = 0
    speculated_buckets: int = 0
    waiting_buckets: int = 0
    downloaded_bytes: int = 0
    uploaded_bytes: int = 0
    worker_seconds: float = 0.0
    waited_seconds: float = 0.0

    @property
    def hidden_share(self) -> float:
        """Share of the worker's time that training did not wait for."""
        return max(0.0, 1.0 - self.waited_seconds / self.worker_seconds) if self.worker_seconds else 0.0


class OffloadScheduler:
    """Runs a `SpeculativeCPUAdam` during backward.

    While the scheduler is at work, gradients are taken as backward makes them (`.grad` is None afterwards), and
    `optimizer.step()` only validates what was speculated. The bits are those of the optimizer alone. Use it as a
    context manager, or call `close()`.

    A graph that needs a parameter's old value after its gradient is complete is refused, by us or by autograd
    ("modified by an inplace operation"); the error tells what to do. Nobody can notice a value that is read past
    autograd: through `p.data`, or detached by a checkpointed function that calls no module. For such models use
    overlap=False.

    Args:
        optimizer: with an explicit `max_grad_norm`, `math.inf` for none: code that clips afterwards would find no
            gradients.
        model: every forward of it is watched, so that none reads parameters whose step has no verdict yet.
        bucket_numel: elements that travel and are speculated on together; "auto" takes 16 Mi.
        cores: threads that kernels may use; "auto" leaves `superadam.get_num_threads()` as it is.
        grad_scaler: a `superadam.GradScaler`, for loss scaling.
        overlap: False leaves everything to `optimizer.step()`: for models that reuse parameters in ways that forbid
            writing them during backward.
        device: streams and memory of the model; default by where the parameters lie.

    Raises:
        ValueError: no explicit `max_grad_norm`, or an argument is out of range.
        TypeError: the optimizer is not a `SpeculativeCPUAdam`, or the model no `nn.Module`.
        RuntimeError: the model is wrapped in DistributedDataParallel, or the optimizer has a scheduler already.
    """

    def __init__(
        self,
        optimizer: SpeculativeCPUAdam,
        model: nn.Module,
        *,
        bucket_numel: int | str = "auto",
        cores: int | str = "auto",
        grad_scaler: GradScaler | None = None,
        overlap: bool = True,
        device: Device | None = None,
    ) -> None:
        _check(optimizer, model, bucket_numel, cores, grad_scaler)
        self.optimizer = optimizer
        self.model = model
        self.statistics = OverlapStatistics()
        self.trace = Trace()
        self._scaler = grad_scaler
        self._device = device or PlainDevice()
        self._governor = Governor()
        self._filler = Filler(DEFAULT_NUMEL if bucket_numel == "auto" else int(bucket_numel))
        if cores != "auto":
            native.set_num_threads(int(cores))
        self._states: dict[Tensor, ParameterState] = {}
        self._hyper: dict[ParameterState, Hyperparameters] = {}
        self._open: set[int] = set()  # ids of parameters: compiled hooks cannot look at sets of tensors
        self._sums: dict[ParameterState, Tensor] = {}
        self._running: set[int] = set()  # backwards that took gradients and have not ended
        self._uploads: list[tuple[Event, Tensor]] = []
        self._sent: list[tuple[Event, Tensor]] = []
        self._closed = False
        self._accumulates: torch.dtype | bool = False
        self._backward_began: float | None = None
        self._training_thread = threading.get_ident()
        self._handles: list[RemovableHandle] = []
        self._transaction: Transaction | None = None
        self._overlaps = overlap
        optimizer.bound_transaction()  # what cannot be bound raises before anything is attached
        self._worker = self._device.start_worker(self._idle)
        try:
            optimizer.attach_overlap(self)
            self._follow(optimizer.bound_transaction())
        except BaseException:
            self._worker.close()
            raise

    # ---- a gradient is ready -----------------------------------------------------------------------------------------

    def gradient_ready(self, parameter: Tensor) -> None:
        """Take a parameter's gradient; called by autograd in the middle of backward."""
        gradient = parameter.grad
        if gradient is None or self._accumulates is True:
            return
        try:
            self._take(parameter, gradient)
        except BaseException:  # also Ctrl-C
            self._abandon()
            raise

    def _take(self, parameter: Tensor, gradient: Tensor) -> None:
        if not (self._open or self._sums):
            self._follow(self.optimizer.bound_transaction())
        state = self._states.get(parameter)
        if state is None:  # no longer the optimizer's
            return
        if id(parameter) in self._open:
            raise RuntimeError(f"{state.name} got a second gradient before optimizer.step(); {_REMEDY}")
        if self._accumulates or state in self._sums:
            gradient = self._add_to_sum(state, gradient)
        parameter.grad = None
        if self._accumulates:
            return
        self._note_backward()
        # From now on the parameter may be overwritten: whoever still needs its old value in this backward must notice.
        assert self._transaction is not None
        fingerprints = self._transaction.table.fingerprints
        is_ours = not fingerprints.is_hinted(state.row)
        torch.autograd.graph.increment_version(parameter)
        if is_ours:
            fingerprints.note(state.row)
        self._open.add(id(parameter))
        self._backward_began = self._backward_began or time.perf_counter()
        bucket = self._filler.add(state, gradient)
        if bucket is not None:
            self._send(bucket)

    def forward_begins(self, module: nn.Module) -> None:
        """Refuse a forward over parameters whose step has no verdict yet; drop the step of a backward that failed."""
        if self._open:
            self._look_at(module)

    @_disable_dynamo
    def _look_at(self, module: nn.Module) -> None:
        in_backward = torch._C._current_graph_task_id() != _NO_BACKWARD
        if self._running and not in_backward:
            self._abandon()
            return
        # A checkpoint recomputes a block, which may read its submodules' parameters without calling them.
        if not self._open.isdisjoint(map(id, module.parameters(recurse=in_backward))):
            self._abandon()
            name = type(module).__name__
            raise RuntimeError(f"{name}.forward reads parameters whose step has no verdict yet; {_REMEDY}")

    def state_dict_taken(self, module: nn.Module, entries: dict[str, Any], prefix: str) -> None:
        """Put the values of the last accepted step into a state dict that is taken while a step is open."""
        if not self._open:
            return
        self.catch_up()
        for name, parameter in module.named_parameters(recurse=False):
            state = self._states.get(parameter)
            if state is not None and state.phase is Phase.SPECULATED and prefix + name in entries:
                accepted = torch.empty_like(parameter, requires_grad=False)
                entries[prefix + name] = accepted.copy_(state.speculation_master.detach())

    def _note_backward(self) -> None:
        """Remember that a backward has taken gradients, until it ends without an error."""
        task = torch._C._current_graph_task_id()
        if task != _NO_BACKWARD and task not in self._running:
            self._running.add(task)
            torch.autograd.Variable._execution_engine.queue_callback(functools.partial(self._running.discard, task))

    def _add_to_sum(self, state: ParameterState, gradient: Tensor) -> Tensor:
        total = self._sums.pop(state, None)
        total = (
            state.host_copy(gradient, torch.float32)
            if total is None
            else total.add_(state.host_copy(gradient, total.dtype))
        )
        if self._accumulates:
            self._sums[state] = total
        return total

    # ---- a bucket on its way -----------------------------------------------------------------------------------------

    def _send(self, bucket: Bucket) -> None:
        """Start a bucket's way to the host, and hand it to the worker."""
        assert self._transaction is not None
        device = self._device
        if not self._hyper:
            self._hyper = self.optimizer.hyperparameters()
        hosts, moved = [], 0
        for state, gradient in zip(bucket.states, bucket.gradients, strict=True):
            if device.is_host(gradient):
                hosts.append(state.host_gradient(gradient))
                continue
            staged = device.stage(gradient)
            device.wait(Stream.DOWNLOAD, device.record(Stream.CURRENT))
            host = device.host_empty(state.parameter, gradient.dtype)
            device.copy(host, staged, Stream.DOWNLOAD)
            device.keep(staged, Stream.DOWNLOAD)
            hosts.append(host)
            moved += staged.nbytes
        self.statistics.buckets += 1
        self.statistics.downloaded_bytes += moved
        arrivals = Arrivals(bucket.states, hosts, [(self._hyper[state], 1) for state in bucket.states])
        arrived = device.record(Stream.DOWNLOAD)
        self._worker.submit(
            functools.partial(self._speculate, self._transaction, arrivals, arrived, self.unscale, bucket.numel)
        )

    def _speculate(
        self, transaction: Transaction, arrivals: Arrivals, arrived: Event, unscale: float, numel: int
    ) -> None:
        """Speculate on a bucket; runs in the worker."""
        with self.trace.span("wait", "download"):
            arrived.synchronize()
        norm = transaction.norm_so_far() * unscale
        writes = self._governor.speculates(norm, self.optimizer.max_grad_norm)
        with self.trace.span("adam" if writes else "norm", "worker", elements=numel), torch.no_grad():
            transaction.speculate(arrivals, unscale, writes=writes)
        if writes:
            self.statistics.speculated_buckets += 1
        else:
            self.statistics.waiting_buckets += 1

    def _idle(self) -> bool:
        """Commit a bucket's worth of accepted gradients; runs in the worker while nothing else waits."""
        transaction = self._transaction
        if transaction is None or not transaction.in_phase(Phase.ACCEPTED):
            return False
        with self.trace.span("commit", "worker"):
            return transaction.commit_some(self._filler.bucket_numel)

    # ---- what the optimizer asks (binding.Overlap) -------------------------------------------------------------------

    @property
    def unscale(self) -> float:
        """Factor that undoes the loss scaling of gradients that arrive now."""
        return 1.0 if self._scaler is None else self._scaler.inverse_scale

    def is_host(self, parameter: Tensor) -> bool:
        """Whether kernels on the CPU may write this parameter."""
        return self._device.is_host(parameter)

    def host_empty(self, state: ParameterState) -> Tensor:
        """Return host memory for a parameter's new values."""
        return self._device.host_empty(state.parameter, state.parameter.dtype)

    def deliver(self, values: Sequence[tuple[ParameterState, Tensor]]) -> None:
        """Start the way of new values to their parameters."""
        device = self._device
        if threading.get_ident() == self._training_thread:  # what reads the old values may still be on its stream
            device.wait(Stream.UPLOAD, device.record(Stream.CURRENT))
        for state, host in values:
            device.copy(state.parameter.data, host, Stream.UPLOAD)
            self.statistics.uploaded_bytes += host.nbytes
            self._uploads.append((device.record(Stream.UPLOAD), host))

    def catch_up(self) -> None:
        """Return when everything that was handed over is speculated on.

        Raises:
            WorkerError: the worker failed; the open step was dropped.
        """
        begin = time.perf_counter()
        try:
            sums, self._sums = self._sums, {}
            self._open.update(id(state.parameter) for state in sums)
            for bucket in [self._filler.add(*one) for one in sums.items()] + [self._filler.take()]:
                if bucket is not None:
                    self._send(bucket)
            self._worker.drain()
        except Exception:
            self._abandon()
            raise
        end = time.perf_counter()
        self.statistics.waited_seconds += end - begin
        self.statistics.worker_seconds = self._worker.busy_seconds
        self.trace.add("wait for worker", "training", begin, end)

    def conclude(self, outcome: StepOutcome | None) -> None:
        """Make parameters safe to read: the model's stream waits for every upload."""
        uploads, self._uploads = self._uploads, []
        for event, _ in uploads:
            self._device.wait(Stream.CURRENT, event)
        self._sent, previous = uploads, self._sent
        for event, _ in previous:
            event.synchronize()  # of the step before: only now may its host memory go
        now = time.perf_counter()
        if self._backward_began is not None:
            self.trace.add("backward and step", "training", self._backward_began, now)
            self._backward_began = None
        if outcome is not None:
            self._governor.note(outcome.kind)
            self.trace.add(f"verdict: {outcome.kind.value}", "training", now, now, grad_norm=outcome.grad_norm)
        if outcome is None and self._running and torch._C._current_graph_task_id() == _NO_BACKWARD:
            _logger.warning(
                "the step of a backward that failed was dropped; if it failed because a variable was modified by an "
                "inplace operation, %s",
                _REMEDY,
            )
        self._open.clear()
        self._running.clear()
        self._hyper.clear()
        if self._transaction is not None:
            self._follow(self.optimizer.bound_transaction())
        self._worker.wake()

    # ---- for the user ------------------------------------------------------------------------------------------------

    @contextmanager
    def accumulate(self, dtype: torch.dtype | None = None) -> Iterator[None]:
        """Leave the gradients of the backwards inside to be added up: for all micro-batches but the last.

        Args:
            dtype: None adds in `.grad`, in its dtype, as autograd does; torch.float32 keeps the sum in fp32 on the
                host.

        Raises:
            ValueError: another dtype.
        """
        if dtype not in (None, torch.float32):
            raise ValueError(f"accumulate() got dtype {dtype}, expected None (that of .grad) or torch.float32")
        before, self._accumulates = self._accumulates, dtype or True
        try:
            yield
        finally:
            self._accumulates = before

    def synchronize(self) -> None:
        """Return when nothing is under way: buckets speculated on, accepted steps committed and uploaded."""
        self.catch_up()
        self.optimizer.commit()
        for event, _ in self._sent:
            event.synchronize()

    def export_trace(self, path: str | os.PathLike[str]) -> None:
        """Write the last steps as a Chrome trace, for chrome://tracing or ui.perfetto.dev."""
        self.trace.write(path)

    def close(self) -> None:
        """Finish what is under way, drop an open step, and leave model and optimizer as without a scheduler."""
        if self._closed:
            return
        self._closed = True
        for handle in self._handles:
            handle.remove()
        try:
            self.optimizer.rollback()
            self.optimizer.commit()
        finally:
            self.optimizer.detach_overlap()
            self._worker.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if isinstance(error, RuntimeError) and "modified by an inplace operation" in str(error):
            error.add_note(f"The scheduler had written a parameter that this backward still needed: {_REMEDY}.")
        self.close()

    # ---- keeping up with the model -----------------------------------------------------------------------------------

    def _follow(self, transaction: Transaction) -> None:
        """Hook the parameters that the optimizer has now."""
        if transaction is self._transaction:
            return
        self._transaction = transaction
        self._states = {state.parameter: state for state in transaction.table.states}
        for handle in self._handles:
            handle.remove()
        if self._overlaps:
            trained = [parameter for parameter in self._states if parameter.requires_grad and parameter.is_leaf]
            self._handles = attach(self.model, trained, self)

    def _abandon(self) -> None:
        """Drop the open step, also from inside backward."""
        self._filler.take()
        self._sums.clear()
        with suppress(WorkerError):
            self._worker.drain()
        if self._transaction is not None:
            with torch.no_grad():
                self._transaction.roll_back()
        self.conclude(None)


def _check(
    optimizer: SpeculativeCPUAdam,
    model: nn.Module,
    bucket_numel: int | str,
    cores: int | str,
    scaler: GradScaler | None,
) -> None:
    if not isinstance(optimizer, SpeculativeCPUAdam):
        raise TypeError(f"optimizer is a {type(optimizer).__name__}, expected a SpeculativeCPUAdam; make one first")
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is a {type(model).__name__}, expected the nn.Module whose parameters are optimized")
    if optimizer.max_grad_norm is None:
        raise ValueError(
            "the optimizer has max_grad_norm=None, expected an explicit limit, because gradients are gone before other "
            "code could clip them; set it, to math.inf for no limit"
        )
    for name, value in (("bucket_numel", bucket_numel), ("cores", cores)):
        if value != "auto" and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            raise ValueError(f"{name} is {value!r}, expected 'auto' or an integer of at least 1")
    if scaler is not None and not isinstance(scaler, GradScaler):
        raise ValueError(
            f"grad_scaler is a {type(scaler).__name__}, expected a superadam.GradScaler: torch's looks into .grad"
        )
    if any(isinstance(module, nn.parallel.DistributedDataParallel) for module in model.modules()):
        raise RuntimeError(
            "the model is wrapped in DistributedDataParallel, whose hooks come after ours; "
            "use torch.distributed.fsdp.fully_shard (FSDP2) instead"
        )
