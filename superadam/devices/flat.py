"""Where the tensors of many parameters lie in one flat buffer, so that they travel in one copy."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

ALIGNMENT = 64
"""Every tensor begins at a multiple of this number of elements: a cache line or more for every dtype."""


def aligned(numel: int) -> int:
    """Return the elements that a tensor takes in a buffer, with the gap after it."""
    return -(-numel // ALIGNMENT) * ALIGNMENT


class Shaped(Protocol):
    """What has a place in a buffer: a dense tensor of this shape and these strides, in elements."""

    shape: torch.Size
    strides: tuple[int, ...]


_Member = TypeVar("_Member", bound=Shaped)


class FlatLayout(Generic[_Member]):
    """Places of dense tensors one after another, with gaps that align them; it never changes."""

    def __init__(self, states: Sequence[_Member]) -> None:
        self.states = tuple(states)
        sizes = (aligned(state.shape.numel()) for state in self.states)
        # The first element of each, and how many the buffer has, with the gaps.
        *self.offsets, self.numel = itertools.accumulate(sizes, initial=0)
        pairs = zip(self.states, self.offsets, strict=True)
        self._positions = [(state.shape, state.strides, begin) for state, begin in pairs]

    def views(self, buffer: Tensor) -> list[Tensor]:
        """Return one view for each member of a 1-D buffer of `numel` elements."""
        begin, view = buffer.storage_offset(), buffer.as_strided
        return [view(shape, strides, begin + offset) for shape, strides, offset in self._positions]


class JoinedTensor:
    """A dense tensor that was cut; the first thread that needs it joins copies of its pieces.

    Attributes:
        pieces: by their first element, in the order of memory.
        arrived: event after which all of them may be read.
    """

    def __init__(self, shape: Sequence[int], strides: Sequence[int]) -> None:
        self._shape, self._strides = shape, strides
        self.pieces: dict[int, Tensor] = {}
        self.arrived: Any = None

    @property
    def is_complete(self) -> bool:
        """Whether all pieces are there."""
        return sum(map(Tensor.numel, self.pieces.values())) == math.prod(self._shape)

    @property
    def tensor(self) -> Tensor:
        """The same tensor, where its first piece is, at every call."""
        self.arrived.synchronize()
        whole = next(iter(self.pieces.values())).new_empty_strided(self._shape, self._strides)
        for begin, piece in self.pieces.items():
            whole.as_strided(piece.shape, piece.stride(), begin).copy_(piece)
        known: Tensor = self.__dict__.setdefault("_whole", whole)  # for all threads that were here
        return known
