"""What happened in a run, step by step and in total.

Owns the records that the checkpoint carries on, the report sums up and the picture draws. Plain numbers only.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from superadam import Statistics, StepKind


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step of the loop.

    Attributes:
        loss: training loss in nats for a byte, before the update.
        grad_norm: global gradient norm before clipping; Inf or NaN when skipped.
        clip_coefficient: what gradients were multiplied by.
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
        respeculated, dropped: see `superadam.Statistics`.
        seconds: wall time of all steps: batch, forward, backward, optimizer; not of verification and held-out losses.
        optimizer_seconds: the part of `seconds` inside the optimizer.
        sessions: processes that worked on the run.
    """

    steps: list[StepRecord] = field(default_factory=list)
    held_out: dict[int, float] = field(default_factory=dict)
    respeculated: int = 0
    dropped: int = 0
    seconds: float = 0.0
    optimizer_seconds: float = 0.0
    sessions: int = 1

    def count(self, kind: StepKind) -> int:
        """Return how many steps ended so."""
        return sum(record.kind is kind for record in self.steps)

    @property
    def updates(self) -> int:
        """Steps that changed the model."""
        return len(self.steps) - self.count(StepKind.SKIPPED)

    def to_plain(self) -> dict[str, Any]:
        """Return lists and numbers only, as a checkpoint that loads with `weights_only` can hold them."""
        plain: dict[str, Any] = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        plain["steps"] = [(r.loss, r.grad_norm, r.clip_coefficient, r.lr, r.kind.value) for r in self.steps]
        plain["held_out"] = dict(self.held_out)
        return plain

    @staticmethod
    def of_plain(plain: dict[str, Any]) -> History:
        """Return what `to_plain` was made from.

        Raises:
            KeyError, TypeError, ValueError: it was made from something else.
        """
        steps = [StepRecord(loss, norm, clip, lr, StepKind(kind)) for loss, norm, clip, lr, kind in plain["steps"]]
        return History(**{**plain, "steps": steps})


def optimizer_seconds(statistics: Statistics) -> float:
    """Return the wall time inside all phases of the optimizer."""
    return (
        statistics.norm_seconds
        + statistics.speculate_seconds
        + statistics.resolve_seconds
        + statistics.commit_seconds
        + statistics.update_seconds
    )
