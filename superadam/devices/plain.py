"""The device of models in host memory: everything is done when the call returns.

Gradients stay where they are and new values are copied within host memory, so that a schedule only moves work to
another thread. Gradients and parameters of another accelerator are copied by torch, which overlaps nothing. One that
computes with copies of the parameters may still be copying gradients here when hooks see them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from superadam.devices.flat import FlatLayout
from superadam.devices.interface import AllEvents, ChunkSums, Device, Event, Stream
from superadam.kernels.copies import copy_each


class AcceleratorEvent:
    """The present end of the calling thread's current stream, for threads whose current device is another one."""

    __slots__ = ("_device", "_event", "_module")

    def __init__(self, kind: torch.device) -> None:
        self._module: Any = torch.get_device_module(kind)
        self._device = self._module.current_device()
        options = {"blocking": True} if kind.type == "cuda" else {}  # waiting for it sleeps
        self._event = self._module.Event(**options)
        self._event.record()

    def query(self) -> bool:
        with self._module.device(self._device):
            return bool(self._event.query())

    def synchronize(self) -> None:
        with self._module.device(self._device):
            self._event.synchronize()


class PlainDevice(Device):
    """Host memory; every stream is the calling thread."""

    has_link = False

    def idle_cores(self) -> int:
        """Return how many CPU cores torch leaves free."""
        return max(0, super().idle_cores() - torch.get_num_threads())

    def mark_ready(self, parameter: Tensor) -> Event | None:
        """Return an event of the accelerator that may be copying the gradient; None while nothing has used one."""
        kind = torch.accelerator.current_accelerator()
        if kind is None or not torch.get_device_module(kind).is_initialized():
            return None
        return AcceleratorEvent(kind)

    def pack(
        self, gradients: Sequence[Tensor], layout: FlatLayout[Any], dtype: torch.dtype, norm: ChunkSums | None = None
    ) -> Tensor:
        buffer = torch.empty(layout.numel, dtype=dtype, device="cpu")
        for view, gradient in zip(layout.views(buffer), gradients, strict=True):
            view.copy_(gradient.detach())
        return buffer

    @torch.no_grad()
    def scatter(self, sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
        copy_each([target.data for target in targets], sources)

    def host_empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(numel, dtype=dtype, device="cpu")

    def empty(self, numel: int, dtype: torch.dtype, stream: Stream) -> Tensor:
        return torch.empty(numel, dtype=dtype, device="cpu")

    def copy(self, destination: Tensor, source: Tensor, stream: Stream) -> None:
        destination.copy_(source)

    def record(self, stream: Stream) -> Event:
        return AllEvents()

    def wait(self, stream: Stream, event: Event) -> None:
        event.synchronize()

    def record_stream(self, buffer: Tensor, stream: Stream) -> None:
        pass
