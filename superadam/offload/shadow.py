"""New values of a bucket until the verdict: written on the host, and sent to the device where that has room."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from superadam.devices import Device, Event, Stream
from superadam.devices.flat import FlatLayout
from superadam.state.parameter import Piece, Slot
from superadam.state.uncertain import HostPatch, Patch


class Link(Protocol):
    """The way of new values to the device.

    Attributes:
        device: that holds the parameters.
        is_short: whether it has no memory for new values, so that they wait on the host.
    """

    device: Device
    is_short: bool

    def room_on_device(self, numel: int, dtype: torch.dtype) -> Tensor | None:
        """Return memory on the device, or None where it has none."""

    def upload(self, host: Tensor, distant: Tensor) -> Event:
        """Start the upload of new values; return the event after which they may be read on the device."""


class FlatShadow:
    """New values of pieces of one dtype in one flat buffer; a `superadam.state.parameter.Shadow`.

    Args:
        memory: on the device, where the values go as soon as they are written; None to wait on the host.
        host: a flat buffer for them, and what it is a part of; without, one is allocated when it is first needed.
    """

    def __init__(
        self,
        link: Link,
        layout: FlatLayout[Piece],
        memory: Tensor | None = None,
        host: Sequence[Tensor] = (),
    ) -> None:
        self._link = link
        self._layout = layout
        self._dtype = layout.states[0].parameter_dtype
        self._memory = memory
        self._travels = link.device.has_link and not link.device.is_host(layout.states[0].state.local)
        self._host = [*host]
        self._views: list[Tensor] = []
        self._arrived: Event | None = None

    @property
    def values(self) -> list[Tensor]:
        """One host tensor for each piece."""
        if not self._views:
            self._host = self._host or [self._link.device.host_empty(self._layout.numel, self._dtype)]
            self._views = self._layout.views(self._host[0])
        return self._views

    def slots(self) -> dict[Piece, Slot]:
        """Return where the value of each piece lies."""
        return {piece: Slot(self, position) for position, piece in enumerate(self._layout.states)}

    @property
    def has_arrived(self) -> bool:
        """Whether publishing it would wait for no copy."""
        return not self._travels or (self._arrived is not None and self._arrived.query())

    def send(self) -> None:
        """Start the upload of the values, if they have memory on the device."""
        if self._memory is not None and self._arrived is None:
            distant = self._memory.view(self._dtype)[: self._layout.numel]
            self._arrived = self._link.upload(self._host[0], distant)
            self._host, self._views = [], self._layout.views(distant)

    def patch(self, positions: Sequence[int], counts: Sequence[int]) -> Patch:
        """Return what is put into the values, or follows them to the device."""
        if self._arrived is None:
            return HostPatch([self.values[position] for position in positions], counts)
        return _SentPatch(self._link, self, [self._layout.offsets[one] for one in positions], counts, self._dtype)

    def put(self, index: Tensor, values: Tensor, arrived: Event) -> None:
        """Replace values on the device by others, behind the event and everything that writes them."""
        device = self._link.device
        assert self._memory is not None
        assert self._arrived is not None
        for event in (self._arrived, arrived):
            device.wait(Stream.CURRENT, event)
        device.record_stream(self._memory, Stream.CURRENT)
        device.put(self._memory.view(self._dtype)[: self._layout.numel], index, values)

    def sources(self) -> list[Tensor]:
        """Return what to publish, which the current stream may read: on the device where that has room for it."""
        device = self._link.device
        if self._travels and self._memory is None and not self._link.is_short:
            self._memory = self._link.room_on_device(self._layout.numel, self._dtype)
            if self._memory is not None:  # it may be used by what the current stream has still to do
                device.wait(Stream.UPLOAD, device.record(Stream.CURRENT))
        self.send()
        if self._arrived is not None:
            device.wait(Stream.CURRENT, self._arrived)
            assert self._memory is not None
            device.record_stream(self._memory, Stream.CURRENT)
        return self._views

    def keep_published(self) -> None:
        """Keep memory of the host, which a copy under way may read, until the current stream has passed that."""
        if self._travels and self._arrived is None:
            self._link.device.record_stream(self._host[0], Stream.CURRENT)


class _SentPatch:
    """A `superadam.state.uncertain.Patch` of values that are on the device already, or on their way."""

    def __init__(
        self,
        link: Link,
        shadow: FlatShadow,
        offsets: Sequence[int],
        counts: Sequence[int],
        dtype: torch.dtype,
    ) -> None:
        device, total = link.device, sum(counts)
        self._link, self._shadow, self._offsets = link, shadow, offsets
        self._host = [device.host_empty(total, one) for one in (torch.int64, dtype)]
        self._distant = [device.empty(total, one, Stream.CURRENT) for one in (torch.int64, dtype)]
        self.values: Sequence[Tensor] = torch.split(self._host[1], [*counts])
        self.targets: Sequence[Tensor | None] = [None] * len(counts)

    def send(self, indices: Sequence[npt.NDArray[np.uint32]]) -> None:
        """Let the values and where they go travel to the device, and replace what is there."""
        np.concatenate(
            [index.astype(np.int64) + offset for index, offset in zip(indices, self._offsets, strict=True)],
            out=self._host[0].numpy(),
        )
        device = self._link.device
        device.wait(Stream.UPLOAD, device.record(Stream.CURRENT))  # which may use this memory until then
        arrived = [self._link.upload(*pair) for pair in zip(self._host, self._distant, strict=True)][-1]
        self._shadow.put(self._distant[0], self._distant[1], arrived)
