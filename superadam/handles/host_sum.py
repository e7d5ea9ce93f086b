"""The sum of a gradient's micro-batches on the host, to which they travel while the model computes."""

from __future__ import annotations

import collections
import threading
from typing import Any

import torch
from torch import Tensor

from superadam.host.signals import deferred_signals
from superadam.kernels import native


class HostSum:
    """An event that has passed once every gradient that was sent is in `total`: whoever waits for it adds them.

    Gradients are added in the order in which they were sent, in the dtype of `total`. Where that `is_empty`, the first
    one replaces what it holds.
    """

    def __init__(self, total: Tensor, *, is_empty: bool) -> None:
        self.total, self._is_empty = total, is_empty
        self._parts: collections.deque[tuple[Tensor, Any]] = collections.deque()
        self._lock = threading.Lock()

    def add(self, part: Tensor, arrived: Any) -> None:
        """Let a gradient on the host be added once the event `arrived` has passed."""
        self._parts.append((part, arrived))

    def query(self) -> bool:
        """Return whether all have arrived, so that waiting only adds them."""
        return all(arrived.query() for _, arrived in [*self._parts])

    @torch.no_grad()
    def synchronize(self) -> None:
        """Add those that were not added yet, once they have arrived; in any thread."""
        with deferred_signals(), self._lock, native.usual_float_mode():
            while self._parts:
                part, arrived = self._parts[0]
                arrived.synchronize()
                (self.total.copy_ if self._is_empty else self.total.add_)(part)
                self._is_empty = False
                self._parts.popleft()
