"""A gradient that was taken from `.grad`, and the products recorded on it since.

What torch would hold in `.grad` is computed on demand from the gradient as it arrived, with torch's own operations and
rounding, and in the usual floating-point mode: in another one, products on the CPU are made at once, not recorded.
Nothing here keeps the parameter alive, because its `.grad` leads back here.
"""

from __future__ import annotations

import collections
import ctypes
import enum
import functools
import math
import threading
import weakref
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from superadam.devices.flat import JoinedTensor
from superadam.distributed import shards
from superadam.host.signals import THIS_THREAD
from superadam.kernels import native, torch_private
from superadam.kernels.torch_private import version_of


class GradientHolder:
    """What took gradients, and answers questions about them."""

    _lock: Callable[[], AbstractContextManager[object]] = nullcontext  # held where these gradients are taken and sent

    def _nonfinite_of(self, taken: TakenGradient) -> int | None:
        """Return the count of Inf and NaN in the gradient as it arrived; None if they were not counted."""
        return None

    def _norm_was_asked(self, taken: TakenGradient) -> None:
        """Called when `torch._foreach_norm` was called for the 2-norm of this gradient, in a list."""

    def _was_given_back(self, taken: TakenGradient) -> None:
        """Called once `.grad` is an ordinary gradient again."""

    def _adds(self, total: HostSum, taken: TakenGradient, new: Tensor) -> bool:
        """Start to send a new micro-batch to a sum on the host; return False where the caller has to add it."""
        return False

    def takes_unrounded(self, parameter: Tensor) -> bool:
        """Whether gradients of a parameter are taken before they are rounded to its dtype, in fp32."""
        return False

    def unrounded(self, new: Tensor) -> Tensor:
        """Return the unrounded values, if known, of a gradient that is being added to one that was taken."""
        return new

    def check(self) -> None:
        """Called before each verdict of an optimizer whose source this is; raises what has failed since the last."""


class HostSum:
    """An event that has passed once every gradient that was sent is in `total`: whoever waits for it adds them.

    Gradients are added in the order in which they were sent, in the dtype of `total`. Where that `is_empty`, the first
    one replaces what it holds.
    """

    def __init__(self, total: Tensor, *, is_empty: bool) -> None:
        self.total, self._is_empty = total, is_empty
        self._parts: collections.deque[tuple[Tensor, Any]] = collections.deque()
        self._lock = threading.Lock()

    def add(self, part: Tensor, arrived: Any) -> None:
        """Let a gradient on the host be added once the event `arrived` has passed."""
        self._parts.append((part, arrived))

    def query(self) -> bool:
        """Return whether all have arrived, so that waiting only adds them."""
        return all(arrived.query() for _, arrived in [*self._parts])

    @torch.no_grad()
    def synchronize(self) -> None:
        """Add those that were not added yet, once they have arrived; in any thread."""
        with THIS_THREAD.deferred_signals, self._lock, native.UsualFloatMode():
            while self._parts:
                part, arrived = self._parts[0]
                arrived.synchronize()
                (self.total.copy_ if self._is_empty else self.total.add_)(part)
                self._is_empty = False
                self._parts.popleft()


class FactorKind(enum.Enum):
    """The operation of a recorded product, by torch's name; a GradScaler unscales."""

    MULTIPLY = "mul_"
    DIVIDE = "div_"
    UNSCALE = "unscale_"


@dataclass(frozen=True, eq=False)
class Factor:
    """One recorded product; all gradients of the list that it was applied to share it.

    How torch rounds depends on whether the value is a Python number or a tensor, and on whether it was given a list.
    """

    kind: FactorKind
    value: Any
    is_of_list: bool = False

    @functools.cached_property
    def number(self) -> float:
        """`value` as a float; waits for the device that holds it."""
        return float(self.value)

    def number_for(self, dtype: torch.dtype, *, on_cpu: bool) -> float:
        """Return `number` as torch rounds it before it multiplies, or divides, a gradient of this dtype there."""
        is_tensor = isinstance(self.value, Tensor)
        if on_cpu:
            is_narrowed = self.is_of_list and self.kind is FactorKind.MULTIPLY and not is_tensor
        else:  # a GPU narrows one in its memory, but not a loss scale
            is_narrowed = is_tensor and not self.value.is_cpu and self.kind is not FactorKind.UNSCALE
        number = ctypes.c_float(self.number).value
        return float(torch.tensor(number, dtype=dtype, device="cpu")) if is_narrowed else number

    def apply(self, gradient: Tensor) -> None:
        """Do what torch was called to do to a gradient, which is on the device of the original."""
        if self.kind is FactorKind.UNSCALE:
            found = torch.zeros((), dtype=torch.float32, device=gradient.device)
            torch_private.check_and_unscale([gradient], found, self.value)
        elif self.is_of_list:
            form = "Tensor" if isinstance(self.value, Tensor) else "Scalar"
            torch_private.foreach_products[self.kind.value][form]([gradient], self.value)
        else:
            getattr(gradient, self.kind.value)(self.value)

    def apply_on_host(self, gradient: Tensor) -> None:
        """Do what a GPU does to a gradient, with the same rounding, to its copy on the CPU."""
        if isinstance(self.value, Tensor) and not self.value.is_cpu:
            is_narrowed = self.kind is not FactorKind.UNSCALE and gradient.shape  # else torch promotes
            dtype = gradient.dtype if is_narrowed else self.value.dtype
            replace(self, value=self.value.to("cpu", dtype)).apply(gradient)
        elif self.kind is FactorKind.DIVIDE and not self.is_of_list:
            # A GPU divides by a scalar of the host through its inverse, in the precision it computes in.
            precision = torch.promote_types(gradient.dtype, torch.float32)
            gradient.mul_((1.0 / torch.tensor(self.number, dtype=precision, device="cpu")).item())
        else:  # torch.mul_, because for lists the CPU rounds a number to the gradient's dtype first
            replace(self, is_of_list=self.is_of_list and self.kind is FactorKind.DIVIDE).apply(gradient)


def _change(method: Callable[..., None]) -> Callable[..., bool]:
    """Hold the lock and defer signals; return whether a change was made: not once the gradient was given back."""

    @functools.wraps(method)
    def changed(self: TakenGradient, *arguments: Any) -> bool:
        with self._lock(), THIS_THREAD.deferred_signals:
            is_made = self.given is None
            if is_made:
                method(self, *arguments)
            return is_made

    return changed


class _Joined:
    """Joins `pending` when it is first needed, without a lock: all threads find the same tensor."""

    def __get__(self, taken: Any, owner: type) -> Any:
        taken.pending = taken._joined.tensor
        return taken.pending


class TakenGradient:
    """One gradient that was taken from `.grad`, shared by the handle in `.grad` and its aliases.

    Other threads may use the handle at any time, so that reads and changes hold the lock under which it is sent.
    Changes return whether they were made: they are not once the gradient was given back, in another thread as well.
    """

    arrived: Any = None  # event at the end of the copy to `pending`, where it must be waited for
    factors: tuple[Factor, ...] = ()
    norm: Tensor | None = None  # torch's 2-norm of the gradient without factors, on its device
    is_unrounded = False  # `pending` has a wider dtype and counts in it, as a sum of micro-batches does
    is_reduced = False  # it arrived unrounded, so that it stays so where speculation on it is dropped
    in_use = False  # `pending` is read by work under way, so that `absorb` must leave it as it is
    version = 0  # counts changes of `pending` by `absorb`
    given: Tensor | None = None  # the ordinary gradient, once it was given back
    alias: Tensor | None = None  # its memory, as aliases made before see it
    # The gradient, or a copy, also elsewhere or in another dtype; only `absorb` writes to it.
    pending: Tensor = _Joined()  # type: ignore[assignment]
    _sent: JoinedTensor | None = None  # where pieces of `pending` went, but not yet all
    _joined: JoinedTensor | None = None  # what `pending` is to be found in, once they have

    def __init__(self, gradient: Tensor, owner: Any = None, holder: GradientHolder | None = None) -> None:
        self.pending = gradient
        self.shape, self.strides = gradient.shape, gradient.stride()
        self.dtype, self.device = gradient.dtype, gradient.device
        self.exact_dtype = gradient.dtype  # in which it counts and factors apply: that of `pending` if unrounded
        # What has the parameter, weak references to which would forbid torch.utils.swap_tensors; None once it is gone.
        self.owner: Callable[[], Any] = (lambda: None) if owner is None else weakref.ref(owner)
        self._holder: Callable[[], GradientHolder | None] = (lambda: None) if holder is None else weakref.ref(holder)
        self._lock = GradientHolder._lock if holder is None else holder._lock

    @property
    def holder(self) -> GradientHolder:
        """What took the gradient; once that is gone, one that knows nothing."""
        return self._holder() or GradientHolder()

    @property
    def parameter(self) -> Tensor | None:
        """The tensor whose `.grad` this was; None once its owner is gone."""
        return getattr(self.owner(), "parameter", None)

    # -- values --------------------------------------------------------------------------------------------------------

    def move_to(self, copy: Tensor, arrived: Any) -> None:
        """Have a copy as `pending`, to be read once the event `arrived` has passed."""
        if self.given is None:  # a finalizer may have used the handle
            self.arrived, self.pending = arrived, copy

    def move_piece_to(self, copy: Tensor, arrived: Any, *, begin: int, strides: tuple[int, ...]) -> None:
        """Do the same with elements of `pending` from `begin` on, which moves when all of them have.

        Elements are in the order of these dense strides. Events pass in the order in which they come here.
        """
        if self.given is not None:
            return
        sent = self._sent = self._sent or JoinedTensor(self.shape, strides)
        sent.pieces[begin], sent.arrived = copy, arrived
        if sent.is_complete:
            self.arrived, self._joined, self._sent = arrived, sent, None
            del self.pending

    def ready(self) -> Tensor:
        """Return `pending` once it has arrived."""
        arrived = self.arrived
        if arrived is not None:
            arrived.synchronize()
            self.arrived = None
        return self.pending

    @property
    def norm_dtype(self) -> torch.dtype | None:
        """The dtype to which torch would round a norm; None if that is the dtype of what it is computed from."""
        return self.dtype if self.is_unrounded else None

    def value(self) -> Tensor:
        """Return what torch would hold in `.grad` now; may be `pending` itself: not to be written to."""
        with self._lock():
            return self._as_it_was(self.exact(), self.dtype)

    def exact(self) -> Tensor:
        """Return the same values in the dtype in which they count."""
        with self._lock():
            exact = self._as_it_was(self.ready(), self.exact_dtype)
            if not self.factors:
                return exact
            return self._multiplied(self._copy_of(exact, exact.dtype) if exact is self.pending else exact)

    def unscaled(self) -> Tensor:
        """Return what `exact` does, without factors, for those who need not wait for `arrived`."""
        return self._as_it_was(self.pending, self.exact_dtype)

    def scaled(self) -> Tensor:
        """Return what `exact` does, where `pending` is and with its strides."""
        pending = self.ready()
        if not self.factors:
            return pending.to(self.exact_dtype)
        return self._multiplied(torch.empty_like(pending, dtype=self.exact_dtype).copy_(pending))

    def _multiplied(self, values: Tensor) -> Tensor:
        """Apply the factors to values and return them."""
        apply = Factor.apply if values.device == self.device else Factor.apply_on_host
        with THIS_THREAD.deferred_signals, native.UsualFloatMode():
            for factor in self.factors:
                apply(factor, values)
        return values

    def _copy_of(self, values: Tensor, dtype: torch.dtype) -> Tensor:
        return torch.empty_strided(self.shape, self.strides, dtype=dtype, device=self.device).copy_(values)

    def _as_it_was(self, values: Tensor, dtype: torch.dtype) -> Tensor:
        """Return values with this dtype, and strides and device of the gradient; themselves where they have them."""
        if values.dtype == dtype and values.device == self.device and values.stride() == self.strides:
            return values
        return self._copy_of(values, dtype)

    # -- factors -------------------------------------------------------------------------------------------------------

    @_change
    def record(self, factor: Factor) -> None:
        """Record a product whose value must not change afterwards."""
        if isinstance(factor.value, Tensor) or factor.value != 1:
            self.factors = (*self.factors, factor)

    @_change
    def multiply(self, factor: Factor) -> None:
        """Make a product at once, in the floating-point mode of the thread; of an unrounded gradient."""
        product = self.scaled().clone()
        (factor.apply if product.device == self.device else factor.apply_on_host)(product)
        self._become(product)

    def scale(self) -> float | None:
        """Return the one number that the gradient is multiplied with; None where one product would round differently.

        That is 1.0 without factors. Otherwise it is a single factor of at most 1, not 0, rounded as torch rounds it, on
        a gradient that counts in fp32 or bf16. Waits for the device that holds it. To be called in the usual
        floating-point mode.
        """
        factors = [factor for factor in self.factors if factor.number != 1.0]
        if not factors:
            return 1.0
        dtype = self.exact_dtype
        if len(factors) > 1 or dtype in (torch.float16, torch.float64):
            return None
        factor = factors[0]
        is_promoted = isinstance(factor.value, Tensor) and factor.kind is not FactorKind.UNSCALE
        if not self.shape and is_promoted and torch.promote_types(factor.value.dtype, dtype) != dtype:
            return None  # torch computes in the wider dtype where neither has dimensions
        scale = factor.number_for(dtype, on_cpu=self.device.type == "cpu")
        if factor.kind is FactorKind.DIVIDE:
            if not scale or abs(math.frexp(factor.number)[0]) != 0.5:  # as of Inf and NaN
                return None
            scale = 1.0 / scale
        return scale if 0.0 < abs(scale) <= 1.0 else None  # also where it is NaN

    def unscale_factor(self) -> float:
        """Return the product of the factors that undo a loss scale; 1.0 without any."""
        unscaling = (factor.number for factor in self.factors if factor.kind is FactorKind.UNSCALE)
        return math.prod(unscaling, start=1.0)

    # -- changes -------------------------------------------------------------------------------------------------------

    @_change
    def absorb(self, new: Tensor) -> None:
        """Add a micro-batch's gradient to an unrounded one, in its dtype; where that fails, nothing has changed."""
        values = self.scaled() if self.factors else self.ready().clone() if self.in_use else self.pending
        new, total = self.holder.unrounded(new).detach(), self.arrived
        if not isinstance(total, HostSum):
            self.ready()
            total = HostSum(values, is_empty=False)
        if self.holder._adds(total, self, new):
            self.arrived = total
        else:
            self.ready()
            values.add_(new.to(values.device, values.dtype))
        self._become(values)

    def become_sum(self, total: Tensor) -> None:
        """Move into memory on the host, in its dtype, to which micro-batches are added; where that fails, stay."""
        gradient, arrived = self.ready().detach(), HostSum(total, is_empty=True)
        is_sent = self.holder._adds(arrived, self, gradient)
        if not is_sent:
            total.copy_(gradient)
        self.arrived, self.pending = arrived if is_sent else None, total
        self.is_unrounded, self.exact_dtype = True, total.dtype

    @_change
    def zero(self) -> None:
        """Become zeros, in memory of their own."""
        self._become(torch.zeros_like(self.pending))
        self.arrived = None

    def _become(self, values: Tensor) -> None:
        """Have other values, to which all products were applied, in memory that no work under way reads."""
        self.pending, self.factors, self.norm, self.in_use = values, (), None, False
        self._sent = self._joined = None
        self.version += 1

    def leave_speculation(self) -> None:
        """Return to `.grad` as an ordinary gradient, or stay a handle of the unrounded one as it arrived."""
        if not self.is_reduced:
            self.give_back()
        elif self.in_use:
            self.pending, self.in_use = self.ready().clone(), False
            self._sent = self._joined = None
            self.version += 1

    def give_back(self) -> Tensor:
        """Make `.grad` an ordinary gradient again, in memory of its own, and return it.

        `.grad` is left alone where it holds something else, or the parameter has another dtype or shape by now.
        """
        with self._lock(), THIS_THREAD.deferred_signals:
            if self.given is not None:
                return self.given
            with torch_private.inference_mode(False):  # inference tensors have no version counters
                value = self.value()
                given = (self._copy_of(value, self.dtype) if value is self.pending else value).data  # of version 0
                self.forward_to(given)
            parameter: Any = self.parameter
            gradient: Any = getattr(parameter, "grad", None)
            local: Any = shards.local_of(gradient)
            if getattr(local, "taken", None) is self:
                with suppress(RuntimeError):
                    continue_version(given, local)
                if local.is_alias:  # it and what is in `.grad` are one tensor, which other aliases are not
                    local.taken, local.is_alias = TakenGradient.of_given(given.detach()), False
                vars(local.given).update(attributes_of(local))
                with suppress(RuntimeError):  # another dtype or shape by now: the handle forwards to `given`
                    if local is not gradient:
                        torch_private.set_dtensor_part(gradient, local.given)
                    elif parameter.grad is gradient:  # no other thread runs before the next line
                        parameter.grad = local.given
            self.holder._was_given_back(self)
            return given

    @staticmethod
    def of_given(given: Tensor) -> TakenGradient:
        """Return what lets a handle forward to an ordinary tensor."""
        taken = TakenGradient(given)
        taken.forward_to(given)
        return taken

    def forward_to(self, given: Tensor) -> None:
        """Let handles have the memory of an ordinary tensor from now on."""
        self.given = given
        self.alias = self.pending = given.detach()
        self.factors, self._sent, self._joined = (), None, None


MOST_FACTORS = 16
"""Products that are recorded of one gradient: more than programs make in a step, but some clip old ones for ever."""


def needs_present_mode(gradients: Iterable[TakenGradient]) -> bool:
    """Return whether torch's arithmetic with any of these has bits, now, that it would not have in the usual mode.

    What a GPU computes does not depend on the mode of a thread.
    """
    return not native.is_float_mode_usual() and any(taken.device.type == "cpu" for taken in gradients)


_OF_HANDLES = frozenset({"taken", "is_alias", "has_memory", "own"})
"""Attributes of handles that are not the program's."""


def attributes_of(handle: Any) -> dict[str, Any]:
    """Return what a program has set on a handle."""
    return {name: value for name, value in vars(handle).items() if name not in _OF_HANDLES}


def continue_version(tensor: Tensor, predecessor: Tensor) -> None:
    """Raise a version counter to that of the tensor that is replaced; RuntimeError if either has none."""
    version = version_of(predecessor)
    if version > version_of(tensor):
        torch_private.raise_versions([tensor], [version])
