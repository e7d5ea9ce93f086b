"""One step of a parameter whose state is resident on the device, and the interface of devices that can run it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor

from superadam.kernels.hyperparameters import Coefficients


@dataclass(frozen=True, slots=True, eq=False)
class ResidentStep:
    """What one step of one parameter reads and writes on the device.

    All tensors are dense, on the device, and have the elements of the parameter in the memory order of its state. The
    state is fp32, or fp64 for fp64 parameters.
    """

    master: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    max_exp_avg_sq: Tensor | None  # None without amsgrad
    gradient: Tensor  # neither scaled nor clipped
    parameter: Tensor  # the working copy
    coefficients: int  # index into the coefficient sets


@runtime_checkable
class StepsInPlace(Protocol):
    """A device that can run steps where the model is."""

    can_update: bool
    """Whether it really can: a GPU needs Triton."""

    def update(self, steps: Sequence[ResidentStep], sets: Sequence[Coefficients]) -> None:
        """Enqueue steps of distinct parameters to the current stream, past version counters; they index `sets`."""
