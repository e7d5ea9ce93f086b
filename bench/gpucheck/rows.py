"""What was measured of one optimizer at one batch size, or why it was not.

Owns this record, which goes from the measuring process to the check and into its results.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

MEASURED = "measured"


@dataclass(frozen=True, slots=True)
class Row:
    """One optimizer over one model at one batch size.

    Attributes:
        model: name of its shape.
        batch, seq: sequences in a step, and tokens in a sequence.
        side: of `gpucheck.sides`.
        outcome: MEASURED, or in words why not.
        detail: the error, or what else is known of that.
        steps: that were timed, from batch to new parameters.
        step_seconds, slowest_step_seconds: median and maximum of those.
        tokens_per_second: by the median.
        backward_seconds: median, where nothing but forward and backward ran.
        adam_seconds: that the CPU takes for the Adam of the whole model, with nothing else running.
        hidden_share: how much of that an overlapped step hides.
        peak_device_bytes, peak_host_bytes: so much memory at most, the latter by the whole process until then.
        placement, statistics: of the scheduler, after the steps.
    """

    model: str
    batch: int
    seq: int
    side: str
    outcome: str = MEASURED
    detail: str = ""
    steps: int = 0
    step_seconds: float | None = None
    slowest_step_seconds: float | None = None
    tokens_per_second: float | None = None
    backward_seconds: float | None = None
    adam_seconds: float | None = None
    hidden_share: float | None = None
    peak_device_bytes: int | None = None
    peak_host_bytes: int | None = None
    placement: dict[str, str] = field(default_factory=dict)
    statistics: dict[str, Any] = field(default_factory=dict)

    @property
    def workload(self) -> tuple[str, int, int]:
        """What rows must have in common to be compared."""
        return self.model, self.batch, self.seq
