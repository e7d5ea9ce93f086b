"""Delivery: how new values reach parameters that kernels on the host cannot write directly.

`SynchronousDelivery` is the optimizer's own; a scheduler brings one whose copies overlap with the model's work.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

from superadam.devices.flat import FlatLayout
from superadam.kernels.copies import copy_each
from superadam.state.parameter import Piece, Slot
from superadam.state.uncertain import HostPatch, Patch

STAGED_NUMEL = 16 * 1024 * 1024
"""Elements of new values in one part, so that their memory does not grow with the model."""


class Delivery(Protocol):
    """The interface between the passes over parameters and the copies to the model's device.

    Attributes:
        staged_numel: about how many elements of new values a part for `stage` has.
        piece_numel: elements beyond which parameters are cut when they are bound; None for no limit.
    """

    staged_numel: int
    piece_numel: int | None

    @property
    def received(self) -> Callable[[Tensor], Tensor] | None:
        """Rounds a gradient that was not taken as if it had travelled to the host; None where that rounds nothing."""

    def is_host(self, parameter: Tensor) -> bool:
        """Whether kernels on the CPU may write this parameter."""

    def shadows(self, pieces: Sequence[Piece]) -> list[Slot]:
        """Return memory for one new value of each of these pieces."""

    def stage(self, parts: Sequence[Sequence[Piece]]) -> Iterator[list[Slot]]:
        """Return memory for the new values of one part after another; there is at least one.

        All of it is allocated when this returns. Parts may share memory: publish each before asking for the next.
        """

    def publish(self, pieces: Sequence[Piece], slots: Sequence[Slot]) -> None:
        """Copy new values into their parameters, past version counters, before anything later on the current stream.

        Does not fail for want of memory, because the state has changed by then.
        """

    def settle(self) -> None:
        """Return when everything that was published has arrived, so that the host can read parameters."""


Layouts = Sequence[FlatLayout[Piece]]  # of new values, one for each dtype


def groups_of(pieces: Sequence[Piece]) -> list[tuple[Piece, ...]]:
    """Return the pieces of each dtype, whose new values lie in one flat buffer."""
    groups: dict[torch.dtype, list[Piece]] = {}
    for piece in pieces:
        groups.setdefault(piece.parameter_dtype, []).append(piece)
    return [*map(tuple, groups.values())]


def size_of(layouts: Layouts) -> int:
    """Return the bytes of the buffers of these layouts."""
    return sum(layout.numel * layout.states[0].parameter_dtype.itemsize for layout in layouts)


def buffers_in(memory: Tensor, layouts: Layouts) -> Iterator[Tensor]:
    """Yield the buffer of each layout, one after another in memory of at least `size_of` bytes."""
    begin = 0
    for layout in layouts:
        end = begin + size_of([layout])
        yield memory[begin:end].view(layout.states[0].parameter_dtype)
        begin = end


class HostShadow:
    """New values in pageable memory, one tensor for each piece."""

    def __init__(self, values: list[Tensor]) -> None:
        self.values = values

    def patch(self, positions: Sequence[int], counts: Sequence[int]) -> Patch:
        """Return what is put into them."""
        return HostPatch([self.values[position] for position in positions], counts)


class SynchronousDelivery:
    """Copies that are done, or at least ordered before everything later, when the call returns."""

    staged_numel = STAGED_NUMEL
    piece_numel: int | None = None
    received = None

    def is_host(self, parameter: Tensor) -> bool:
        """Whether it is on the CPU."""
        return parameter.is_cpu

    def shadows(self, pieces: Sequence[Piece]) -> list[Slot]:
        """Return pageable memory."""
        return next(self.stage([pieces]))

    def stage(self, parts: Sequence[Sequence[Piece]]) -> Iterator[list[Slot]]:
        """Return pageable memory, the same for all parts."""
        layouts = [[*map(FlatLayout, groups_of(pieces))] for pieces in parts]
        memory = torch.empty(max(map(size_of, layouts)), dtype=torch.uint8, device="cpu")
        return (_slots(pieces, some, memory) for pieces, some in zip(parts, layouts, strict=True))

    def publish(self, pieces: Sequence[Piece], slots: Sequence[Slot]) -> None:
        """Copy all of them in one call."""
        copy_each([piece.working_copy.data for piece in pieces], [slot.value for slot in slots])

    def settle(self) -> None:
        """Return at once."""


def _slots(pieces: Sequence[Piece], layouts: Layouts, memory: Tensor) -> list[Slot]:
    pairs = [*zip(layouts, buffers_in(memory, layouts), strict=True)]
    values = {
        piece: view for layout, buffer in pairs for piece, view in zip(layout.states, layout.views(buffer), strict=True)
    }
    shadow = HostShadow([values[piece] for piece in pieces])
    return [Slot(shadow, position) for position in range(len(pieces))]
