"""Whether to speculate at all: clipped steps make speculation be done twice.

Owns the share of clipped steps. Its answer changes when work is done, never what comes out.
"""

from __future__ import annotations

import math

from superadam.step.outcome import StepKind

_MEMORY = 0.9
"""Weight of the past in the share: about the last ten steps count."""

_LIMIT = 0.5
"""From this share on, speculating costs more than waiting: a redo reads as much as the speculation did."""


class Governor:
    """Decides from the share of clipped steps, by whomever, and within a step from the norm so far.

    Attributes:
        clipped_share: of the last steps, exponentially weighted.
    """

    def __init__(self) -> None:
        self.clipped_share = 0.0

    def note(self, kind: StepKind) -> None:
        """Take the verdict over a step into account; skipped steps say nothing about clipping."""
        if kind is not StepKind.SKIPPED:
            self.clipped_share = _MEMORY * self.clipped_share + (1 - _MEMORY) * (kind is StepKind.CLIPPED)

    def speculates(self, norm_so_far: float, max_norm: float | None) -> bool:
        """Whether the next bucket is worth speculating on.

        Args:
            norm_so_far: norm of the gradients that have arrived in this step, unscaled; the norm of all is not smaller.
            max_norm: limit of the norm; None or inf for none.
        """
        is_within = max_norm is None or math.isinf(max_norm) or norm_so_far <= max_norm  # NaN is not
        return self.clipped_share < _LIMIT and is_within
