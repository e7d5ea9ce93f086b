"""From hooks to buckets: gradients that travel and are speculated on together, in the order in which they are ready.

They may be taken in post-accumulate-grad hooks, and those that FSDP2 has reduced a group later. One that goes into a
bucket leaves a handle in `.grad`. This code runs within backward, where every call finds cold caches, so it does as
little as possible for each gradient.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from superadam.devices import Device, Event, Stream
from superadam.distributed import shards
from superadam.handles.gradient_handle import shared_memory, take_gradient, taken_of
from superadam.handles.taken_gradient import GradientHolder, TakenGradient
from superadam.kernels.torch_private import missing, storage_key, uncompiled
from superadam.state.parameter import ParameterState, Piece

_logger = logging.getLogger("superadam")

PAUSE_STEPS = 16  # in which nothing is taken, after a step whose gradients were mostly edited before it
EMPTY_STEPS = 3  # of whose gradients none could be taken, before the program is warned


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


@dataclass(slots=True)
class Bucket:
    """Gradients that are sent together, by the pieces they are of; `numel` counts the elements of all.

    A stream that reads those on the device first waits for every event in `made`.
    """

    is_resident: bool
    gradients: dict[Piece, TakenGradient] = field(default_factory=dict)
    numel: int = 0
    made: dict[Event, None] = field(default_factory=dict)


class Accumulation:
    """Learns from each step how many gradients every parameter gets in the next one, and so which of them is the last.

    A wrong answer costs time, and no bits but where a gradient travels in a narrower dtype: one that is taken too early
    is given back, rounded then, when autograd adds to it.

    Attributes:
        sum_dtype: in which gradients are to be added up on the host; None to add them in `.grad`.
    """

    def __init__(self) -> None:
        self.sum_dtype: torch.dtype | None = None
        self._is_inside = False
        self._is_announced = False  # this step's backwards are announced by accumulate()
        self._expected: dict[int, int] = {}
        self._counts: dict[int, int] = {}
        self._pause = 0

    @contextmanager
    def accumulate(self, dtype: torch.dtype | None) -> Iterator[None]:
        """As `OffloadScheduler.accumulate`."""
        if dtype not in (None, torch.float32):
            raise ValueError(f"accumulate() got dtype {dtype}, expected None (that of .grad) or torch.float32")
        before = self._is_inside, self.sum_dtype
        self._is_inside, self.sum_dtype, self._is_announced = True, dtype, True
        try:
            yield
        finally:
            self._is_inside, self.sum_dtype = before

    def is_last(self, parameter: int, *, is_first: bool) -> bool:
        """Count a gradient, and return whether no further one is expected before `step()`.

        `parameter` is an id; `is_first` says whether the gradient was not added to an earlier one.
        """
        count = 1 if is_first else self._counts.get(parameter, 0) + 1
        self._counts[parameter] = count
        if self._is_inside or self._pause:
            return False
        return self._is_announced or count >= self._expected.get(parameter, 1)

    def end_step(self, *, is_edited: bool) -> None:
        """End a step; `is_edited` says whether most gradients that were taken were written to before it."""
        self._expected = {} if self._is_announced else self._counts
        self._counts = {}
        self._is_announced = False
        self._pause = PAUSE_STEPS if is_edited else max(0, self._pause - 1)


class Bucketer:
    """Takes gradients out of `.grad` and puts them into buckets, for one step after another.

    Args:
        device: that gradients are on.
        holder: of the gradients that are taken; it is referenced weakly.
        bucket_numel: elements from which on a bucket is full, with the piece that fills it; may be changed.
        round_taken: `Transfers.round_taken` where gradients are rounded on their way.

    Attributes:
        resident: pieces whose gradients go into resident buckets.
        last: the last piece that travels, where others are resident: its bucket is sent at once.
    """

    def __init__(
        self,
        device: Device,
        holder: GradientHolder,
        bucket_numel: int,
        round_taken: Callable[[ParameterState, TakenGradient, Event | None], Event | None] | None = None,
    ) -> None:
        self.accumulation = Accumulation()
        self._is_refused = False  # whether a gradient of this step could not be taken
        self._empty_steps = 0  # steps in a row in which none could be
        self.resident: frozenset[Piece] = frozenset()
        self.last: Piece | None = None
        self._device = device
        self._holder, self._round_taken = weakref.ref(holder), round_taken  # it has this one, too
        self.bucket_numel = bucket_numel
        self._states: dict[int, ParameterState] = {}  # by the parameter's id: tensors take long to hash
        # By whether they are resident. What an error lets miss its bucket is left to step().
        self._filling: dict[bool, Bucket] = {}
        # The latest one of each parameter in this step; None once it was given back, when we may not reference it.
        self._taken: dict[int, weakref.ref[TakenGradient] | None] = {}

    def take_from(self, states: Iterable[ParameterState]) -> None:
        """Take the gradients of these parameters only; those that were taken before are in `.grad`."""
        self._states = {id(state.parameter): state for state in states}
        self._filling = {}

    def add(self, parameter: Tensor, made: Event | None = None) -> list[Bucket]:
        """Take the gradient that backward has completed, if it is the last one; return buckets that are full.

        It has its values once `made` has passed.
        """
        key = id(parameter)
        state = self._states.get(key)
        if state is None:  # no longer the optimizer's
            return []
        before = self._taken.get(key)
        is_first = before is not None and (before() is None or before() is not taken_of(parameter.grad))
        is_last = self.accumulation.is_last(key, is_first=is_first)
        if before is None and key in self._taken:
            del self._taken[key]  # it was given back to autograd, which has added to it
        if not is_last and self.accumulation.sum_dtype is None:
            return []
        taken = self._take(parameter, state)
        if taken is None:
            return []
        is_host = self._device.is_host(taken.pending)
        if not is_host:  # of another stream, perhaps; given back, it is copied on this one, and dropped
            self._device.record_stream(taken.pending, Stream.CURRENT)
        elif made is not None:
            taken.arrived, made = taken.arrived or made, None  # a sum's event is its own
        if not is_last:
            if made is not None:
                self._device.wait(Stream.CURRENT, made)
            taken.become_sum(torch.empty_strided(state.shape, state.strides, dtype=state.dtype, device="cpu"))
            return []
        if self._round_taken is not None:  # at once, so that nobody sees other values
            made = self._round_taken(state, taken, made)
            is_host = self._device.is_host(taken.pending)
        self._taken[key] = weakref.ref(taken)
        full: list[Bucket] = []
        for piece in state.pieces:
            is_resident = piece in self.resident and not is_host
            bucket = self._filling.get(is_resident) or self._filling.setdefault(is_resident, Bucket(is_resident))
            bucket.numel += piece.shape.numel() * (piece not in bucket.gradients)
            bucket.gradients[piece] = taken
            if made is not None:
                bucket.made[made] = None
            if bucket.numel >= self.bucket_numel or piece is self.last:
                full += self._filled(is_resident)
        if state.cuts:  # whose gradient keeps its memory until all of it is sent
            full += self.rest()
        return full

    def _take(self, parameter: Tensor, state: ParameterState) -> TakenGradient | None:
        """Return a gradient that was not taken yet, or a sum of micro-batches; None where it has to be left alone."""
        gradient = parameter.grad
        if gradient is None:  # an earlier hook has dropped it
            return None
        known = None if type(gradient) is Tensor else taken_of(gradient)
        if known is not None:
            return known if known.is_unrounded and not known.in_use and self.accumulation.sum_dtype is None else None
        is_plain = type(gradient) is Tensor and state.local is state.parameter
        local = gradient if is_plain else shards.part_of(gradient, parameter)
        if local is None or (type(local) is Tensor and state.fault_of(local) is not None):  # others may raise anything
            return None  # step() raises it
        del gradient, local  # a second reference, with which it could not be taken
        taken = take_gradient(parameter, state, self._holder())
        self._is_refused |= taken is None
        return taken

    def rest(self) -> list[Bucket]:
        """Return the buckets that have begun, full or not."""
        return [bucket for is_resident in sorted(self._filling) for bucket in self._filled(is_resident)]

    def _filled(self, is_resident: bool) -> list[Bucket]:
        """Return a bucket that has begun, unless all of its gradients were given back."""
        bucket = self._filling.pop(is_resident, None)  # for one thread only
        return [bucket] if bucket is not None and bucket.gradients else []

    def forget(self, taken: TakenGradient) -> bool:
        """Forget a gradient that was given back; return whether it was taken in the present step."""
        parameter = taken.parameter
        known = None if parameter is None else self._taken.get(id(parameter))
        if known is None or known() is not taken:
            return False
        self._taken[id(parameter)] = None
        for bucket in self._filling.values():  # which would refer to memory that autograd adds the next one to
            for piece in taken.owner().pieces:
                if bucket.gradients.pop(piece, None) is not None:
                    bucket.numel -= piece.shape.numel()
        return True

    def end_step(self) -> None:
        """End a step: the next gradient of each parameter is its first one."""
        ended, self._taken = self._taken, {}
        is_refused, self._is_refused = self._is_refused, False
        self._empty_steps = 0 if ended else self._empty_steps + is_refused
        if is_refused and self._empty_steps == EMPTY_STEPS and not missing:
            _logger.warning(
                "no gradient of %d steps could be taken, so nothing overlaps: something else refers to their memory, "
                "as CUDA graphs of torch.compile(mode='reduce-overhead') do; see "
                "https://github.com/superadam/superadam/blob/main/docs/tuning.md",
                EMPTY_STEPS,
            )
        edited = [key for key, taken in ended.items() if taken is None]
        self.accumulation.end_step(is_edited=bool(edited) and 2 * self._numel_of(edited) >= self._numel_of(ended))

    def _numel_of(self, keys: Iterable[int]) -> int:
        return sum(self._states[key].shape.numel() for key in keys if key in self._states)
