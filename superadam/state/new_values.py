"""New values of parameters that kernels on the host cannot write where they lie: in memory of their own until then."""

from __future__ import annotations

import collections
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from superadam.devices import Device, Event, PlainDevice, Stream
from superadam.devices.flat import FlatLayout
from superadam.kernels.torch_private import MayLackMemory
from superadam.state.parameter import Piece, Slot

STAGED_NUMEL = 16 * 1024 * 1024
"""Elements of new values in one part, so that their memory does not grow with the model."""

MOST_PLACES = torch.iinfo(torch.int32).max
"""Elements of a buffer of which patches may replace some: their places are int32."""

LAYOUTS_KEPT = 8192  # from step to step: more than a model has buckets, unless their composition keeps changing

_Layouts = Sequence[FlatLayout[Piece]]  # of new values, one for each dtype


class NewValues:
    """Memory for new values, and their copies to the parameters; without a device, in the calling thread.

    Attributes:
        device: that holds the parameters.
        staged_numel: about how many elements of new values a part for `stage` has.
        piece_numel: elements beyond which parameters are cut when they are bound; None for no limit.
        is_short: whether the device has no memory for the new values of a step, so that they wait on the host.
        received: rounds a gradient to the dtype in which it travels, also where it does not; None where that rounds
            nothing.
    """

    received: Callable[[Tensor], Tensor] | None = None

    def __init__(self, device: Device | None = None) -> None:
        self.device = device or PlainDevice()
        self.staged_numel = STAGED_NUMEL
        self.piece_numel: int | None = None
        self.is_short = False
        self._staged: Event | None = None  # after which what was staged last has left the host
        self._published: Event | None = None  # after which all new values have arrived
        self._layout_of = functools.lru_cache(LAYOUTS_KEPT)(FlatLayout[Piece])

    def forget_layouts(self) -> None:
        """Forget the layouts of earlier buckets, which keep their parameters alive."""
        self._layout_of.cache_clear()

    def shadow(self, layout: FlatLayout[Piece], memory: Tensor | None = None, host: Tensor | None = None) -> Shadow:
        """Return memory for the new values of a layout; see `Shadow`."""
        return Shadow(self, layout, memory, host)

    def shadows(self, pieces: Sequence[Piece]) -> dict[Piece, Slot]:
        """Return host memory for one new value of each of these pieces."""
        return _slots([self.shadow(layout) for layout in self._layouts(pieces)])

    def _layouts(self, pieces: Sequence[Piece]) -> _Layouts:
        """Return the layouts of the pieces of each dtype, whose new values lie in one flat buffer."""
        groups: dict[torch.dtype, list[Piece]] = {}
        for piece in pieces:
            groups.setdefault(piece.parameter_dtype, []).append(piece)
        return [self._layout_of(tuple(group)) for group in groups.values()]

    def stage(self, parts: Sequence[Sequence[Piece]]) -> Iterator[dict[Piece, Slot]]:
        """Return host memory for the new values of one part after another; there is at least one.

        All of it is allocated when this returns: two buffers in turn, or always the same one if memory is short or
        nothing overlaps. Publish each part before asking for the next.
        """
        if self._staged is not None:
            self._staged.synchronize()
        layouts = [self._layouts(pieces) for pieces in parts]
        size = max(sum(map(_bytes_of, some)) for some in layouts)
        buffers = [self.device.host_empty(size, torch.uint8)]
        if len(parts) > 1 and self.device.has_link:
            with MayLackMemory():
                buffers.append(self.device.host_empty(size, torch.uint8))
        return self._slots_in_turn(layouts, buffers)

    def _slots_in_turn(self, layouts: Sequence[_Layouts], buffers: Sequence[Tensor]) -> Iterator[dict[Piece, Slot]]:
        """Yield slots in the next buffer, once what was published from there before has left it."""
        published: collections.deque[Event] = collections.deque()
        for some, buffer in zip(layouts, itertools.cycle(buffers), strict=False):
            if len(published) == len(buffers):
                published.popleft().synchronize()
            sizes = [*map(_bytes_of, some)]
            hosts = torch.split(buffer[: sum(sizes)], sizes)
            yield _slots(
                self.shadow(layout, None, host.view(layout.states[0].parameter_dtype))
                for layout, host in zip(some, hosts, strict=True)
            )
            self._staged = self.device.record(Stream.CURRENT)
            published.append(self._staged)

    def publish(self, slots: Mapping[Piece, Slot]) -> None:
        """Copy new values into parameters, past version counters, before anything later on the current stream.

        Does not fail for want of memory, because the state has changed by then.
        """
        values = {shadow: shadow.sources() for shadow in dict.fromkeys(slot.shadow for slot in slots.values())}
        sources = [values[shadow][position] for shadow, position in slots.values()]
        self.device.scatter(sources, [piece.working_copy for piece in slots])
        for shadow in values:
            shadow.keep_published()
        self.mark_published()

    def mark_published(self) -> None:
        """Let whoever reads parameters wait for what was enqueued to the current stream, also in place."""
        self._published = self.device.record(Stream.CURRENT)

    def follow(self) -> None:
        """Let the current stream read parameters: behind what was published, perhaps on another one."""
        if self._published is not None:
            self.device.wait(Stream.CURRENT, self._published)

    def settle(self) -> None:
        """Return when everything that was published has arrived, so that the host can read parameters."""
        self.device.record(Stream.CURRENT).synchronize()
        if self._published is not None:  # perhaps on the current stream of another thread
            self._published.synchronize()

    def room_on_device(self, numel: int, dtype: torch.dtype) -> Tensor | None:
        """Return memory on the device, or None where it has none."""
        with MayLackMemory():
            return self.device.empty(numel, dtype, Stream.CURRENT)
        return None

    def upload(self, host: Tensor, distant: Tensor) -> Event:
        """Start the upload of new values; return the event after which they may be read on the device."""
        device = self.device
        device.copy(distant, host, Stream.UPLOAD)
        device.record_stream(host, Stream.UPLOAD)
        device.record_stream(distant, Stream.UPLOAD)
        return device.record(Stream.UPLOAD)


class Shadow:
    """New values of pieces of one dtype in one flat buffer of `nbytes`, until a verdict publishes them.

    Args:
        memory: on the device, where the values go as soon as they are written; None to wait on the host.
        host: a flat buffer for them; without, one is allocated when it is first needed.

    Attributes:
        sent: the flat values on the device, and the event after which they are there; None while they wait on the host.
    """

    def __init__(
        self, new_values: NewValues, layout: FlatLayout[Piece], memory: Tensor | None, host: Tensor | None
    ) -> None:
        self.new_values = new_values
        self.pieces, self.dtype, self.nbytes = layout.states, layout.states[0].parameter_dtype, _bytes_of(layout)
        self.takes_patches = layout.numel <= MOST_PLACES
        device = new_values.device
        self._travels = device.has_link and not device.is_host(layout.states[0].state.local)
        self.layout, self._memory, self._host = layout, memory, host
        self._views: list[Tensor] = []
        self.sent: tuple[Tensor, Event] | None = None

    @property
    def values(self) -> list[Tensor]:
        """One host tensor for each piece, of its parameter's dtype and in its layout, for kernels to write."""
        if not self._views:
            if self._host is None:
                self._host = self.new_values.device.host_empty(self.layout.numel, self.dtype)
            self._views = self.layout.views(self._host)
        return self._views

    def send(self) -> None:
        """Start the upload of the values, if they have memory on the device."""
        if self._memory is not None and self._host is not None:
            distant = self._memory.view(self.dtype)[: self.layout.numel]
            self.sent = distant, self.new_values.upload(self._host, distant)
            self._host, self._views = None, self.layout.views(distant)

    def put(self, index: Tensor, values: Tensor, arrived: Event) -> None:
        """Replace values on the device by others, behind the event and everything that writes them."""
        self.sources()  # which the current stream may write from now on
        self.new_values.device.wait(Stream.CURRENT, arrived)
        assert self.sent is not None
        self.new_values.device.put(self.sent[0], index, values)

    def sources(self) -> list[Tensor]:
        """Return what to publish, which the current stream may read: on the device where that has room for it."""
        device = self.new_values.device
        if self._travels and self._memory is None and not self.new_values.is_short:
            self._memory = self.new_values.room_on_device(self.layout.numel, self.dtype)
            if self._memory is not None:  # it may be used by what the current stream has still to do
                device.wait(Stream.UPLOAD, device.record(Stream.CURRENT))
        self.send()
        if self.sent is not None:
            distant, arrived = self.sent
            device.wait(Stream.CURRENT, arrived)
            device.record_stream(distant, Stream.CURRENT)
        return self._views

    def keep_published(self) -> None:
        """Keep memory of the host, which a copy under way may read, until the current stream has passed that."""
        if self._travels and self._host is not None:
            self.new_values.device.record_stream(self._host, Stream.CURRENT)


class Patch:
    """New values for the uncertain elements of some pieces of one shadow, with memory for them.

    Args:
        positions: of the pieces in the shadow.
        counts: uncertain elements of each.

    Attributes:
        values: one flat tensor of the parameters' dtype for each, which kernels fill.
        targets: speculated values into which kernels put each value as well, where these are on the host; else none.
        places: int32 tensors for positions in the shadow's buffer, where speculated values have left the host; else
            none. `begins` are those of the pieces.
    """

    def __init__(self, shadow: Shadow, positions: Sequence[int], counts: Sequence[int]) -> None:
        device, total = shadow.new_values.device, sum(counts)
        self._shadow, self.begins = shadow, [shadow.layout.offsets[position] for position in positions]
        self.targets: Sequence[Tensor] = ()
        self.places: Sequence[Tensor] = ()
        self._distant: list[Tensor] = []
        if shadow.sent is not None:
            self._host = [device.host_empty(total, dtype) for dtype in (torch.int32, shadow.dtype)]
            self._distant = [device.empty(total, dtype, Stream.CURRENT) for dtype in (torch.int32, shadow.dtype)]
            self.places = torch.split(self._host[0], [*counts])
        else:
            self._host = [torch.empty(total, dtype=shadow.dtype, device="cpu")]
            self.targets = [shadow.values[position] for position in positions]
        self.values: Sequence[Tensor] = torch.split(self._host[-1], [*counts])

    def send(self) -> None:
        """Let the values follow where speculated ones have gone."""
        if not self._distant:  # kernels have put them where they belong
            return
        new_values, device = self._shadow.new_values, self._shadow.new_values.device
        device.wait(Stream.UPLOAD, device.record(Stream.CURRENT))  # which may use this memory until then
        arrived = [new_values.upload(*pair) for pair in zip(self._host, self._distant, strict=True)][-1]
        self._shadow.put(self._distant[0], self._distant[1], arrived)


def _slots(shadows: Iterable[Shadow]) -> dict[Piece, Slot]:
    return {piece: Slot(shadow, position) for shadow in shadows for position, piece in enumerate(shadow.pieces)}


def _bytes_of(layout: FlatLayout[Piece]) -> int:
    return layout.numel * layout.states[0].parameter_dtype.itemsize
