"""Gradient accumulation: which gradient of a parameter is the last one before `step()`.

A wrong answer costs time, never bits: a gradient that is taken too early is given back when autograd adds to it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

PAUSE_STEPS = 16  # in which nothing is taken, after a step whose gradients were mostly edited before it


class Accumulation:
    """Learns from each step how many gradients every parameter gets in the next one.

    Attributes:
        sum_dtype: in which gradients are to be added up on the host; None to add them in `.grad`.
    """

    def __init__(self) -> None:
        self.sum_dtype: torch.dtype | None = None
        self._is_inside = False
        self._is_announced = False  # this step's backwards are announced by accumulate()
        self._expected: dict[int, int] = {}
        self._counts: dict[int, int] = {}
        self._pause = 0

    @contextmanager
    def accumulate(self, dtype: torch.dtype | None) -> Iterator[None]:
        """As `OffloadScheduler.accumulate`."""
        if dtype not in (None, torch.float32):
            raise ValueError(f"accumulate() got dtype {dtype}, expected None (that of .grad) or torch.float32")
        before = self._is_inside, self.sum_dtype
        self._is_inside, self.sum_dtype, self._is_announced = True, dtype, True
        try:
            yield
        finally:
            self._is_inside, self.sum_dtype = before

    def is_last(self, parameter: int, *, is_first: bool) -> bool:
        """Count a gradient, and return whether no further one is expected before `step()`.

        `parameter` is an id; `is_first` says whether the gradient was not added to an earlier one.
        """
        count = 1 if is_first else self._counts.get(parameter, 0) + 1
        self._counts[parameter] = count
        if self._is_inside or self._pause:
            return False
        return self._is_announced or count >= self._expected.get(parameter, 1)

    def end_step(self, *, is_edited: bool) -> None:
        """End a step; `is_edited` says whether most gradients that were taken were written to before it."""
        self._expected = {} if self._is_announced else self._counts
        self._counts = {}
        self._is_announced = False
        self._pause = PAUSE_STEPS if is_edited else max(0, self._pause - 1)
