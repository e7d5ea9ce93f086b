"""The training loop's state: model, optimizer and batches, and what one step does with them."""

from __future__ import annotations

import copy
import time
from contextlib import ExitStack
from typing import Any, Self

import torch
from torch import Tensor

from superadam import OffloadScheduler, OverlapStatistics, SpeculativeCPUAdamW
from superadam.cli.train.device import moved, peak_device_bytes, peak_host_bytes, wait_for
from superadam.cli.train.history import History, StepRecord
from superadam.cli.train.model import build_model, next_byte_loss, parameter_groups
from superadam.cli.train.settings import Settings
from superadam.cli.train.text import Text
from superadam.cli.train.verification import Reference
from superadam.devices import PlainDevice

BETAS, WEIGHT_DECAY = (0.9, 0.95), 0.1
"""What language models are usually trained with."""

LEAST_BUCKETS = 8
"""Of a model on the CPU, which is so small that "auto" would make few of it."""


class Trainer:
    """A run that can be stepped, measured, saved and continued.

    Steps are made inside `with trainer:`, once, which starts and ends the scheduler and the reference. Restore a
    checkpoint before that. The text has to be long enough for `settings.seq`.

    Attributes:
        scheduler: takes gradients while backward runs; None outside `with` and where `settings.overlap` is False.
        reference: what every step inside is checked against where `is_verified`, or None.
    """

    def __init__(self, settings: Settings, text: Text, *, is_verified: bool = False) -> None:
        self.settings = settings
        self.text = text
        self.history, self._earlier = History(), History()
        self.device = torch.device(settings.device)
        dtype = torch.bfloat16 if settings.dtype == "bf16" else torch.float32
        preset = settings.preset
        self.model = build_model(
            preset.shape, dtype, self.device, seed=settings.seed, checkpointing=preset.checkpointing
        )
        self.optimizer = SpeculativeCPUAdamW(
            parameter_groups(self.model, WEIGHT_DECAY),
            lr=settings.lr,
            betas=BETAS,
            max_grad_norm=settings.max_grad_norm,
            moments=settings.moments,
            master=settings.master,
        )
        self.generator = torch.Generator().manual_seed(settings.seed)
        self.scheduler: OffloadScheduler | None = None
        self.reference: Reference | None = None
        self._is_verified = is_verified
        self._at_work = ExitStack()

    @property
    def parameters(self) -> int:
        """Elements of all the model's parameters."""
        return self.settings.preset.shape.parameters

    @property
    def shares_cores(self) -> bool:
        """Whether the model computes on every core, so that the worker slows it down."""
        return self.device.type == "cpu" and PlainDevice().idle_cores() == 0

    @property
    def bucket_numel(self) -> int | str:
        """The scheduler's `bucket_numel`."""
        return -(-self.parameters // LEAST_BUCKETS) if self.device.type == "cpu" else "auto"

    def __enter__(self) -> Self:
        with ExitStack() as entered:
            if self._is_verified:
                self.reference = Reference(self.optimizer, self.model)
                entered.callback(self.reference.close)
            if self.settings.overlap:
                # "auto" would leave all work to `step()` where no core is idle.
                cores: int | str = 1 if self.shares_cores else "auto"
                self.scheduler = entered.enter_context(
                    OffloadScheduler(self.optimizer, self.model, bucket_numel=self.bucket_numel, num_threads=cores)
                )
            self._at_work = entered.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        self.scheduler = None
        self._at_work.__exit__(*error)

    def step(self, *, inject_nan: bool = False) -> StepRecord:
        """Draw a batch, run backward, and make the optimizer's step.

        The learning rate advances only with the model, so a skipped step costs a batch and nothing else. On a GPU the
        host waits twice: for the end of backward, before the optimizer's time begins, and for the new parameters,
        before the step's time ends. Neither costs much: gradients and the loss's value have to be waited for anyway.

        Args:
            inject_nan: put a NaN into one gradient, as if backward had computed it.
        """
        history = self.history
        begin = time.perf_counter()
        for group in self.optimizer.param_groups:
            group["lr"] = self.settings.lr_of(history.updates)
        drawn = self.text.draw(self.settings.batch, self.settings.seq, self.generator)
        with ExitStack() as marred:
            if inject_nan:  # into the last gradient of backward: everything else is speculated on by then
                embedding = self.model.tokens.weight
                marred.callback(embedding.register_hook(_with_nan).remove)  # type: ignore[no-untyped-call]
            loss = next_byte_loss(self.model, moved(drawn, self.device))
            loss.backward()  # type: ignore[no-untyped-call]
        wait_for(self.device)
        backward_ended = time.perf_counter()
        self.optimizer.step()
        self.optimizer.zero_grad()
        wait_for(self.device)
        end = time.perf_counter()
        outcome = self.optimizer.last_outcome
        assert outcome is not None
        if self.reference is not None:
            begin += self.reference.take_hook_seconds()
            self.reference.step(outcome)
        record = StepRecord(loss.item(), outcome.grad_norm, outcome.kind)
        history.steps.append(record)
        history.seconds += end - begin
        history.update_seconds += end - backward_ended
        history.peak_host_bytes = max(history.peak_host_bytes, peak_host_bytes())
        if (peak := peak_device_bytes(self.device)) is not None:
            history.peak_device_bytes = max(history.peak_device_bytes or 0, peak)
        overlapped = OverlapStatistics() if self.scheduler is None else self.scheduler.statistics
        history.set_counts(self._earlier, self.optimizer.statistics, overlapped)
        return record

    @torch.no_grad()
    def measure_held_out(self) -> float:
        """Return the loss on the held-out text, and add it to the history."""
        windows = self.text.held_out_windows(2 * self.settings.batch, self.settings.seq)
        loss = next_byte_loss(self.model, moved(windows, self.device)).item()
        self.history.held_out[len(self.history.steps)] = loss
        return loss

    def continue_from(self, history: History) -> None:
        """Let this be a further session of the run with this history."""
        self.history, self._earlier = history, copy.deepcopy(history)
        history.sessions += 1


def _with_nan(gradient: Tensor) -> Tensor:
    """Return the gradient with a NaN in its middle."""
    changed = gradient.clone()
    changed.view(-1)[changed.numel() // 2] = torch.nan
    return changed
