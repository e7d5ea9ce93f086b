"""History of a run: records of its steps and totals, as plain numbers for checkpoint, report and picture."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from superadam import OverlapStatistics, Statistics, StepKind
from superadam.cli.train.plain import record_of_plain


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step of the loop.

    Attributes:
        loss: training loss in nats per byte, before the update.
        grad_norm: global gradient norm before clipping; Inf or NaN when skipped.
        clip_coefficient: factor on the gradients.
        lr: learning rate of the step.
        kind: committed, clipped or skipped.
    """

    loss: float
    grad_norm: float
    clip_coefficient: float
    lr: float
    kind: StepKind


@dataclass(slots=True)
class History:
    """All steps so far, over every session that continued the run.

    Attributes:
        steps: one record for each step; step `n` of the run is `steps[n - 1]`.
        held_out: held-out loss by the number of steps done when it was measured.
        accepted, respeculated, dropped: see `superadam.Statistics`.
        seconds: wall time of all steps: batch, forward, backward, optimizer; not of verification and held-out losses.
        update_seconds: the part of `seconds` inside the optimizer's `step()`.
        overlap: statistics of the schedulers of all sessions. Their hooks' time is in `seconds`, too; their worker's
            time ran in parallel, except for what `step()` waited for.
        peak_host_bytes: most memory that a session's process held at once, everything included.
        peak_device_bytes: most memory that a session's tensors took at once on a CUDA device; None without one.
        sessions: processes that worked on the run.
    """

    steps: list[StepRecord] = field(default_factory=list)
    held_out: dict[int, float] = field(default_factory=dict)
    accepted: int = 0
    respeculated: int = 0
    dropped: int = 0
    seconds: float = 0.0
    update_seconds: float = 0.0
    overlap: OverlapStatistics = field(default_factory=OverlapStatistics)
    peak_host_bytes: int = 0
    peak_device_bytes: int | None = None
    sessions: int = 1

    def count(self, kind: StepKind) -> int:
        """Return the number of steps of this kind."""
        return sum(record.kind is kind for record in self.steps)

    @property
    def updates(self) -> int:
        """Steps that changed the model."""
        return len(self.steps) - self.count(StepKind.SKIPPED)

    @property
    def optimizer_seconds(self) -> float:
        """The part of `seconds` that the optimizer took: its `step()`, and the scheduler's hooks in backward."""
        return self.update_seconds + self.overlap.hook_seconds

    @property
    def hidden_seconds(self) -> float:
        """Time in which the scheduler's worker worked and training did not wait for it."""
        return max(0.0, self.overlap.worker_seconds - self.overlap.waited_seconds)

    @property
    def hidden_share(self) -> float:
        """Part of the optimizer's whole work, in the worker or not, that was hidden; 0 before any work."""
        return self.hidden_seconds / (self.hidden_seconds + self.optimizer_seconds) if self.hidden_seconds else 0.0

    def add_counts(self, now: Statistics, before: Statistics) -> None:
        """Add what the optimizer counted between two copies of its statistics."""
        self.accepted += now.accepted - before.accepted
        self.respeculated += now.respeculated - before.respeculated
        self.dropped += now.dropped - before.dropped

    def add_overlap(self, now: OverlapStatistics, before: OverlapStatistics) -> None:
        """Add what a scheduler did between two copies of its statistics; of its peak memory, keep the largest."""
        most = max(self.overlap.shadow_bytes, now.shadow_bytes)
        for name in (f.name for f in dataclasses.fields(OverlapStatistics)):
            difference = getattr(now, name) - getattr(before, name)
            setattr(self.overlap, name, getattr(self.overlap, name) + difference)
        self.overlap.shadow_bytes = most

    def add_memory(self, host_bytes: int, device_bytes: int | None) -> None:
        """Update the peaks with those of the present process."""
        self.peak_host_bytes = max(self.peak_host_bytes, host_bytes)
        if device_bytes is not None:
            self.peak_device_bytes = max(self.peak_device_bytes or 0, device_bytes)

    def to_plain(self) -> dict[str, Any]:
        """Return lists and numbers only, as a checkpoint that loads with `weights_only` can hold them."""
        plain: dict[str, Any] = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        plain["steps"] = [(r.loss, r.grad_norm, r.clip_coefficient, r.lr, r.kind.value) for r in self.steps]
        plain["held_out"] = dict(self.held_out)
        plain["overlap"] = dataclasses.asdict(self.overlap)
        return plain

    @staticmethod
    def of_plain(plain: dict[str, Any]) -> History:
        """Return the history from which `to_plain` made this.

        Raises:
            TypeError, KeyError, ValueError: it was made from something else.
        """
        plain = {**plain}  # whatever is none raises
        names = [f.name for f in dataclasses.fields(StepRecord)]
        values = [[*numbers, StepKind(kind)] for *numbers, kind in plain["steps"]]
        steps = [record_of_plain(StepRecord, dict(zip(names, record, strict=True))) for record in values]
        overlap = record_of_plain(OverlapStatistics, plain["overlap"])
        history = record_of_plain(History, {**plain, "steps": steps, "overlap": overlap})
        numbers = [getattr(record, f.name) for record in (history, overlap) for f in dataclasses.fields(record)]
        if not all(0 <= number < 2.0**63 for number in numbers if isinstance(number, int | float)):
            raise ValueError("a count or a time is negative, NaN or too large")
        if not all(type(n) is int and 0 <= n <= len(steps) and type(x) is float for n, x in history.held_out.items()):
            raise ValueError("a held-out loss is no number, or of no step")
        return history
