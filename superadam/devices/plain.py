"""The device of models that lie in host memory: everything is done when the call returns.

Gradients need no copy and parameters are written where they are, so that here a schedule only moves work to another
thread.
"""

from __future__ import annotations

import torch
from torch import Tensor

from superadam.devices.interface import Device, Event, Stream


class PassedEvent:
    """The event of a stream that never has anything left to do."""

    def synchronize(self) -> None:
        """Return at once."""


class PlainDevice(Device):
    """Host memory; the streams are all the same: the calling thread."""

    def is_host(self, tensor: Tensor) -> bool:
        """Whether the tensor is on the CPU."""
        return tensor.device.type == "cpu"

    def stage(self, tensor: Tensor) -> Tensor:
        """Return the tensor itself: it stays valid while somebody holds it."""
        return tensor

    def host_empty(self, like: Tensor, dtype: torch.dtype) -> Tensor:
        """Return pageable memory."""
        return torch.empty_like(like, dtype=dtype, device="cpu", requires_grad=False)

    def copy(self, destination: Tensor, source: Tensor, stream: Stream) -> None:
        """Copy now."""
        with torch.no_grad():
            destination.copy_(source)

    def record(self, stream: Stream) -> Event:
        """Return an event that has passed."""
        return PassedEvent()

    def wait(self, stream: Stream, event: Event) -> None:
        """Return at once."""

    def keep(self, tensor: Tensor, stream: Stream) -> None:
        """Return at once."""
