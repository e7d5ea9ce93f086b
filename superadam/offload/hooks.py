"""When gradients may be taken: in post-accumulate-grad hooks, and those that FSDP2 has reduced a group later."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor
from torch.utils.hooks import RemovableHandle

from superadam.devices import Event
from superadam.distributed import shards
from superadam.handles.gradient_handle import shared_memory, taken_of
from superadam.kernels.torch_private import storage_key, uncompiled


class GradientReady:
    """A hook that calls a method while the method's object lives.

    A copy or a pickle of it does nothing, so that a deep copied or saved model is a plain model.
    """

    def __init__(self, method: Callable[[Tensor], None] | None) -> None:
        self._method: Any = (lambda: None) if method is None else weakref.WeakMethod(method)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (None,)

    @uncompiled
    def __call__(self, parameter: Tensor) -> None:
        """Call the method with the parameter."""
        method = self._method()
        if method is not None:
            method(parameter)


class Hooks:
    """At most one hook on each parameter, all of which call one method; before all other hooks if `is_first`."""

    def __init__(self, method: Callable[[Tensor], None], *, is_first: bool = False) -> None:
        self._ready = GradientReady(method)
        self._is_first = is_first
        self._handles: list[RemovableHandle] = []
        self._frozen: list[Tensor] = []

    def watch(self, parameters: Iterable[Tensor]) -> None:
        """Hook these parameters, and no others."""
        self.remove()
        self._frozen = list(parameters)
        self.look_for_unfrozen()

    def look_for_unfrozen(self) -> None:
        """Hook those of the parameters that were frozen before and are trained now."""
        for position in reversed(range(len(self._frozen))):
            parameter: Any = self._frozen[position]
            if parameter.requires_grad and parameter.is_leaf:
                self._handles.append(parameter.register_post_accumulate_grad_hook(self._ready))
                if self._is_first:  # as torch does with hooks of modules that are to be prepended
                    hooks: Any = self._handles[-1].hooks_dict_ref()
                    hooks.move_to_end(self._handles[-1].id, last=False)
                del self._frozen[position]

    def remove(self) -> None:
        """Remove every hook."""
        for handle in self._handles:
            handle.remove()
        self._handles = []


Marked = tuple[Tensor, Event | None]
"""A parameter, and the event after which the gradient that its hook has seen has its values."""


class ReducedGroups:
    """Parameters whose gradients FSDP2 has reduced, which wait for the rest of their group; ordinary ones do not wait.

    FSDP2 cuts the gradients of a group from one buffer, and calls hooks while it does. They can be taken once the next
    group is ready, because then nothing else references that buffer. By then another stream may be the current one.
    """

    def __init__(self) -> None:
        self._waiting: dict[int, Tensor] = {}  # each once, by its id, however often it was accumulated
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
        self._waiting[id(parameter)] = parameter
        return complete

    def rest(self) -> list[Marked]:
        """Return those that waited, but for those whose gradients lie in memory that is referenced elsewhere."""
        waiting, self._waiting = [*self._waiting.values()], {}
        shared = shared_memory(waiting)
        free = [parameter for position, parameter in enumerate(waiting) if position not in shared]
        return [(parameter, self._made[id(parameter)]) for parameter in free]
