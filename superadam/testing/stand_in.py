"""The computations of GPU kernels, made by the CPU's kernels, for devices that stand in for a GPU."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from superadam.devices.interface import ChunkSums
from superadam.kernels import native
from superadam.kernels.dtypes import DTYPES
from superadam.kernels.hyperparameters import Coefficients
from superadam.kernels.native import Pass
from superadam.kernels.resident_step import ResidentStep
from superadam.state.parameter import ARRAYS


def update(steps: Sequence[ResidentStep], sets: Sequence[Coefficients]) -> None:
    """Make steps in place; see `superadam.devices.Device.update`."""
    segments = np.zeros(len(steps), native.SEGMENT)
    for segment, step in zip(segments, steps, strict=True):
        segment["length"] = step.master.numel()
        for name in (*ARRAYS, "gradient"):
            tensor = getattr(step, name)
            segment[name] = 0 if tensor is None else tensor.data_ptr()
        segment["gradient_dtype"] = DTYPES[step.gradient.dtype]
        segment["format"], segment["first_threshold"] = step.format, step.first_threshold
        segment["out"], segment["out_dtype"] = step.parameter.data_ptr(), DTYPES[step.parameter.dtype]
        segment["coefficients"] = step.coefficients
    native.run(Pass.UPDATE, segments, np.array([coefficients.row() for coefficients in sets], native.COEFFICIENTS))


def take_norm(gradients: Sequence[Tensor], norm: ChunkSums) -> None:
    """Write the norm of dense gradients, one after another."""
    segments = np.zeros(len(gradients), native.SEGMENT)
    begin = 0
    for segment, gradient in zip(segments, gradients, strict=True):
        segment["length"], segment["gradient"] = gradient.numel(), gradient.data_ptr()
        segment["gradient_dtype"] = DTYPES[gradient.dtype]
        segment["sums"], segment["nonfinite"] = norm.sums[begin:].data_ptr(), norm.nonfinite[begin:].data_ptr()
        begin += native.chunk_count(gradient.numel())
    native.run(Pass.NORM, segments)
