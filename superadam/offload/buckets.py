"""Buckets: the gradients that travel and are speculated on together, in the order in which backward makes them.

It moves nothing itself.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from superadam.handles.taken_gradient import TakenGradient
from superadam.state.parameter import ParameterState

DEFAULT_NUMEL = 16 * 1024 * 1024
"""Elements of a bucket: 32 MiB of bf16 or 64 MiB of fp32, as in SuperOffload; enough to saturate a link."""


@dataclass(slots=True)
class Bucket:
    """Gradients that have arrived together.

    Attributes:
        is_kept: whether the gradients stay on the device, where the step will be made.
        states: their parameters.
        gradients: one for each, on the device.
        numel: elements of all.
    """

    is_kept: bool
    states: list[ParameterState] = field(default_factory=list)
    gradients: list[TakenGradient] = field(default_factory=list)
    numel: int = 0

    def add(self, state: ParameterState, gradient: TakenGradient) -> None:
        """Put a gradient in."""
        self.states.append(state)
        self.gradients.append(gradient)
        self.numel += state.shape.numel()

    def current(self) -> Bucket:
        """Return a bucket without what was given back, or dropped before another gradient of its parameter came."""
        bucket = Bucket(self.is_kept)
        for state, gradient in dict(zip(self.states, self.gradients, strict=True)).items():
            if not gradient.is_given:
                bucket.add(state, gradient)
        return bucket
