"""Buckets: the gradients that travel and are speculated on together, in the order in which backward makes them.

Owns the bucket that is being filled. It moves nothing itself.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from superadam.parameter import ParameterState
from superadam.taken_gradient import TakenGradient

DEFAULT_NUMEL = 16 * 1024 * 1024
"""Elements of a bucket: 32 MiB of bf16 or 64 MiB of fp32, as in SuperOffload; enough to saturate a link."""


@dataclass(slots=True)
class Bucket:
    """Gradients that have arrived together.

    Attributes:
        states: their parameters.
        gradients: one for each, on the device.
        numel: elements of all.
        is_kept: whether the gradients stay on the device, where the step will be made.
    """

    states: list[ParameterState] = field(default_factory=list)
    gradients: list[TakenGradient] = field(default_factory=list)
    numel: int = 0
    is_kept: bool = False


class Filler:
    """Fills one bucket after another.

    Args:
        bucket_numel: elements from which on a bucket is full; the parameter that fills it is the last one in.
        is_kept: of the buckets.
    """

    def __init__(self, bucket_numel: int, *, is_kept: bool = False) -> None:
        self.bucket_numel = bucket_numel
        self._is_kept = is_kept
        self._filling = Bucket(is_kept=is_kept)

    def add(self, state: ParameterState, gradient: TakenGradient) -> Bucket | None:
        """Put a gradient into the bucket; return the bucket if that filled it."""
        self._filling.states.append(state)
        self._filling.gradients.append(gradient)
        self._filling.numel += state.shape.numel()
        return self.take() if self._filling.numel >= self.bucket_numel else None

    def take(self) -> Bucket | None:
        """Return what there is, if anything, and begin a new bucket.

        What was given back is left out, and so is what was dropped before another gradient of its parameter came.
        """
        filled, self._filling = self._filling, Bucket(is_kept=self._is_kept)
        latest = dict(zip(filled.states, filled.gradients, strict=True))
        latest = {state: gradient for state, gradient in latest.items() if not gradient.is_given}
        if not latest:
            return None
        numel = sum(state.shape.numel() for state in latest)
        return Bucket(list(latest), list(latest.values()), numel, self._is_kept)
