"""What becomes of a gradient before it travels: it leaves a handle in `.grad`, and goes into a bucket.

Owns the buckets that are being filled and which gradients were taken in the present step. It runs in the middle of
backward, where every call finds cold caches, so that it does as little as it can for each gradient. It sends nothing.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable

from torch import Tensor

from superadam.devices import Device
from superadam.handles.gradient_handle import take, taken_of
from superadam.handles.taken_gradient import Keeper, TakenGradient
from superadam.offload.accumulation import MicroBatches
from superadam.offload.buckets import Bucket
from superadam.state.parameter import ParameterState


class Intake:
    """Takes gradients out of `.grad`, for one step after another.

    Args:
        device: that gradients are on.
        keeper: answers for gradients that were taken.
        bucket_numel: elements from which on a bucket is full; the parameter that fills it is the last one in.

    Attributes:
        bucket_numel: may be changed at any time.
        micro_batches: say whether a gradient is the last one of its step.
        kept: ids of parameters whose gradients go into buckets of their own, which are not to travel.
    """

    def __init__(self, device: Device, keeper: Keeper, bucket_numel: int) -> None:
        self.micro_batches = MicroBatches()
        self.kept: frozenset[int] = frozenset()
        self._device = device
        self._keeper = keeper
        self.bucket_numel = bucket_numel
        self._filling = {is_kept: Bucket(is_kept) for is_kept in (False, True)}
        self._lock = threading.Lock()  # a backward may run in another thread
        self._states: dict[int, ParameterState] = {}  # by the parameter's id: tensors take long to hash
        # The latest one of each parameter in this step; None once it was given back, when nobody else may hold it.
        self._taken: dict[int, weakref.ref[TakenGradient] | None] = {}

    def follow(self, states: Iterable[ParameterState]) -> None:
        """Take the gradients of these parameters, and of no others."""
        self._states = {id(state.parameter): state for state in states}

    def state_of(self, parameter: Tensor) -> ParameterState | None:
        """Return the state of a parameter whose gradients are taken."""
        return self._states.get(id(parameter))

    def take(self, parameter: Tensor) -> Bucket | None:
        """Take the gradient that a backward has just completed, if it is the last one; return a bucket that is full."""
        key = id(parameter)
        state = self._states.get(key)
        if state is None:  # no longer the optimizer's
            return None
        is_last = self.micro_batches.is_last(key, is_first=self._taken.get(key) is not None)
        if key in self._taken and self._taken[key] is None:
            del self._taken[key]  # it was given back to autograd, which has added to it
        if not is_last and self.micro_batches.sum_dtype is None:
            return None
        taken = self._take(parameter, state)
        if taken is None:
            return None
        if not is_last:
            taken.pending, taken.is_sum = state.host_copy(taken.pending, state.dtype), True
            return None
        self._device.note_ready()
        self._taken[key] = weakref.ref(taken)
        with self._lock:
            bucket = self._filling[key in self.kept and not self._device.is_host(taken.pending)]
            bucket.add(state, taken)
            return self._filled(bucket) if bucket.numel >= self.bucket_numel else None

    def _take(self, parameter: Tensor, state: ParameterState) -> TakenGradient | None:
        """Return a gradient that was not taken yet, or a sum of micro-batches; None where it has to be left alone."""
        gradient = parameter.grad
        if gradient is None:  # an earlier hook has dropped it
            return None
        known = taken_of(gradient)
        if known is not None:
            return known if known.is_sum and not known.in_use and self.micro_batches.sum_dtype is None else None
        try:
            state.check_gradient(gradient)
        except (TypeError, ValueError):
            return None  # step() tells
        del gradient  # or it would not be the only one
        return take(parameter, state, self._keeper)

    def rest(self) -> list[Bucket]:
        """Return what there is, full or not."""
        with self._lock:
            return [filled for bucket in list(self._filling.values()) if (filled := self._filled(bucket))]

    def _filled(self, bucket: Bucket) -> Bucket | None:
        """Begin a new bucket; return what counts of this one, if anything."""
        self._filling[bucket.is_kept] = Bucket(bucket.is_kept)
        current = bucket.current()
        return current if current.states else None

    def note_given_back(self, taken: TakenGradient) -> bool:
        """Somebody wrote to a gradient that was taken; return whether it is one of the present step."""
        parameter = taken.parameter
        known = None if parameter is None else self._taken.get(id(parameter))
        if known is None or known() is not taken:
            return False
        self._taken[id(parameter)] = None
        return True

    def end_step(self) -> None:
        """A step was made: the next gradient of each parameter is its first one."""
        elements = {key: self._states[key].shape.numel() for key in self._taken if key in self._states}
        edited = sum(count for key, count in elements.items() if self._taken[key] is None)
        self.micro_batches.end_step(is_edited=edited > 0 and 2 * edited >= sum(elements.values()))
        self._taken = {}
