"""Gradients that FSDP2 has reduced over ranks: when they may be taken."""

from __future__ import annotations

from torch import Tensor

from superadam.devices import Event
from superadam.distributed import shards
from superadam.handles.gradient_handle import shared_memory, taken_of
from superadam.kernels.torch_private import storage_key

Marked = tuple[Tensor, Event | None]
"""A parameter, and the event after which the gradient that its hook has seen has its values."""


class ReducedGroups:
    """Parameters whose gradients wait for the rest of their group; ordinary ones do not wait.

    FSDP2 cuts the gradients of a group from one buffer, and calls hooks while it does. They can be taken once the next
    group is ready, because then nothing else references that buffer. By then another stream may be the current one.
    """

    def __init__(self) -> None:
        self._waiting: list[Tensor] = []
        self._made: dict[int, Event | None] = {}  # of the latest gradient of each, by the parameter's id
        self._buffer: int | None = None  # of the group that waits

    def add(self, parameter: Tensor, made: Event | None) -> list[Marked]:
        """Add a parameter whose gradient is ready, and return those whose gradients may be taken now."""
        if not shards.is_distributed(parameter):
            return [(parameter, made)]
        self._made[id(parameter)] = made
        gradient = parameter.grad
        if gradient is None or taken_of(gradient) is not None:  # a sum of micro-batches, in memory of its own
            return [*self.rest(), (parameter, made)]
        buffer = storage_key(shards.local_of(gradient).untyped_storage())
        complete = self.rest() if buffer != self._buffer else []
        self._buffer = buffer
        self._waiting.append(parameter)
        return complete

    def rest(self) -> list[Marked]:
        """Return those that waited, but for those whose gradients lie in memory that is referenced elsewhere."""
        waiting, self._waiting = self._waiting, []
        shared = shared_memory(waiting)
        return [
            (parameter, self._made[id(parameter)])
            for position, parameter in enumerate(waiting)
            if position not in shared
        ]
