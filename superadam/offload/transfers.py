"""Copies between host and device: gradients come down, new values go up, in one flat buffer per bucket and dtype."""

from __future__ import annotations

import collections
import functools
import itertools
import operator
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from superadam.devices import Device, Event, Stream
from superadam.devices.flat import FlatLayout, FlatTensors
from superadam.devices.interface import AllEvents, ChunkSums
from superadam.handles.gradient_handle import norms_of
from superadam.handles.taken_gradient import TakenGradient, needs_present_mode
from superadam.host.telling import tell
from superadam.kernels import native
from superadam.kernels.torch_private import is_short_of_memory
from superadam.offload.shadow import FlatShadow
from superadam.offload.statistics import OverlapStatistics
from superadam.offload.trace import Trace
from superadam.state.delivery import STAGED_NUMEL, Layouts, buffers_in, groups_of, size_of
from superadam.state.norm import GradientNorm
from superadam.state.parameter import Piece, Slot

LAYOUTS_KEPT = 8192  # from step to step: more than a model has buckets, unless their composition keeps changing
PACKED_UNDER_WAY = 2  # packed buckets that may wait for the link where the device is short of memory


class _HeldBytes:
    """Counts bytes that become free in about the order in which they were taken.

    It stores running totals, subtracts nothing and takes no lock, so that no interrupt or finalizer can corrupt it.
    """

    def __init__(self, is_free: Callable[[Any], bool]) -> None:
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


def _is_gone(reference: weakref.ref[Any]) -> bool:
    return reference() is None


@dataclass(frozen=True, slots=True)
class HostTensors:
    """Gradients that did not travel."""

    tensors: Sequence[Tensor]


@dataclass(frozen=True, slots=True)
class Sent:
    """Gradients of one bucket and dtype, copied together; the worker makes `Pending` of them.

    Attributes:
        pieces: whose gradients they are.
        taken: weak references to their records.
        gradients: to be read once they have arrived.
        versions: of the records when they were sent.
        shadow: for the new values of all of them, in this order; None where none is speculated on.
    """

    pieces: Sequence[Piece]
    taken: Sequence[weakref.ref[TakenGradient]]
    gradients: FlatTensors | HostTensors
    versions: Sequence[int]
    shadow: FlatShadow | None = None

    @staticmethod
    def of(
        group: Mapping[Piece, TakenGradient],
        gradients: FlatTensors | HostTensors,
        shadow: FlatShadow | None = None,
    ) -> Sent:
        """Return gradients as they are now."""
        every = group.values()
        return Sent([*group], [*map(weakref.ref, every)], gradients, [taken.version for taken in every], shadow)

    def slots(self, speculated: Set[Piece]) -> dict[Piece, Slot]:
        """Return the slots of those that are speculated on."""
        slots = {} if self.shadow is None else self.shadow.slots()
        return {piece: slot for piece, slot in slots.items() if piece in speculated}


class Transfers:
    """Copies of gradients and new values for one device; a `superadam.state.delivery.Delivery`.

    Attributes:
        transfer_dtype: in which gradients travel, and so are seen by norm and step; None for their own. fp64 gradients,
            and those that count unrounded, stay as they are.
        computes_norms: whether torch computes the norms of gradients before they travel, for programs that ask.
        staged_numel: elements of new values that are staged at once; those of a bucket.
        piece_numel: elements beyond which parameters are cut.
        is_short: whether the device has no memory for the new values of a step. They then wait on the host, and the
            host waits for the link instead of packing far ahead.
    """

    def __init__(
        self, device: Device, statistics: OverlapStatistics, trace: Trace, transfer_dtype: torch.dtype | None = None
    ) -> None:
        self.device = device
        self.transfer_dtype = transfer_dtype
        self.computes_norms = False
        self.staged_numel = STAGED_NUMEL
        self.piece_numel: int | None = None
        self.is_short = False
        # Packed gradients, by the events with which they have left, or by references to the values that replace them.
        self._leaving, self._reused = _HeldBytes(operator.methodcaller("query")), _HeldBytes(_is_gone)
        self._most_packed = 0  # on the device at once
        self._travelled = self._most_travelled = 0  # packed in a step
        self._staged: Event | None = None  # after which what was staged last has left the host
        self._published: Event | None = None  # after which all new values have arrived
        self._statistics, self._trace = statistics, trace
        self._lock = threading.Lock()  # the worker uploads while the training thread publishes
        self._untold: collections.deque[tuple[Event, float, int]] = collections.deque()  # uploads not seen to arrive
        self._shadows = _HeldBytes(_is_gone)  # by references to them
        self._layout_of = functools.lru_cache(LAYOUTS_KEPT)(FlatLayout[Piece])

    def forget_layouts(self) -> None:
        """Forget the layouts of earlier buckets, which keep their parameters alive."""
        self._layout_of.cache_clear()

    # ---- gradients ---------------------------------------------------------------------------------------------------

    def download(
        self,
        pieces: Sequence[Piece],
        gradients: Sequence[TakenGradient],
        speculated: Set[Piece],
    ) -> tuple[list[Sent], Event]:
        """Start the download of pieces of these gradients, and find memory for the new values of the `speculated` ones.

        Returns what was sent, and the event after which it may be read. The current stream waits already for what makes
        the gradients on the device.
        """
        device = self.device
        sent: list[Sent] = []
        under_way: dict[Event, None] = {}  # copies to the host that were begun before
        local: dict[tuple[torch.dtype, bool] | None, dict[Piece, TakenGradient]] = {}
        groups: dict[tuple[torch.dtype, torch.dtype], dict[Piece, TakenGradient]] = {}
        for piece, taken in zip(pieces, gradients, strict=True):
            taken.in_use = True
            state, gradient = piece.state, taken.pending
            if device.is_host(gradient):
                is_narrowed = self._is_narrowed(taken)
                if is_narrowed or not state.lies_as_read(gradient):
                    gradient = taken.ready()
                if is_narrowed:
                    gradient = self.narrowed(gradient, keeps_dtype=False)
                if taken.arrived is not None:
                    under_way[taken.arrived] = None
                taken.pending = state.host_gradient(gradient)
                key = (state.parameter_dtype, device.is_host(state.local)) if piece in speculated else None
                local.setdefault(key, {})[piece] = taken
            else:
                travels_as_it_is = self.transfer_dtype is None or taken.is_unrounded
                dtype = gradient.dtype if travels_as_it_is else dtype_on_link(gradient, self.transfer_dtype)
                groups.setdefault((dtype, state.parameter_dtype), {})[piece] = taken
        for key, group in local.items():
            shadow = None if key is None else self._shadow(self._layout_of(tuple(group)), None)
            sent.append(Sent.of(group, HostTensors([one.of(taken.pending) for one, taken in group.items()]), shadow))
        leaving = 0
        packed: list[tuple[FlatLayout[Piece], dict[Piece, TakenGradient], Tensor, FlatShadow | None]] = []
        for (dtype, parameter_dtype), group in groups.items():
            layout = self._layout_of(tuple(group))
            source = self._pack(group, layout, dtype)
            memory = shadow = None
            if not speculated.isdisjoint(group):
                memory = self._shadow_on_device(source, layout.numel, parameter_dtype)
                shadow = self._shadow(layout, memory)
                if memory is source:
                    self._reused.add(weakref.ref(shadow), source.nbytes)
            leaving += 0 if memory is source else source.nbytes
            packed.append((layout, group, source, shadow))
        if not packed:
            return sent, AllEvents(tuple(under_way))
        self._compute_norms([taken for _, group, _, _ in packed for taken in group.values()])
        hosts, arrived = self._send_to_host([source for _, _, source, _ in packed])
        for (layout, group, _, shadow), host in zip(packed, hosts, strict=True):
            sent.append(Sent.of(group, layout.cut(host), shadow))
            _move(group, sent[-1], arrived)
        if leaving:
            self._leaving.add(arrived, leaving)
        self._most_packed = max(self._most_packed, self._leaving.size + self._reused.size)
        return sent, AllEvents((*under_way, arrived)) if under_way else arrived

    def _pack(self, group: Mapping[Piece, TakenGradient], layout: FlatLayout[Piece], dtype: torch.dtype) -> Tensor:
        """Return gradients in one buffer on the device, once few others wait for the link where memory is short."""
        if self.is_short:
            self._let_leave(PACKED_UNDER_WAY)
        try:
            packed = self.device.pack(self._present(group), layout, dtype)
        except Exception as error:
            self.is_short = self.is_short or is_short_of_memory(error)
            if not is_short_of_memory(error) or not self._leaving.size:
                raise
            self._let_leave(0)
            packed = self.device.pack(self._present(group), layout, dtype)
        self._travelled += packed.nbytes
        return packed

    def _present(self, group: Mapping[Piece, TakenGradient]) -> list[Tensor]:
        """Return the gradients of pieces on the device; those of cut parameters are first put in their memory order."""
        for piece, taken in group.items():
            state = piece.state
            if state is not piece and taken.pending.stride() != state.strides:
                layout = FlatLayout([state])
                taken.pending = layout.views(self.device.pack([taken.pending], layout, taken.pending.dtype))[0]
        return [piece.of(taken.pending) for piece, taken in group.items()]

    def _let_leave(self, most: int) -> None:
        while (arrived := self._leaving.oldest(most + 1)) is not None:
            arrived.synchronize()

    def bytes_without_room(self) -> int:
        """Find out whether the device has memory for the new values of steps like this.

        Returns the bytes of them that wait on the host from now on; 0 where nothing changes.
        """
        travelled, self._travelled = self._travelled, 0
        if travelled <= self._most_travelled:
            return 0
        self._most_travelled = travelled
        missing = travelled - self._most_packed  # what was there at once is part of the device's peak
        free = self.device.free_bytes() if missing > 0 else None
        if free is None or free >= missing or self.is_short:
            return 0
        self.is_short = True
        return travelled

    def _shadow(self, layout: FlatLayout[Piece], memory: Tensor | None, host: Sequence[Tensor] = ()) -> FlatShadow:
        shadow = FlatShadow(self, layout, memory, host)
        tell("counting bytes", self._count_shadow, shadow, layout.numel * layout.states[0].parameter_dtype.itemsize)
        return shadow

    def _count_shadow(self, shadow: FlatShadow, size: int) -> None:
        self._shadows.add(weakref.ref(shadow), size)
        self._statistics.shadow_bytes = max(self._statistics.shadow_bytes, self._shadows.size)

    def _shadow_on_device(self, packed: Tensor, numel: int, dtype: torch.dtype) -> Tensor | None:
        """Return memory on the device for new values, that of the packed gradients if it is large enough, or None."""
        if self.is_short:
            return None
        if packed.dtype.itemsize >= dtype.itemsize:
            return packed
        return self.room_on_device(numel, dtype)

    def room_on_device(self, numel: int, dtype: torch.dtype) -> Tensor | None:
        """Return memory on the device, or None where it has none."""
        try:
            return self.device.empty(numel, dtype, Stream.CURRENT)
        except Exception as error:
            if not is_short_of_memory(error):
                raise
            return None

    def pack_resident(
        self, pieces: Sequence[Piece], gradients: Sequence[TakenGradient]
    ) -> tuple[list[Sent], Event, list[Tensor]]:
        """Copy gradients within the device, and start the download of their norm.

        Returns the copies in the order of their norm, the event after which `norm_in` may read it, and its tensors.
        """
        device = self.device
        groups: dict[torch.dtype, dict[Piece, TakenGradient]] = {}
        for piece, taken in zip(pieces, gradients, strict=True):
            taken.in_use = True
            narrower = dtype_on_link(taken.pending, self.transfer_dtype)
            dtype = narrower if self._is_narrowed(taken) else taken.pending.dtype
            groups.setdefault(dtype, {})[piece] = taken
        norms: list[Tensor] = []
        sent: list[Sent] = []
        for dtype, group in groups.items():
            layout = self._layout_of(tuple(group))
            chunks = sum(native.chunk_count(piece.shape.numel()) for piece in layout.states)
            norms.append(device.empty(2 * chunks, torch.float64, Stream.CURRENT))
            buffer = device.pack(self._present(group), layout, dtype, ChunkSums.over(norms[-1]))
            sent.append(Sent.of(group, layout.cut(buffer)))
        self._compute_norms(gradients)
        hosts, arrived = self._send_to_host(norms)
        for group, one in zip(groups.values(), sent, strict=True):
            _move(group, one, arrived)
        return sent, arrived, hosts

    def _compute_norms(self, gradients: Sequence[TakenGradient]) -> None:
        is_asked = self.computes_norms and not needs_present_mode(gradients)
        unknown = [taken for taken in gradients if taken.norm is None] if is_asked else []
        if unknown:
            norms = norms_of((taken.pending, taken.norm_dtype) for taken in unknown)
            for taken, norm in zip(unknown, norms, strict=True):
                taken.norm = norm

    def _send_to_host(self, sources: Sequence[Tensor]) -> tuple[list[Tensor], Event]:
        device = self.device
        device.wait(Stream.DOWNLOAD, device.record(Stream.CURRENT))
        hosts = [device.host_empty(source.numel(), source.dtype) for source in sources]  # may raise, before any copy
        for host, source in zip(hosts, sources, strict=True):
            device.copy(host, source, Stream.DOWNLOAD)
            device.record_stream(source, Stream.DOWNLOAD)
            device.record_stream(host, Stream.DOWNLOAD)  # if the step is dropped, nothing waits for the copy
            self._statistics.downloaded_bytes += host.nbytes
        return hosts, device.record(Stream.DOWNLOAD)

    @property
    def narrows(self) -> bool:
        """Whether travelling may round gradients."""
        return self.transfer_dtype not in (None, torch.float32)

    def _is_narrowed(self, taken: TakenGradient) -> bool:
        return self.narrows and not taken.is_unrounded

    def narrowed(self, gradient: Tensor, *, keeps_dtype: bool = True) -> Tensor:
        """Return a gradient that does not travel, rounded as if it had."""
        if not self.narrows:
            return gradient
        narrow = gradient.to(dtype_on_link(gradient, self.transfer_dtype))
        return narrow.to(gradient.dtype) if keeps_dtype else narrow

    # ---- new values (superadam.state.delivery.Delivery) --------------------------------------------------------------

    @property
    def received(self) -> Callable[[Tensor], Tensor] | None:
        """Rounds a gradient that was not taken; None where travelling rounds nothing."""
        return self.narrowed if self.narrows else None

    def is_host(self, parameter: Tensor) -> bool:
        """Whether kernels on the CPU may write this parameter."""
        return self.device.is_host(parameter)

    def shadows(self, pieces: Sequence[Piece]) -> list[Slot]:
        """Return memory of the host."""
        shadows = [self._shadow(self._layout_of(group), None) for group in groups_of(pieces)]
        return _slots(pieces, shadows)

    def stage(self, parts: Sequence[Sequence[Piece]]) -> Iterator[list[Slot]]:
        """Return host memory for each part: two buffers in turn, or always the same one if memory is short."""
        if self._staged is not None:
            self._staged.synchronize()
        layouts = [[*map(self._layout_of, groups_of(pieces))] for pieces in parts]
        size = max(map(size_of, layouts))
        buffers = [self.device.host_empty(size, torch.uint8)]
        if len(parts) > 1:
            try:
                buffers.append(self.device.host_empty(size, torch.uint8))
            except Exception as error:
                if not is_short_of_memory(error):
                    raise
        return self._slots_in_turn(parts, layouts, buffers)

    def _slots_in_turn(
        self, parts: Sequence[Sequence[Piece]], layouts: Sequence[Layouts], buffers: Sequence[Tensor]
    ) -> Iterator[list[Slot]]:
        """Yield slots in the next buffer, once what was published from there before has left it."""
        published: collections.deque[Event] = collections.deque()
        for pieces, some, buffer in zip(parts, layouts, itertools.cycle(buffers), strict=False):
            if len(published) == len(buffers):
                published.popleft().synchronize()
            hosts = buffers_in(buffer, some)
            shadows = [self._shadow(layout, None, [host, buffer]) for layout, host in zip(some, hosts, strict=True)]
            yield _slots(pieces, shadows)
            del shadows
            self._staged = self.device.record(Stream.CURRENT)
            published.append(self._staged)

    def publish(self, pieces: Sequence[Piece], slots: Sequence[Slot]) -> None:
        """Copy new values into their parameters on the current stream, those that have arrived already first."""
        chosen: dict[FlatShadow, tuple[list[int], list[Tensor]]] = {}
        for piece, (shadow, position) in zip(pieces, slots, strict=True):
            assert isinstance(shadow, FlatShadow)
            some = chosen.get(shadow)
            if some is None:
                some = chosen[shadow] = [], []
            some[0].append(position)
            some[1].append(piece.working_copy)
        late = [shadow for shadow in chosen if not shadow.has_arrived]
        for shadows in ([shadow for shadow in chosen if shadow not in late], late):
            sources: list[Tensor] = []
            parameters: list[Tensor] = []
            for shadow in shadows:
                values, (positions, targets) = shadow.sources(), chosen[shadow]
                sources += [values[position] for position in positions]
                parameters += targets
            if sources:
                self.device.scatter(sources, parameters)
            for shadow in shadows:
                shadow.keep_published()
        self._published = self.device.record(Stream.CURRENT)

    def upload(self, host: Tensor, distant: Tensor) -> Event:
        """Start the upload of new values; return the event after which they may be read on the device."""
        device, begin = self.device, time.perf_counter()
        device.copy(distant, host, Stream.UPLOAD)
        device.record_stream(host, Stream.UPLOAD)
        device.record_stream(distant, Stream.UPLOAD)
        arrived = device.record(Stream.UPLOAD)
        tell("counting bytes", self._count_upload, host.nbytes)
        with self._lock:
            self._untold.append((arrived, begin, host.numel()))
        tell("tracing", self.trace_arrived)
        return arrived

    def _count_upload(self, size: int) -> None:
        with self._lock:
            self._statistics.uploaded_bytes += size

    def settle(self) -> None:
        """Return when everything that was published has arrived."""
        self.device.record(Stream.CURRENT).synchronize()
        if self._published is not None:  # perhaps on the current stream of another thread
            self._published.synchronize()
        tell("tracing", self.trace_arrived)

    def trace_arrived(self) -> None:
        """Trace uploads that have arrived since the last call: the host waits for none of them, so it looks now."""
        with self._lock:
            while self._untold and self._untold[0][0].query():
                _, begin, elements = self._untold.popleft()
                self._trace.add("parameters to device", "upload", begin, time.perf_counter(), elements=elements)


def _move(group: Mapping[Piece, TakenGradient], sent: Sent, arrived: Event) -> None:
    """Let gradients that were sent be found where they are then."""
    for position, (piece, taken) in enumerate(group.items()):
        if (state := piece.state) is piece:
            taken.move_to(sent.gradients, position, arrived)
        else:
            begin, numel = piece.begin, piece.shape.numel()
            taken.move_piece_to(sent.gradients, position, arrived, begin=begin, numel=numel, strides=state.strides)


def _slots(pieces: Sequence[Piece], shadows: Sequence[FlatShadow]) -> list[Slot]:
    slots = {piece: slot for shadow in shadows for piece, slot in shadow.slots().items()}
    return [slots[piece] for piece in pieces]


def norm_in(hosts: Sequence[Tensor]) -> GradientNorm:
    """Return the norm that `Transfers.pack_resident` has sent, once it has arrived."""
    parts = [ChunkSums.over(host) for host in hosts]
    return GradientNorm(
        np.concatenate([part.sums.numpy() for part in parts]),
        np.concatenate([part.nonfinite.numpy() for part in parts]),
    )


def dtype_on_link(gradient: Tensor, transfer_dtype: torch.dtype | None) -> torch.dtype:
    """Return the dtype in which a gradient travels."""
    return gradient.dtype if transfer_dtype is None or gradient.dtype == torch.float64 else transfer_dtype
