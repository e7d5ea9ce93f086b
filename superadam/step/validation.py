"""The verdict over a step: global norm, non-finite count and clip coefficient from the sums of all chunks."""

from __future__ import annotations

import math

import numpy as np

from superadam.distributed.verdict import RanksNorm
from superadam.state.norm import GradientNorm
from superadam.step.outcome import StepKind, StepOutcome

_EPSILON = 1e-6  # which clip_grad_norm_ adds to the norm before it divides


def clip_coefficient(norm: float, max_norm: float | None) -> float:
    """Return min(1, max_norm / (norm + 1e-6)), as clip_grad_norm_: computed in fp64, rounded once to fp32."""
    if max_norm is None or math.isinf(max_norm):
        return 1.0
    return float(np.float32(min(1.0, max_norm / (norm + _EPSILON))))


def judge(norm: GradientNorm | RanksNorm, max_norm: float | None) -> StepOutcome:
    """Return the outcome of a step whose gradients have this norm; a `max_norm` of None or inf is no limit."""
    total, count = norm.total, norm.count
    if count:
        return StepOutcome(StepKind.SKIPPED, total, 1.0, count)
    clip = clip_coefficient(total, max_norm)
    return StepOutcome(StepKind.COMMITTED if clip == 1.0 else StepKind.CLIPPED, total, clip)
