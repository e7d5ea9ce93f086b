"""How many backwards make a step: which gradient of a parameter is the last one before `step()`.

Owns counts only. What it says wrongly costs time, never bits: a gradient that is taken too early is given back when
autograd adds to it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

PAUSE_STEPS = 16
"""Steps in which nothing is taken, after one whose gradients were mostly edited before `step()`."""


class Accumulation:
    """Learns from each step how many gradients every parameter gets in the next one.

    Attributes:
        sum_dtype: in which gradients are to be added up on the host at the moment; None for `.grad`'s own.
    """

    def __init__(self) -> None:
        self.sum_dtype: torch.dtype | None = None
        self._is_inside = False
        self._is_told = False  # this step's backwards are announced by accumulate()
        self._expected: dict[int, int] = {}
        self._counts: dict[int, int] = {}
        self._pause = 0

    @contextmanager
    def accumulate(self, dtype: torch.dtype | None) -> Iterator[None]:
        """Tell that the backwards inside are not the last ones of their step.

        Args:
            dtype: None for sums in `.grad`, in its dtype; torch.float32 for sums on the host, which are fp64 for fp64
                parameters.

        Raises:
            ValueError: another dtype.
        """
        if dtype not in (None, torch.float32):
            raise ValueError(f"accumulate() got dtype {dtype}, expected None (that of .grad) or torch.float32")
        before = self._is_inside, self.sum_dtype
        self._is_inside, self.sum_dtype, self._is_told = True, dtype, True
        try:
            yield
        finally:
            self._is_inside, self.sum_dtype = before

    def is_last(self, parameter: int, *, is_first: bool) -> bool:
        """Count a gradient, and return whether no other one is expected before `step()`.

        Args:
            parameter: its id.
            is_first: whether the gradient was added to none of before.
        """
        count = 1 if is_first else self._counts.get(parameter, 0) + 1
        self._counts[parameter] = count
        if self._is_inside or self._pause:
            return False
        return self._is_told or count >= self._expected.get(parameter, 1)

    def end_step(self, *, is_edited: bool) -> None:
        """A step was made.

        Args:
            is_edited: whether most gradients that were taken were written to before it.
        """
        self._expected = {} if self._is_told else self._counts
        self._counts = {}
        self._is_told = False
        self._pause = PAUSE_STEPS if is_edited else max(0, self._pause - 1)
