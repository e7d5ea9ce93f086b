"""The verdict over a step: global norm, non-finite count and clip coefficient from the sums of all chunks.

It knows numbers only. The definition of the coefficient is that of `torch.nn.utils.clip_grad_norm_`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from superadam import native
from superadam.outcome import StepKind, StepOutcome

_EPSILON = 1e-6
"""What clip_grad_norm_ adds to the norm before it divides."""


@dataclass(frozen=True, slots=True, eq=False)
class GradientNorm:
    """Of some gradients, as they arrived, one after another: an entry for each chunk of each.

    Attributes:
        sums: of squares.
        nonfinite: counts of Inf and NaN.
    """

    sums: npt.NDArray[np.float64]
    nonfinite: npt.NDArray[np.int64]


def clip_coefficient(norm: float, max_norm: float | None) -> float:
    """Return min(1, max_norm / (norm + 1e-6)), computed in double and rounded once to fp32; 1.0 without a limit."""
    if max_norm is None or math.isinf(max_norm):
        return 1.0
    return float(np.float32(min(1.0, max_norm / (norm + _EPSILON))))


def judge(
    sums: npt.NDArray[np.float64],
    nonfinite: npt.NDArray[np.int64],
    unscale: float,
    max_norm: float | None,
    *,
    is_rejected: bool = False,
) -> StepOutcome:
    """Return what is to become of a step.

    Args:
        sums: sum of squared gradients per (parameter, chunk), in this order, as they arrived.
        nonfinite: count of Inf and NaN, likewise.
        unscale: factor that undoes loss scaling.
        max_norm: limit of the global norm after unscaling; None or inf for no limit.
        is_rejected: skip whatever the sums say, because somebody else found the gradients wanting.
    """
    norm = math.sqrt(native.ordered_sum(sums)) * unscale
    count = int(nonfinite.sum())
    if count or is_rejected:
        return StepOutcome(StepKind.SKIPPED, norm, 1.0, count)
    clip = clip_coefficient(norm, max_norm)
    return StepOutcome(StepKind.COMMITTED if clip == 1.0 else StepKind.CLIPPED, norm, clip)
