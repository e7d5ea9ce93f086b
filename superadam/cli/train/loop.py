"""The training loop's state: model, optimizer, schedule and batches, and what one step does with them."""

from __future__ import annotations

import copy
import time
from contextlib import ExitStack
from types import TracebackType
from typing import Self

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from superadam import OffloadScheduler, OverlapStatistics, SpeculativeCPUAdamW, Statistics, StepKind
from superadam.cli.train.device import moved, wait_for
from superadam.cli.train.history import History, StepRecord
from superadam.cli.train.memory import peak_device_bytes, peak_host_bytes
from superadam.cli.train.model import build_model, next_byte_loss, parameter_groups
from superadam.cli.train.ranks import ALONE, Ranks
from superadam.cli.train.settings import Settings
from superadam.cli.train.text import Text
from superadam.cli.train.verification import Reference
from superadam.devices import PlainDevice
from superadam.offload.placement import Placement

BETAS = (0.9, 0.95)
"""Decay rates of the moments that language models are usually trained with."""

HELD_OUT_WINDOWS = 32
"""Of the byte transformer; for a preset's model, whose sequences are long, as many as a step has."""


class Trainer:
    """A run that can be stepped, measured, saved and continued.

    Steps are made inside `with trainer:`, which starts and ends the scheduler and the reference. Restore a checkpoint
    before that. The text has to be long enough for `settings.seq`.

    Attributes:
        scheduler: takes gradients while backward runs; None outside `with` and where `settings.overlap` is False.
        reference: what every step is checked against, or None.
    """

    def __init__(self, settings: Settings, text: Text, ranks: Ranks = ALONE) -> None:
        self.settings = settings
        self.ranks = ranks
        self.text = text
        self.history = History()
        torch.manual_seed(settings.seed)  # for layers that draw while training; weights and batches have their own
        self.model = build_model(settings, ranks)
        self.optimizer = SpeculativeCPUAdamW(
            parameter_groups(self.model, settings.weight_decay),
            lr=settings.lr,
            betas=BETAS,
            max_grad_norm=settings.max_grad_norm,
        )
        self.schedule = LambdaLR(self.optimizer, settings.lr_factor)
        self.generator = torch.Generator().manual_seed(settings.seed)
        self.scheduler: OffloadScheduler | None = None
        self.reference: Reference | None = None
        self._device = ranks.device(settings.device)
        self._noted = self._counts()
        self._at_work: ExitStack | None = None
        self._placement: Placement | None = None

    @property
    def parameters(self) -> int:
        """Elements of all the model's parameters."""
        return sum(parameter.numel() for parameter in self.model.parameters())

    @property
    def placement(self) -> Placement | None:
        """Where and how the scheduler makes steps, or made them last; None if there was none so far."""
        return self._placement if self.scheduler is None else self.scheduler.placement

    @property
    def shares_cores(self) -> bool:
        """Whether the model computes on every core, so that the worker slows it down."""
        return self._device.type == "cpu" and PlainDevice().idle_cores() == 0

    @property
    def bucket_numel(self) -> int | str:
        """The scheduler's `bucket_numel`; models for the CPU are small, and "auto" would make few buckets of them."""
        is_small = self._device.type == "cpu"
        return self.settings.elements_of_bucket(self.parameters) if is_small else self.settings.bucket_numel

    def _cores(self) -> int | str:
        """Return the scheduler's `num_threads`; its "auto" would leave all work to `step()` where no core is idle."""
        return 1 if self.settings.num_threads == "auto" and self.shares_cores else self.settings.num_threads

    def verify(self) -> Reference:
        """Start a reference from the present state; every later step is checked against it."""
        self.reference = Reference(self.optimizer, self.model, self.ranks)
        if self._at_work is not None:
            self._at_work.callback(self.reference.close)
        return self.reference

    def __enter__(self) -> Self:
        with ExitStack() as entered:
            if self.reference is not None:
                entered.callback(self.reference.close)
            if self.settings.overlap:
                scheduler = OffloadScheduler(
                    self.optimizer,
                    self.model,
                    bucket_numel=self.bucket_numel,
                    gpu_buckets=self.settings.gpu_buckets,
                    num_threads=self._cores(),
                )
                self.scheduler = entered.enter_context(scheduler)
            self._noted = self._counts()
            self._at_work = entered.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._at_work is not None
        self._placement = self.placement
        at_work, self._at_work, self.scheduler = self._at_work, None, None
        at_work.__exit__(kind, error, trace)

    def step(self, *, inject_nan: bool = False) -> StepRecord:
        """Draw a batch, run backward, and make the optimizer's step.

        The learning rate advances only with the model, so a skipped step costs a batch and nothing else. On a GPU the
        host waits twice: for the end of backward, before the optimizer's time begins, and for the new parameters,
        before the step's time ends. Neither costs much: gradients and the loss's value have to be waited for anyway.

        Args:
            inject_nan: put a NaN into one gradient, of one process, as if backward had computed it.

        Raises:
            RuntimeError: called outside `with trainer:`.
        """
        if self._at_work is None:
            raise RuntimeError("step() was called outside 'with trainer:', expected inside; enter the trainer first")
        begin = time.perf_counter()
        drawn = self.ranks.part(self.text.draw(self.settings.batch, self.settings.seq, self.generator))
        # The embedding's gradient is the last one that backward makes: everything else is speculated on by then.
        is_marred = inject_nan and self.ranks.number == self.ranks.count - 1
        handle = self.model.embedding.register_forward_hook(_mar) if is_marred else None
        try:
            loss = next_byte_loss(self.model, moved(drawn, self._device))
        finally:
            if handle is not None:
                handle.remove()
        loss.backward()  # type: ignore[no-untyped-call]
        lr = float(self.optimizer.param_groups[0]["lr"])
        wait_for(self._device)
        backward_ended = time.perf_counter()
        self.optimizer.step()
        self.optimizer.zero_grad()
        wait_for(self._device)
        end = time.perf_counter()
        outcome = self.optimizer.last_outcome
        assert outcome is not None
        if self.reference is not None:
            begin += self.reference.take_hook_seconds()
            self.reference.step(outcome)
        if outcome.kind is not StepKind.SKIPPED:
            self.schedule.step()
        mean = self.ranks.mean(loss.item(), len(drawn))
        record = StepRecord(mean, outcome.grad_norm, outcome.clip_coefficient, lr, outcome.kind)
        self.history.steps.append(record)
        self.history.seconds += end - begin
        self.history.update_seconds += end - backward_ended
        self.history.add_memory(peak_host_bytes(), peak_device_bytes(self._device))
        self._count_step()
        return record

    def _count_step(self) -> None:
        """Add to the history what optimizer and scheduler have counted since the last call."""
        counted, overlapped = self._counts()
        self.history.add_counts(counted, self._noted[0])
        self.history.add_overlap(overlapped, self._noted[1])
        self._noted = counted, overlapped

    def _counts(self) -> tuple[Statistics, OverlapStatistics]:
        overlapped = OverlapStatistics() if self.scheduler is None else self.scheduler.statistics
        return copy.copy(self.optimizer.statistics), copy.copy(overlapped)

    @torch.no_grad()
    def measure_held_out(self) -> float:
        """Return the loss on the held-out text, and add it to the history."""
        count = max(HELD_OUT_WINDOWS, self.ranks.count) if self.settings.shape is None else self.settings.batch
        windows = self.ranks.part(self.text.held_out_windows(count, self.settings.seq))
        loss = self.ranks.mean(next_byte_loss(self.model, moved(windows, self._device)).item(), len(windows))
        self.history.held_out[len(self.history.steps)] = loss
        return loss


def _mar(embedding: nn.Module, tokens: tuple[Tensor, ...], features: Tensor) -> None:
    """Put a NaN into the gradient of an embedding's output, and so into one element of the embedding's."""
    features.register_hook(_with_nan)  # type: ignore[no-untyped-call]


def _with_nan(gradient: Tensor) -> Tensor:
    """Return the gradient with a NaN in its middle."""
    changed = gradient.clone()
    changed.view(-1)[changed.numel() // 2] = torch.nan
    return changed
