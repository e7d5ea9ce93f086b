"""Stand-ins for what a taken gradient belongs to."""

from dataclasses import dataclass, field

from torch import Tensor

from superadam.handles.taken_gradient import GradientHolder, TakenGradient


class Owner:
    def __init__(self, parameter: Tensor) -> None:
        self.parameter = parameter


@dataclass(eq=False)
class NotingHolder(GradientHolder):
    """Notes what it is told; `count` is of elements that are not finite."""

    count: int | None = None
    norms: list[TakenGradient] = field(default_factory=list)
    given: list[TakenGradient] = field(default_factory=list)

    def _nonfinite_of(self, taken: TakenGradient) -> int | None:
        return self.count

    def _norm_was_asked(self, taken: TakenGradient) -> None:
        self.norms.append(taken)

    def _was_given_back(self, taken: TakenGradient) -> None:
        self.given.append(taken)
