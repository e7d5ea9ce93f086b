"""The step of a parameter whose state is on the device: what `devices` and the GPU's kernel are asked to do."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


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
