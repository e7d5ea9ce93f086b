"""Gradients of several micro-batches, added up: in `.grad` as autograd does, or on the host in the dtype of masters.

Owns the sums on the host. Micro-batches are added in the order in which they come.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from superadam.parameter import ParameterState


class Accumulation:
    """Whether gradients are being added up, and the sums so far.

    Attributes:
        is_in_grad: whether gradients are to stay where autograd adds them up.
        is_at_work: whether a gradient that comes now may have to be added to others.
        sums: on the host, per parameter.
    """

    def __init__(self) -> None:
        self.is_in_grad = False
        self.is_at_work = False
        self._is_on_host = False
        self.sums: dict[Tensor, Tensor] = {}  # the state of a parameter may be bound anew between micro-batches

    @contextmanager
    def during(self, dtype: torch.dtype | None) -> Iterator[None]:
        """Add up the gradients that come inside.

        Args:
            dtype: None for sums in `.grad`, in its dtype; torch.float32 for sums on the host, which are fp64 for fp64
                parameters.

        Raises:
            ValueError: another dtype.
        """
        if dtype not in (None, torch.float32):
            raise ValueError(f"accumulate() got dtype {dtype}, expected None (that of .grad) or torch.float32")
        before = self.is_in_grad, self._is_on_host
        self.is_in_grad, self._is_on_host = dtype is None, dtype is not None
        self._note_work()
        try:
            yield
        finally:
            self.is_in_grad, self._is_on_host = before
            self._note_work()

    def add(self, state: ParameterState, gradient: Tensor) -> Tensor | None:
        """Return a gradient together with what was summed before it; None while there is more to come.

        Raises:
            TypeError, ValueError: the gradient cannot be added, because it does not fit its parameter.
        """
        total = self.sums.get(state.parameter)
        if total is None and not self._is_on_host:
            return gradient
        state.check_gradient(gradient)
        copied = state.host_copy(gradient, state.dtype)
        total = copied if total is None else total.add_(copied)
        if self._is_on_host:
            self.sums[state.parameter] = total
            return None
        self.sums.pop(state.parameter, None)
        self._note_work()
        return total

    def take(self) -> dict[Tensor, Tensor]:
        """Return the sums that no further gradient has come for, and forget them."""
        taken, self.sums = self.sums, {}
        self._note_work()
        return taken

    def _note_work(self) -> None:
        self.is_at_work = self._is_on_host or bool(self.sums)
