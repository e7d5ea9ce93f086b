"""One step of a parameter whose state is resident on the device."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class ResidentStep:
    """What one step of one parameter reads and writes: dense tensors on the device, in the memory order of its state.

    The state is fp32, or fp64 for fp64 parameters.
    """

    master: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    max_exp_avg_sq: Tensor | None  # None without amsgrad
    gradient: Tensor  # neither scaled nor clipped
    parameter: Tensor  # the working copy
    coefficients: int  # index into the coefficient sets
