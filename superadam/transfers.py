"""Gradients on their way to the host and new values on their way back: what waits for what.

Everything of one bucket and dtype travels in one flat buffer. Owns the order of copies on the device's streams; where
memory comes from and how copies run is the device's.
"""

from __future__ import annotations

import collections
import threading
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from superadam import native
from superadam.devices import Device, Event, Stream
from superadam.devices.interface import ChunkSums
from superadam.flat import FlatLayout, aligned
from superadam.journal import Journal
from superadam.parameter import ParameterState, owned
from superadam.validation import GradientNorm


class FlatParcel:
    """New values of some parameters, in one flat buffer for each dtype; see `superadam.table.Parcel`."""

    def __init__(self, transfers: Transfers, states: Sequence[ParameterState]) -> None:
        self._transfers = transfers
        self._buffers: list[tuple[FlatLayout, Tensor]] = []
        values: dict[ParameterState, Tensor] = {}
        for dtype in {state.parameter_dtype: None for state in states}:
            layout = FlatLayout([state for state in states if state.parameter_dtype == dtype])
            buffer = transfers.device.host_empty(layout.numel, dtype)
            self._buffers.append((layout, buffer))
            values.update(zip(layout.states, layout.views(buffer), strict=True))
        self.values = [values[state] for state in states]

    def deliver(self) -> None:
        """Start the way of the values to their parameters."""
        self._transfers.upload(self._buffers)


@dataclass(frozen=True, slots=True)
class _Upload:
    """Values under way: which parameters get them, when they are there, and what the journal is told then."""

    arrived: Event
    parameters: frozenset[int]
    begin: float
    elements: int


@dataclass(frozen=True, slots=True)
class Held:
    """Gradients that stay on the device, and their norm on its way to the host.

    Attributes:
        states: the parameters, in the order of everything here.
        gradients: one for each, of our own, in the layout of the state.
        arrived: after which the norm may be read.
    """

    states: list[ParameterState]
    gradients: list[Tensor]
    arrived: Event
    buffers: list[Tensor]

    def norm(self) -> GradientNorm:
        """Return the norm, once it has arrived."""
        parts = [ChunkSums.over(buffer) for buffer in self.buffers]
        return GradientNorm(
            np.concatenate([part.sums.numpy() for part in parts]),
            np.concatenate([part.nonfinite.numpy() for part in parts]),
        )


class Transfers:
    """Downloads of gradients and uploads of parameters over one device.

    Args:
        device: streams and memory.
        journal: is told of bytes, and of uploads once they are seen to have arrived.
        link_dtype: in which gradients travel, and so are seen by norm and step; None for the dtype they have. fp64
            gradients always travel as they are.

    Attributes:
        link_dtype: may be changed between steps.
    """

    def __init__(self, device: Device, journal: Journal, link_dtype: torch.dtype | None = None) -> None:
        self.device = device
        self._journal = journal
        self.link_dtype = link_dtype
        self._lock = threading.Lock()  # the worker uploads while a forward inside backward waits
        self._uploads: list[_Upload] = []  # that the current stream does not wait for, in the order of their stream
        self._untold: collections.deque[_Upload] = collections.deque()  # not seen to have arrived, in that order
        self._latest: Event | None = None  # after every upload so far
        self._thread = threading.local()

    def reserve(self, parameters: Iterable[Tensor], bucket_numel: int) -> None:
        """Get host memory ready for the gradients of a step, and for buckets of this size.

        Raises:
            MemoryError: the host cannot hold that.
        """
        distant = [parameter for parameter in parameters if not self.device.is_host(parameter)]
        if not distant:
            return
        on_link = [_dtype_on_link(parameter, self.link_dtype).itemsize for parameter in distant]
        gradients = sum(aligned(one.numel()) * size for one, size in zip(distant, on_link, strict=True))
        largest = max(parameter.numel() for parameter in distant)
        widest = max(*on_link, *(parameter.element_size() for parameter in distant))
        self.device.reserve(gradients, aligned(bucket_numel + largest) * widest)  # the last one in makes a bucket full

    def download(
        self, states: Sequence[ParameterState], gradients: Sequence[Tensor], *, widens: bool = False
    ) -> tuple[list[Tensor], Event]:
        """Start the way of gradients to the host.

        Args:
            states: the parameters.
            gradients: one for each, on the device or on the host; they may be dropped afterwards.
            widens: whether these travel in fp32, whatever `link_dtype` is.

        Returns:
            tensors of our own in the layout of the states, and the event after which they may be read.

        Raises:
            TypeError, ValueError: a gradient does not fit its parameter.
        """
        device = self.device
        link_dtype = torch.float32 if widens else self.link_dtype
        hosts: dict[ParameterState, Tensor] = {}
        distant: dict[torch.dtype, dict[ParameterState, Tensor]] = {}
        for state, gradient in zip(states, gradients, strict=True):
            state.check_gradient(gradient)
            dtype = _dtype_on_link(gradient, link_dtype)
            if device.is_host(gradient):
                host = state.host_gradient(gradient)
                hosts[state] = owned(host if host.dtype is dtype else host.to(dtype))
            else:
                distant.setdefault(dtype, {})[state] = gradient
        packed: list[tuple[FlatLayout, Tensor]] = []
        for dtype, chosen in distant.items():
            layout = FlatLayout(list(chosen))
            packed.append((layout, device.pack(list(chosen.values()), layout, dtype)))
        # Also when every gradient is on the host already: `following_download` must have something to follow.
        device.wait(Stream.DOWNLOAD, device.record(Stream.CURRENT))
        for layout, source in packed:
            host = device.host_empty(layout.numel, source.dtype)
            self._download(host, source)
            hosts.update(zip(layout.states, layout.views(host), strict=True))
        return [hosts[state] for state in states], device.record(Stream.DOWNLOAD)

    def hold(self, states: Sequence[ParameterState], gradients: Sequence[Tensor]) -> Held:
        """Copy gradients within the device, so that they may be dropped, and start the way of their norm to the host.

        Args:
            states: the parameters.
            gradients: one for each, on the device.

        Raises:
            TypeError, ValueError: a gradient does not fit its parameter.
        """
        device = self.device
        chosen: dict[torch.dtype, dict[ParameterState, Tensor]] = {}
        for state, gradient in zip(states, gradients, strict=True):
            state.check_gradient(gradient)
            dtype = _dtype_on_link(gradient, self.link_dtype) if self.narrows else gradient.dtype
            chosen.setdefault(dtype, {})[state] = gradient
        held: dict[ParameterState, Tensor] = {}
        norms: list[Tensor] = []
        for dtype, some in chosen.items():
            layout = FlatLayout(list(some))
            chunks = sum(native.chunk_count(state.shape.numel()) for state in layout.states)
            norms.append(device.empty(2 * chunks, torch.float64, Stream.CURRENT))
            buffer = device.pack(list(some.values()), layout, dtype, ChunkSums.over(norms[-1]))
            held.update(zip(layout.states, layout.views(buffer), strict=True))
        device.wait(Stream.DOWNLOAD, device.record(Stream.CURRENT))
        hosts = [device.host_empty(norm.numel(), norm.dtype) for norm in norms]
        for host, norm in zip(hosts, norms, strict=True):
            self._download(host, norm)
        return Held(list(held), list(held.values()), device.record(Stream.DOWNLOAD), hosts)

    def _download(self, host: Tensor, source: Tensor) -> None:
        device = self.device
        device.copy(host, source, Stream.DOWNLOAD)
        device.keep(source, Stream.DOWNLOAD)
        device.keep(host, Stream.DOWNLOAD)  # nobody waits for the copy if the step is dropped before
        self._journal.statistics.downloaded_bytes += host.nbytes

    @property
    def narrows(self) -> bool:
        """Whether travelling may round gradients."""
        return self.link_dtype not in (None, torch.float32)

    def narrowed(self, gradient: Tensor) -> Tensor:
        """Return a gradient that does not travel, in its own dtype, with the values that it would have afterwards."""
        return gradient.to(_dtype_on_link(gradient, self.link_dtype)).to(gradient.dtype) if self.narrows else gradient

    def parcel(self, states: Sequence[ParameterState]) -> FlatParcel:
        """Return host memory for new values of these parameters."""
        return FlatParcel(self, states)

    def upload(self, buffers: Sequence[tuple[FlatLayout, Tensor]]) -> None:
        """Start the way of new values to their parameters."""
        device = self.device
        begin = time.perf_counter()
        if not getattr(self._thread, "follows_download", False):  # what reads the old values may still be under way
            device.wait(Stream.UPLOAD, device.record(Stream.CURRENT))
        for layout, host in buffers:
            try:
                arriving = device.empty(layout.numel, host.dtype, Stream.UPLOAD)
            except torch.OutOfMemoryError:  # slower, but the state has made this step already
                for state, view in zip(layout.states, layout.views(host), strict=True):
                    device.copy(state.parameter.data, view, Stream.UPLOAD)
            else:
                device.copy(arriving, host, Stream.UPLOAD)
                device.scatter(arriving, layout, Stream.UPLOAD)
                device.keep(arriving, Stream.UPLOAD)
            device.keep(host, Stream.UPLOAD)
            self._journal.statistics.uploaded_bytes += host.nbytes
        parameters = frozenset(id(state.parameter) for layout, _ in buffers for state in layout.states)
        elements = sum(state.shape.numel() for layout, _ in buffers for state in layout.states)
        with self._lock:
            self._latest = device.record(Stream.UPLOAD)
            upload = _Upload(self._latest, parameters, begin, elements)
            self._uploads.append(upload)
            self._untold.append(upload)
        self.note_arrived()

    @contextmanager
    def following_download(self) -> Iterator[None]:
        """Upload without waiting for the current stream: before the download, it passed the last use of old values."""
        self._thread.follows_download = True
        try:
            yield
        finally:
            self._thread.follows_download = False

    def await_parameters(self, parameters: Collection[int] | None = None) -> None:
        """Let the current stream wait for the uploads of parameters.

        Args:
            parameters: their ids; default all.
        """
        with self._lock:
            due = [
                index
                for index, upload in enumerate(self._uploads)
                if parameters is None or not upload.parameters.isdisjoint(parameters)
            ]
            if not due:
                return
            last = self._uploads[due[-1]]  # the others arrive before it
            del self._uploads[: due[-1] + 1]
        self.device.wait(Stream.CURRENT, last.arrived)

    @property
    def is_awaited(self) -> bool:
        """Whether the current stream waits for every upload."""
        return not self._uploads

    def settle(self) -> None:
        """Return when every upload has arrived, those that the current stream waits for as well."""
        latest = self._latest
        if latest is not None:
            latest.synchronize()
        self.note_arrived()

    def note_arrived(self) -> None:
        """Tell the journal of uploads that have arrived since: nobody waits for them on the host, so we look now."""
        with self._lock:
            while self._untold and self._untold[0].arrived.query():
                upload = self._untold.popleft()
                self._journal.note_upload(upload.begin, upload.elements)


def _dtype_on_link(gradient: Tensor, link_dtype: torch.dtype | None) -> torch.dtype:
    return gradient.dtype if link_dtype is None or gradient.dtype == torch.float64 else link_dtype
