"""One step of a parameter whose state is resident on the device."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from superadam.kernels.native import Format


@dataclass(frozen=True, slots=True, eq=False)
class ResidentStep:
    """What one step of one parameter reads and writes: dense tensors on the device, in the memory order of its state.

    The state is fp32, or fp64 for fp64 parameters; fp32 state may be stored in fewer bits (`cpu/compact.h`).
    """

    master: Tensor  # of 24 bits: the upper 16 bits of fp32, as int16
    exp_avg: Tensor  # fp32, bf16, or 8-bit codes, as uint8
    exp_avg_sq: Tensor  # stored as exp_avg
    max_exp_avg_sq: Tensor | None  # None without amsgrad
    gradient: Tensor  # neither scaled nor clipped
    parameter: Tensor  # the working copy
    coefficients: int  # index into the coefficient sets
    exp_avg_exponents: Tensor | None = None  # of 8-bit moments: uint8, one for each 64 elements
    exp_avg_sq_exponents: Tensor | None = None
    master_low: Tensor | None = None  # of masters of 24 bits: the lower 8, as uint8
    first_threshold: int = 0  # from 0 to 63: of the first element, where state in fewer bits is rounded

    @property
    def format(self) -> Format:
        """How the state is stored."""
        form = Format.PLAIN if self.master_low is None else Format.MASTER_24BIT
        if self.exp_avg_exponents is not None:
            return form | Format.MOMENTS_8BIT
        return form | Format.MOMENTS_BFLOAT16 if self.exp_avg.dtype == torch.bfloat16 else form
