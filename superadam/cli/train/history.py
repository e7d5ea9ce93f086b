"""History of a run: records of its steps and totals, as plain numbers for checkpoint, report and picture."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, NamedTuple

from superadam import OverlapStatistics, Statistics, StepKind


class StepRecord(NamedTuple):
    """One step of the loop.

    Attributes:
        loss: training loss in nats per byte, before the update.
        grad_norm: global gradient norm before clipping; Inf or NaN when skipped.
        kind: committed, clipped or skipped.
    """

    loss: float
    grad_norm: float
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
    def final_loss(self) -> float:
        """Mean training loss of the last tenth of the steps."""
        last = [record.loss for record in self.steps[-max(1, len(self.steps) // 10) :]]
        return math.fsum(last) / len(last)

    @property
    def optimizer_seconds(self) -> float:
        """The part of `seconds` that the optimizer took: its `step()`, and the scheduler's hooks in backward."""
        return self.update_seconds + self.overlap.hook_seconds

    def set_counts(self, earlier: History, counted: Statistics, overlapped: OverlapStatistics) -> None:
        """Set what optimizer and scheduler count: what earlier sessions did, and this one until now."""
        for name in ("accepted", "respeculated", "dropped"):
            setattr(self, name, getattr(earlier, name) + getattr(counted, name))
        pairs = {
            one.name: (getattr(earlier.overlap, one.name), getattr(overlapped, one.name)) for one in fields(overlapped)
        }
        most = max(pairs["shadow_bytes"])
        self.overlap = OverlapStatistics(**{name: sum(pair) for name, pair in pairs.items()} | {"shadow_bytes": most})

    def to_plain(self) -> dict[str, Any]:
        """Return lists and numbers only, as a checkpoint that loads with `weights_only` can hold them."""
        steps = [(record.loss, record.grad_norm, record.kind.value) for record in self.steps]
        return asdict(replace(self, steps=[])) | {"steps": steps}

    @staticmethod
    def of_plain(plain: dict[str, Any]) -> History:
        """Return the history from which `to_plain` made this."""
        steps = [StepRecord(loss, norm, StepKind(kind)) for loss, norm, kind in plain["steps"]]
        return History(**plain | {"steps": steps, "overlap": OverlapStatistics(**plain["overlap"])})
