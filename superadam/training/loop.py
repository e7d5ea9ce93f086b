"""One run in motion: model, optimizer, schedule and batches, and what a step does with them.

Owns the order of a step. It neither prints nor writes files.
"""

from __future__ import annotations

import copy
import time

import torch
from torch.optim.lr_scheduler import LambdaLR

from superadam import SpeculativeCPUAdamW, Statistics, StepKind, StepOutcome
from superadam.training.history import History, StepRecord, optimizer_seconds
from superadam.training.model import build_model, next_byte_loss, parameter_groups
from superadam.training.settings import Settings
from superadam.training.text import Text
from superadam.training.verification import Reference

BETAS = (0.9, 0.95)
"""Decay rates of the moments that language models are usually trained with."""

HELD_OUT_WINDOWS = 32


class Trainer:
    """A run that can be stepped, measured, saved and continued.

    Args:
        settings: the run.
        text: what it learns from, long enough for `settings.seq`.
        is_plain: call `step()` instead of `speculate()` and `resolve()`.
    """

    def __init__(self, settings: Settings, text: Text, *, is_plain: bool = False) -> None:
        self.settings = settings
        self.text = text
        self.is_plain = is_plain
        self.history = History()
        torch.manual_seed(settings.seed)  # for layers that draw while training; weights and batches have their own
        self.model = build_model(settings)
        self.optimizer = SpeculativeCPUAdamW(
            parameter_groups(self.model, settings.weight_decay),
            lr=settings.lr,
            betas=BETAS,
            max_grad_norm=settings.max_grad_norm,
        )
        self.schedule = LambdaLR(self.optimizer, settings.lr_factor)
        self.generator = torch.Generator().manual_seed(settings.seed)
        self.reference: Reference | None = None
        self._device = torch.device(settings.device)

    def verify(self) -> Reference:
        """Start a reference from the present state; every later step is checked against it."""
        self.reference = Reference(self.optimizer)
        return self.reference

    def step(self, *, inject_nan: bool = False) -> StepRecord:
        """Draw a batch, run backward, and let the optimizer make of the gradients what it will.

        The learning rate moves on only when the model did, so a skipped step costs a batch and nothing else.

        Args:
            inject_nan: put a NaN into one gradient.
        """
        before = copy.copy(self.optimizer.statistics)
        begin = time.perf_counter()
        windows = self.text.draw(self.settings.batch, self.settings.seq, self.generator).to(self._device)
        loss = next_byte_loss(self.model, windows)
        loss.backward()  # type: ignore[no-untyped-call]
        if inject_nan:
            self._inject_nan()
        seconds = time.perf_counter() - begin
        if self.reference is not None:
            self.reference.take_gradients()
        lr = float(self.optimizer.param_groups[0]["lr"])
        begin = time.perf_counter()
        outcome = self._update()
        seconds += time.perf_counter() - begin
        if self.reference is not None:
            self.reference.step(outcome)
        if outcome.kind is not StepKind.SKIPPED:
            self.schedule.step()
        record = StepRecord(loss.item(), outcome.grad_norm, outcome.clip_coefficient, lr, outcome.kind)
        self._note(record, before, seconds)
        return record

    def _update(self) -> StepOutcome:
        if self.is_plain:
            self.optimizer.step()
            self.optimizer.zero_grad()
            outcome = self.optimizer.last_outcome
            assert outcome is not None
            return outcome
        self.optimizer.speculate()
        return self.optimizer.resolve()

    def _inject_nan(self) -> None:
        gradient = self.optimizer.param_groups[0]["params"][0].grad
        gradient.view(-1)[gradient.numel() // 2] = torch.nan

    def _note(self, record: StepRecord, before: Statistics, seconds: float) -> None:
        history, now = self.history, self.optimizer.statistics
        history.steps.append(record)
        history.respeculated += now.respeculated - before.respeculated
        history.dropped += now.dropped - before.dropped
        history.optimizer_seconds += optimizer_seconds(now) - optimizer_seconds(before)
        history.seconds += seconds

    @torch.no_grad()
    def measure_held_out(self) -> float:
        """Return the loss on the held-out text, and note it in the history."""
        windows = self.text.held_out_windows(HELD_OUT_WINDOWS, self.settings.seq)
        loss = next_byte_loss(self.model, windows.to(self._device)).item()
        self.history.held_out[len(self.history.steps)] = loss
        return loss
