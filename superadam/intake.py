"""What becomes of a gradient before it travels: added to those of earlier micro-batches, then put into a bucket.

Owns the sums on the host and the bucket that is being filled. It runs in the middle of backward, where every call
finds cold caches, so that it does as little as it can for each gradient. It sends nothing itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import Tensor

from superadam.accumulation import Accumulation
from superadam.buckets import Bucket, Filler
from superadam.parameter import ParameterState
from superadam.transfers import Transfers
from superadam.watch import ModelWatch


class Intake:
    """Takes gradients out of `.grad`, for one step after another.

    Args:
        watch: is told whose gradients were taken.
        transfers: say how travelling rounds gradients that stay.
        bucket_numel: elements from which on a bucket is full.
        send: gets every bucket that is full.
        sends_early: whether it gets it at once; otherwise with `flush`.

    Attributes:
        accumulation: sums over micro-batches.
        kept: ids of parameters whose gradients go into buckets of their own, which are not to travel.
    """

    def __init__(
        self,
        watch: ModelWatch,
        transfers: Transfers,
        bucket_numel: int,
        send: Callable[[Bucket], None],
        *,
        sends_early: bool,
    ) -> None:
        self.accumulation = Accumulation()
        self._watch = watch
        self._transfers = transfers
        self.kept: frozenset[int] = frozenset()
        self._filler = Filler(bucket_numel)
        self._kept_filler = Filler(bucket_numel, is_kept=True)
        self._full: list[Bucket] = []
        self._send = send
        self._sends_early = sends_early
        self._note_ready = transfers.device.note_ready if transfers.device.has_link else None
        self._states: dict[int, ParameterState] = {}  # by the parameter's id: tensors take long to hash

    def place(self, bucket_numel: int, kept: Iterable[Tensor]) -> None:
        """Change the size of buckets, and the parameters that are kept, from the next gradient on."""
        self._filler.bucket_numel = self._kept_filler.bucket_numel = bucket_numel
        self.kept = frozenset(map(id, kept))

    def follow(self, states: Iterable[ParameterState]) -> None:
        """Take the gradients of these parameters, and of no others."""
        self._states = {id(state.parameter): state for state in states}

    def state_of(self, parameter: Tensor) -> ParameterState | None:
        """Return the state of a parameter whose gradients are taken."""
        return self._states.get(id(parameter))

    def take(self, parameter: Tensor, gradient: Tensor) -> None:
        """Take a gradient that is ready.

        Args:
            parameter: whose `.grad` it is.
            gradient: all of it for this backward.

        Raises:
            RuntimeError: the parameter's gradient was taken already.
            TypeError, ValueError: the gradient cannot be added to a sum, because it does not fit its parameter.
        """
        state = self._states.get(id(parameter))
        if state is None:  # no longer the optimizer's
            return
        if self.accumulation.is_at_work:
            self._watch.check_settled(parameter, state.name)
            total = self.accumulation.add(state, gradient)
            parameter.grad = None
            if total is None:
                return
            gradient = total
        self._watch.note_taken(parameter, state.name)
        parameter.grad = None
        if self._note_ready is not None:
            self._note_ready()
        self._fill(state, gradient)

    def take_sums(self) -> None:
        """Take what was added up and got no gradient outside `accumulate()`, with what lies in `.grad` beside it."""
        for parameter, total in self.accumulation.take().items():
            state = self._states.get(id(parameter))
            if state is None:  # no longer the optimizer's
                continue
            self._watch.note_taken(parameter, state.name)
            if parameter.grad is not None:
                total.add_(state.host_copy(parameter.grad, total.dtype))
                parameter.grad = None
            self._fill(state, total)

    def sums(self) -> dict[Tensor, Tensor]:
        """Return what `take_sums` would find, per parameter, as it is after travelling."""
        return {parameter: self._transfers.narrowed(total) for parameter, total in self.accumulation.sums.items()}

    def narrow_left(self) -> None:
        """Round gradients that were left in `.grad` as if they had travelled."""
        if not self._transfers.narrows:
            return
        for state in self._states.values():
            gradient = state.parameter.grad
            if gradient is not None:
                state.parameter.grad = self._transfers.narrowed(gradient)

    def flush(self) -> None:
        """Send what is there, full or not."""
        rest = (self._filler.take(), self._kept_filler.take())
        buckets, self._full = [*self._full, *filter(None, rest)], []
        for bucket in buckets:
            self._send(bucket)

    def forget(self) -> None:
        """Drop every bucket that was not sent, and all sums."""
        self._full.clear()
        self._filler.take()
        self._kept_filler.take()
        self.accumulation.take()

    def _fill(self, state: ParameterState, gradient: Tensor) -> None:
        filler = self._filler
        if self.kept and id(state.parameter) in self.kept and not self._transfers.device.is_host(gradient):
            filler = self._kept_filler
        bucket = filler.add(state, gradient)
        if bucket is None:
            return
        if self._sends_early:
            self._send(bucket)
        else:
            self._full.append(bucket)
