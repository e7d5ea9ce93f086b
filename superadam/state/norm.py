"""Gradient norms, kept as a sum of squares and a count of non-finite elements for each chunk."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from superadam.kernels import native


@dataclass(frozen=True, slots=True, eq=False)
class GradientNorm:
    """Sum of squares and number of Inf and NaN for each chunk of each gradient, in order."""

    sums: npt.NDArray[np.float64]
    nonfinite: npt.NDArray[np.int64]

    @staticmethod
    def zeros(chunks: int) -> GradientNorm:
        """Return a norm of this number of chunks, all zero."""
        return GradientNorm(np.zeros(chunks, np.float64), np.zeros(chunks, np.int64))

    def copy(self) -> GradientNorm:
        """Return an independent copy."""
        return GradientNorm(self.sums.copy(), self.nonfinite.copy())

    def clear(self, where: slice = slice(None)) -> None:
        """Set entries to zero."""
        self.sums[where] = 0
        self.nonfinite[where] = 0

    def scale(self, where: slice, factor: float) -> None:
        """Multiply the gradients of these entries by a factor, an fp32 number that is not 0."""
        self.sums[where] *= factor * factor

    @property
    def count(self) -> int:
        """Number of Inf and NaN."""
        return int(self.nonfinite.sum())

    @property
    def total(self) -> float:
        """The 2-norm, summed in the order of the entries."""
        return math.sqrt(native.ordered_sum(self.sums))
