"""Checks steps of state on the GPU before the kernel of `adam.py` runs over them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from superadam.kernels.dtypes import DTYPES
from superadam.kernels.hyperparameters import Coefficients
from superadam.kernels.native import Dtype, Flag
from superadam.kernels.resident_step import ResidentStep

from .tensors import check_tensor, words


@dataclass(frozen=True, slots=True)
class Variant:
    """What the kernel is compiled for."""

    real: Dtype
    gradient: Dtype
    out: Dtype
    flags: Flag


ARRAYS = ("master", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "gradient", "parameter")
"""Arrays of a step in the order in which the kernel's table has them."""


def arrays_of(step: ResidentStep) -> tuple[Tensor | None, ...]:
    """Return a step's tensors in the order of `ARRAYS`."""
    return step.master, step.exp_avg, step.exp_avg_sq, step.max_exp_avg_sq, step.gradient, step.parameter


def checked_step(step: ResidentStep, name: str, sets: Sequence[Coefficients], device: torch.device) -> Variant:
    """Return a step's variant; raises ValueError or TypeError."""
    if not 0 <= step.coefficients < len(sets):
        raise ValueError(
            f"{name}'s coefficients is {step.coefficients}, expected the index of one of {len(sets)} sets; "
            "give every index an entry"
        )
    flags = sets[step.coefficients].flags
    dtypes: dict[str, Dtype] = {}
    for array, tensor in zip(ARRAYS, arrays_of(step), strict=True):
        if array == "max_exp_avg_sq" and Flag.AMSGRAD not in flags:
            continue
        if tensor is None:
            raise ValueError(f"{name} lacks {array}, which amsgrad uses; give it that tensor")
        check_tensor(tensor, f"{name}'s {array}", device)
        if tensor.numel() != step.master.numel():
            raise ValueError(
                f"{name}'s {array} has {tensor.numel()} elements, expected {step.master.numel()} as its master; "
                "give every tensor of a step the same length"
            )
        dtypes[array] = DTYPES[tensor.dtype]
    real = dtypes["master"]
    halves = () if real is Dtype.FLOAT64 else (Dtype.BFLOAT16, Dtype.FLOAT16)
    if real in halves or any(
        dtype is not real and not (array in ("gradient", "parameter") and dtype in halves)
        for array, dtype in dtypes.items()
    ):
        present = ", ".join(f"{array} {words(getattr(step, array).dtype)}" for array in dtypes)
        raise TypeError(
            f"{name} has {present}; expected float32 state with a gradient and a parameter of float32, bfloat16 or "
            "float16, or everything float64; convert what differs"
        )
    return Variant(real, dtypes["gradient"], dtypes["parameter"], flags)
