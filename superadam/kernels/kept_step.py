"""The step of a parameter whose state is on the device, and what can make it there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor

from superadam.kernels.hyperparameters import Coefficients


@dataclass(frozen=True, slots=True, eq=False)
class KeptStep:
    """State on the device, and what a step reads and writes beside it.

    All tensors are dense, lie on the device and have the parameter's elements in the order of memory of its state.

    Attributes:
        master, exp_avg, exp_avg_sq: the state, fp32, or fp64 for fp64 parameters.
        max_exp_avg_sq: with amsgrad.
        gradient: of the step, neither scaled nor clipped.
        parameter: the working copy.
        coefficients: index of the step's coefficients.
    """

    master: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    max_exp_avg_sq: Tensor | None
    gradient: Tensor
    parameter: Tensor
    coefficients: int


@runtime_checkable
class StepsInPlace(Protocol):
    """A device that can make steps where the model is.

    Attributes:
        can_update: whether it can indeed: a GPU needs Triton.
    """

    can_update: bool

    def update(self, steps: Sequence[KeptStep], sets: Sequence[Coefficients]) -> None:
        """Enqueue steps in place to the current stream, past version counters.

        Args:
            steps: of distinct parameters.
            sets: coefficients that the steps index.
        """
