"""Copies between host and device: gradients come down, new values go up, in one flat buffer per bucket and dtype."""

from __future__ import annotations

import collections
import operator
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from superadam.devices import Device, Event, Stream
from superadam.devices.flat import FlatLayout
from superadam.devices.interface import AllEvents, ChunkSums
from superadam.handles.taken_gradient import TakenGradient, needs_present_mode
from superadam.host.signals import THIS_THREAD
from superadam.kernels import native
from superadam.kernels.hyperparameters import Hyperparameters
from superadam.kernels.torch_private import MayLackMemory, foreach_norm, is_short_of_memory
from superadam.offload.placement import PACKED_UNDER_WAY, room_for_new_values
from superadam.offload.statistics import OverlapStatistics
from superadam.offload.trace import Span, Trace
from superadam.state.new_values import NewValues, Shadow
from superadam.state.parameter import ParameterState, Pending, Piece, Slot
from superadam.state.table import GradientNorm
from superadam.step.outcome import tell


class _HeldBytes:
    """Counts bytes that become free in about the order in which they were taken.

    It stores running totals, subtracts nothing and takes no lock, so that no interrupt or finalizer can corrupt it.
    Holders are weak references, unless `is_free` tells of others.
    """

    def __init__(self, is_free: Callable[[Any], bool] = lambda reference: reference() is None) -> None:
        self._is_free = is_free
        self._holders: collections.deque[tuple[Any, int, int]] = collections.deque()

    def add(self, holder: Any, size: int) -> None:
        """Count bytes until their holder is free."""
        begin = self._holders[-1][2] if self._holders else 0
        self._holders.append((holder, begin, begin + size))

    def oldest(self, number: int) -> Any:
        """Return the holder that came first; None where there are fewer than `number`, of which none is free."""
        return self._holders[0][0] if self.size and len(self._holders) >= number else None

    @property
    def size(self) -> int:
        """Bytes whose holders are not free."""
        while self._holders:
            first = self._holders[0]
            if not self._is_free(first[0]):
                return self._holders[-1][2] - first[1]
            with suppress(ValueError):  # another thread was here
                self._holders.remove(first)
        return 0


class Transfers(NewValues):
    """Copies of gradients and new values for one device, which overlap with the model's work.

    Attributes:
        transfer_dtype: in which gradients travel, and so are seen by norm and step; None for their own. fp64 gradients,
            and those that count unrounded, stay as they are.
        statistics, trace: of the scheduler.
        computes_norms: whether torch computes the norms of gradients before they travel, for programs that ask.
        is_short: whether the device has no memory for all new values of a step. Those of the first buckets then wait
            on the host, and the host waits for the link instead of packing far ahead.
    """

    def __init__(
        self, device: Device, statistics: OverlapStatistics, trace: Trace, transfer_dtype: torch.dtype | None = None
    ) -> None:
        super().__init__(device)
        self.transfer_dtype = transfer_dtype
        self.computes_norms = False
        # Packed gradients, by the events with which they have left, or by references to the values that replace them.
        self._leaving, self._reused = _HeldBytes(operator.methodcaller("query")), _HeldBytes()
        self._most_packed = self._largest = 0  # on the device at once; one bucket
        self._travelled = self._most_travelled = 0  # bytes packed in a step, since a bucket came again: in one backward
        self._packed: set[int] = set()  # the first row of each of its buckets
        self._room = 0  # for new values on the device, where it is short
        self.statistics, self.trace = statistics, trace
        self._lock = threading.Lock()  # the worker uploads while the training thread publishes
        self._untold: collections.deque[tuple[Event, float, int]] = collections.deque()  # uploads not seen to arrive
        self._shadows = _HeldBytes()  # by references to them

    # ---- gradients ---------------------------------------------------------------------------------------------------

    def download(
        self, gradients: Mapping[Piece, TakenGradient], hyper: Sequence[Hyperparameters], speculated: Set[Piece]
    ) -> tuple[dict[Piece, Pending], Event]:
        """Start the download of pieces of these gradients, and find memory for the new values of the `speculated` ones.

        Returns their records, and the event after which their gradients may be read. The current stream waits already
        for what makes the gradients on the device. `hyper` is by row.
        """
        device = self.device
        records: dict[Piece, Pending] = {}
        under_way: dict[Event, None] = {}  # copies to the host that were begun before
        local: dict[tuple[torch.dtype, bool] | None, dict[Piece, TakenGradient]] = {}
        groups: dict[tuple[torch.dtype, torch.dtype, torch.dtype], dict[Piece, TakenGradient]] = {}
        for piece, taken in gradients.items():
            taken.in_use = True
            state, gradient = piece.state, taken.pending
            if device.is_host(gradient):
                if not state.has_layout(gradient):
                    gradient = taken.ready()
                if taken.arrived is not None:
                    under_way[taken.arrived] = None
                taken.pending = state.host_gradient(gradient)
                key = (state.parameter_dtype, device.is_host(state.local)) if piece in speculated else None
                local.setdefault(key, {})[piece] = taken
            else:
                dtype = gradient.dtype if taken.is_unrounded else dtype_on_link(gradient, self.transfer_dtype)
                groups.setdefault((gradient.dtype, dtype, state.parameter_dtype), {})[piece] = taken
        for key, group in local.items():
            shadow = None if key is None else self.shadow(self._layout_of(tuple(group)))
            here = [piece.elements_of(taken.pending) for piece, taken in group.items()]
            records |= _records(group, here, hyper, speculated, shadow)
        leaving = 0
        packed: list[tuple[FlatLayout[Piece], dict[Piece, TakenGradient], Tensor, Shadow | None]] = []
        for (_, dtype, parameter_dtype), group in groups.items():
            layout = self._layout_of(tuple(group))
            source = self._pack(group, layout, dtype)
            memory = shadow = None
            if not speculated.isdisjoint(group):
                memory = self._shadow_on_device(source, layout.numel, parameter_dtype)
                shadow = self.shadow(layout, memory)
                if memory is source:
                    self._reused.add(weakref.ref(shadow), source.nbytes)
            leaving += 0 if memory is source else source.nbytes
            packed.append((layout, group, source, shadow))
        if not packed:
            return records, AllEvents(tuple(under_way))
        self._compute_norms([taken for _, group, _, _ in packed for taken in group.values()])
        hosts, arrived = self._send_to_host([source for _, _, source, _ in packed])
        for (layout, group, _, shadow), host in zip(packed, hosts, strict=True):
            there = layout.views(host)
            records |= _records(group, there, hyper, speculated, shadow)
            _move(group, there, arrived)
        if leaving:
            self._leaving.add(arrived, leaving)
        self._most_packed = max(self._most_packed, self._leaving.size + self._reused.size)
        return records, AllEvents((*under_way, arrived)) if under_way else arrived

    def _pack(self, group: Mapping[Piece, TakenGradient], layout: FlatLayout[Piece], dtype: torch.dtype) -> Tensor:
        """Return gradients in one buffer on the device, once few others wait for the link where memory is short."""
        if self.is_short:
            self._let_leave(PACKED_UNDER_WAY)
        try:
            packed = self.device.pack(self._present(group), layout, dtype)
        except Exception as error:
            if not is_short_of_memory(error):
                raise
            self.is_short, self._room = True, 0
            self._let_leave(0)
            packed = self.device.pack(self._present(group), layout, dtype)
        self._largest = max(self._largest, packed.nbytes)
        if (first := layout.states[0].row) in self._packed:  # whose new values take the place of those before
            self._packed, self._travelled = set(), 0
        self._packed.add(first)
        self._travelled += packed.nbytes
        return packed

    def _present(self, group: Mapping[Piece, TakenGradient]) -> list[Tensor]:
        """Return the gradients of pieces on the device; those of cut parameters are first put in their memory order."""
        for piece, taken in group.items():
            state = piece.state
            if state is not piece and taken.pending.stride() != state.strides:
                layout = FlatLayout([state])
                taken.pending = layout.views(self.device.pack([taken.pending], layout, taken.pending.dtype))[0]
        return [piece.elements_of(taken.pending) for piece, taken in group.items()]

    def _let_leave(self, most: int) -> None:
        while (arrived := self._leaving.oldest(most + 1)) is not None:
            arrived.synchronize()

    def bytes_without_room(self) -> int:
        """Find out whether the device has memory for the new values of steps like this.

        Returns the bytes of them that wait on the host from now on; 0 where nothing changes.
        """
        travelled, self._travelled, self._packed = self._travelled, 0, set()
        if travelled <= self._most_travelled:
            return 0
        self._most_travelled = travelled
        room = room_for_new_values(travelled, self._most_packed, self._largest, self.device.free_bytes())
        if room is None or self.is_short:
            return 0
        self.is_short, self._room = True, room
        return max(0, travelled - self._room)

    def _shadow_on_device(self, packed: Tensor, numel: int, dtype: torch.dtype) -> Tensor | None:
        """Return memory on the device for new values, that of the packed gradients if it is large enough, or None."""
        if self.is_short and self._most_travelled - self._travelled + packed.nbytes > self._room:
            return None  # the last buckets of a step have the room: the step waits for them
        if packed.dtype.itemsize >= dtype.itemsize:
            return packed
        return self.room_on_device(numel, dtype)

    def pack_resident(
        self, gradients: Mapping[Piece, TakenGradient], hyper: Sequence[Hyperparameters]
    ) -> tuple[dict[Piece, Pending], Event, Tensor]:
        """Copy gradients within the device, and start the download of their norm.

        Returns the records in the order of their norm, the event after which `norm_in` may read it, and where it is.
        """
        groups: dict[torch.dtype, dict[Piece, TakenGradient]] = {}
        for piece, taken in gradients.items():
            taken.in_use = True
            groups.setdefault(taken.pending.dtype, {})[piece] = taken
        chunks = [sum(native.chunk_count(piece.shape.numel()) for piece in group) for group in groups.values()]
        distant = self.device.empty(2 * sum(chunks), torch.float64, Stream.CURRENT)
        norm = ChunkSums.over(distant)
        parts = zip(torch.split(norm.sums, chunks), torch.split(norm.nonfinite, chunks), strict=True)
        copies: list[list[Tensor]] = []
        records: dict[Piece, Pending] = {}
        for (dtype, group), part in zip(groups.items(), parts, strict=True):
            layout = self._layout_of(tuple(group))
            copies.append(layout.views(self.device.pack(self._present(group), layout, dtype, ChunkSums(*part))))
            records |= _records(group, copies[-1], hyper, are_resident=True)
        self._compute_norms([*gradients.values()])
        (host,), arrived = self._send_to_host([distant])
        for group, copy in zip(groups.values(), copies, strict=True):
            _move(group, copy, arrived)
        return records, arrived, host

    def _compute_norms(self, gradients: Sequence[TakenGradient]) -> None:
        is_asked = self.computes_norms and not needs_present_mode(gradients)
        # By dtype, as clip_grad_norm_ makes lists for torch, and by what the norm is rounded to.
        unknown: dict[tuple[torch.dtype, torch.dtype | None], list[TakenGradient]] = {}
        for taken in gradients if is_asked else ():
            if taken.norm is None:
                unknown.setdefault((taken.exact_dtype, taken.norm_dtype), []).append(taken)
        for (_, dtype), group in unknown.items():
            norms = foreach_norm([taken.unscaled() for taken in group], 2)
            for taken, norm in zip(group, norms, strict=True):
                taken.norm = norm if dtype is None else norm.to(dtype)

    def send_one(self, state: ParameterState, gradient: Tensor) -> tuple[Tensor, Event]:
        """Start the download of one gradient as it is; return where it arrives on the host, and its event."""
        layout = self._layout_of((state,))
        hosts, arrived = self._send_to_host([self.device.pack([gradient], layout, gradient.dtype)])
        return layout.views(hosts[0])[0], arrived

    def _send_to_host(self, sources: Sequence[Tensor]) -> tuple[list[Tensor], Event]:
        device = self.device
        device.wait(Stream.DOWNLOAD, device.record(Stream.CURRENT))
        with THIS_THREAD.deferred_signals:  # between copy and record, Ctrl-C would free memory that is still written to
            hosts = [device.host_empty(source.numel(), source.dtype) for source in sources]  # may raise, before a copy
            for host, source in zip(hosts, sources, strict=True):
                device.copy(host, source, Stream.DOWNLOAD)
                device.record_stream(source, Stream.DOWNLOAD)
                device.record_stream(host, Stream.DOWNLOAD)  # if the step is dropped, nothing waits for the copy
                self.statistics.downloaded_bytes += host.nbytes
            return hosts, device.record(Stream.DOWNLOAD)

    @property
    def received(self) -> Callable[[Tensor], Tensor] | None:  # type: ignore[override]
        """Rounds a gradient to the dtype in which it travels; None where that rounds nothing."""
        if self.transfer_dtype in (None, torch.float32):
            return None
        return lambda gradient: gradient.to(dtype_on_link(gradient, self.transfer_dtype))

    def round_taken(self, state: ParameterState, taken: TakenGradient, made: Event | None) -> Event | None:
        """Round a gradient that was taken to the dtype in which it travels; on the host if the device lacks memory.

        `made` is the event after which it has its values, where it must be waited for; returns that of the rounded one.
        """
        device, gradient = self.device, taken.pending
        dtype = dtype_on_link(gradient, self.transfer_dtype)
        if taken.is_unrounded or gradient.dtype == dtype:
            return made
        if device.is_host(gradient):
            taken.pending = taken.ready().to(dtype)
            return made
        if made is not None:
            device.wait(Stream.CURRENT, made)
        rounded = None
        with THIS_THREAD.without_handlers, suppress(ValueError), MayLackMemory():  # of memory, or on another device
            layout = self._layout_of((state,))
            rounded = layout.views(device.pack([gradient], layout, dtype))[0]
        made = device.record(Stream.CURRENT)
        if rounded is None:
            made.synchronize()
            rounded, made = gradient.to("cpu", dtype), None
        taken.pending, taken.arrived = rounded, made
        return made

    # ---- new values --------------------------------------------------------------------------------------------------

    def shadow(self, layout: FlatLayout[Piece], memory: Tensor | None = None, host: Tensor | None = None) -> Shadow:
        """Return memory for the new values of a layout, and count it."""
        shadow = super().shadow(layout, memory, host)
        tell("counting bytes", self._count_shadow, shadow)
        return shadow

    def _count_shadow(self, shadow: Shadow) -> None:
        self._shadows.add(weakref.ref(shadow), shadow.nbytes)
        self.statistics.shadow_bytes = max(self.statistics.shadow_bytes, self._shadows.size)

    def upload(self, host: Tensor, distant: Tensor) -> Event:
        """Start the upload of new values, count and trace it; return the event after which it has arrived."""
        begin = time.perf_counter()
        arrived = super().upload(host, distant)
        with THIS_THREAD.deferred_signals, self._lock:
            self.statistics.uploaded_bytes += host.nbytes
            self._untold.append((arrived, begin, host.numel()))
        tell("tracing", self.trace_arrived)
        return arrived

    def settle(self) -> None:
        """Return when everything that was published has arrived, and trace it."""
        super().settle()
        tell("tracing", self.trace_arrived)

    def trace_arrived(self) -> None:
        """Trace uploads that have arrived since the last call: the host waits for none of them, so it looks now."""
        with THIS_THREAD.deferred_signals, self._lock:
            while self._untold and self._untold[0][0].query():
                _, begin, elements = self._untold.popleft()
                self.trace.add(
                    Span("parameters to device", "upload", begin, time.perf_counter(), {"elements": elements})
                )


def _records(
    group: Mapping[Piece, TakenGradient],
    copies: Sequence[Tensor],
    hyper: Sequence[Hyperparameters],
    speculated: Set[Piece] = frozenset(),
    shadow: Shadow | None = None,
    *,
    are_resident: bool = False,
) -> dict[Piece, Pending]:
    """Return the records of gradients, of which there are copies; those to be speculated on have a slot."""
    records: dict[Piece, Pending] = {}
    for position, ((piece, taken), copy) in enumerate(zip(group.items(), copies, strict=True)):
        slot = Slot(shadow, position) if shadow is not None and piece in speculated else None
        records[piece] = Pending.of(taken, hyper[piece.state.row], copy, slot=slot, is_resident=are_resident)
    return records


def _move(group: Mapping[Piece, TakenGradient], copies: Sequence[Tensor], arrived: Event) -> None:
    """Let gradients that were sent be found where they are then."""
    for (piece, taken), copy in zip(group.items(), copies, strict=True):
        if (state := piece.state) is piece:
            taken.move_to(copy, arrived)
        else:
            taken.move_piece_to(copy, arrived, begin=piece.begin, strides=state.strides)


def norm_in(host: Tensor) -> GradientNorm:
    """Return the norm that `Transfers.pack_resident` has sent, once it has arrived."""
    norm = ChunkSums.over(host)
    return GradientNorm(norm.sums.numpy(), norm.nonfinite.numpy())


def dtype_on_link(gradient: Tensor, transfer_dtype: torch.dtype | None) -> torch.dtype:
    """Return the dtype in which a gradient travels."""
    return gradient.dtype if transfer_dtype is None or gradient.dtype == torch.float64 else transfer_dtype
