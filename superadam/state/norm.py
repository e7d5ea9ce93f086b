"""The norm of gradients, as sums and counts of their chunks; it knows numbers only."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from superadam.kernels import native


@dataclass(frozen=True, slots=True, eq=False)
class GradientNorm:
    """Of some gradients, as they arrived, one after another: an entry for each chunk of each.

    Attributes:
        sums: of squares.
        nonfinite: counts of Inf and NaN.
    """

    sums: npt.NDArray[np.float64]
    nonfinite: npt.NDArray[np.int64]

    @staticmethod
    def zeros(chunks: int) -> GradientNorm:
        """Return that of no gradient, with so many entries."""
        return GradientNorm(np.zeros(chunks, np.float64), np.zeros(chunks, np.int64))

    def copy(self) -> GradientNorm:
        """Return one of its own with the same entries."""
        return GradientNorm(self.sums.copy(), self.nonfinite.copy())

    def clear(self, where: slice = slice(None)) -> None:
        """Make entries those of no gradient."""
        self.sums[where] = 0
        self.nonfinite[where] = 0

    @property
    def total(self) -> float:
        """The 2-norm, added up in the order of the entries."""
        return math.sqrt(native.ordered_sum(self.sums))
