"""A gradient that was taken from `.grad`, and the products that were recorded on it since.

It keeps the gradient as it arrived and never writes to it. What torch would hold in `.grad` is computed on demand, with
torch's own operations and rounding. It must not keep the parameter alive: its `.grad` leads back here.
"""

from __future__ import annotations

import ctypes
import enum
import math
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

Number = float | int | Tensor
"""A scalar as it was passed to torch: a Python number, or a tensor without dimensions."""


class Owner(Protocol):
    """What holds the parameter whose gradient was taken; must allow weak references."""

    @property
    def parameter(self) -> Tensor:
        """The tensor whose `.grad` the gradient was."""


class Keeper(Protocol):
    """Who took gradients; must allow weak references."""

    def nonfinite_of(self, taken: TakenGradient) -> int | None:
        """Return the count of Inf and NaN in the gradient as it arrived; None if they were not counted.

        May wait for work under way.
        """

    def note_norm(self, taken: TakenGradient) -> None:
        """Note that torch was asked for the 2-norm of this gradient in a list (`torch._foreach_norm`)."""

    def note_given_back(self, taken: TakenGradient) -> None:
        """Note that `.grad` is an ordinary gradient again; called once, after it is."""


class Event(Protocol):
    """Marks the end of a copy."""

    def synchronize(self) -> None:
        """Wait for it."""


class FactorKind(enum.Enum):
    """What a recorded product was."""

    MULTIPLY = "multiply"
    DIVIDE = "divide"
    UNSCALE = "unscale"
    """Multiplied by the inverse of a loss scale, by a GradScaler."""


def _multiply(gradient: Tensor, value: Number) -> None:
    gradient.mul_(value)


def _divide(gradient: Tensor, value: Number) -> None:
    gradient.div_(value)


def _unscale(gradient: Tensor, value: Number) -> None:
    inverse = value if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float32, device=gradient.device)
    found = torch.zeros((), dtype=torch.float32, device=gradient.device)
    torch._amp_foreach_non_finite_check_and_unscale_([gradient], found, inverse)


_OPERATIONS = {FactorKind.MULTIPLY: _multiply, FactorKind.DIVIDE: _divide, FactorKind.UNSCALE: _unscale}


@dataclass(frozen=True, eq=False)
class Factor:
    """One recorded product; shared by all gradients of the list that it was applied to.

    Attributes:
        kind: what it does with `value`.
        value: the scalar in the form torch got it, because its rounding depends on that. A tensor is never written to.
        operation: the in-place operation that torch was asked for; each rounds in its own way. None: that of `kind`.
    """

    kind: FactorKind
    value: Number
    operation: Callable[[Tensor, Number], object] | None = None

    @cached_property
    def number(self) -> float:
        """`value` as a Python float; waits for the device that holds it."""
        return float(self.value.item() if isinstance(self.value, Tensor) else self.value)

    def apply(self, gradient: Tensor) -> None:
        """Do to `gradient`, which is on the device of the original, what torch was asked to do."""
        (self.operation or _OPERATIONS[self.kind])(gradient, self.value)

    def apply_on_host(self, gradient: Tensor) -> None:
        """Do to a copy on the CPU what a GPU does to a gradient there, with the same rounding."""
        value = self.value
        if isinstance(value, Tensor) and not value.is_cpu:
            # A GPU rounds a scalar in its own memory to the gradient's dtype first. It does not round the loss scale.
            value = value.cpu() if self.kind is FactorKind.UNSCALE else value.to("cpu", gradient.dtype)
        elif self.kind is FactorKind.DIVIDE and self.operation is None:
            # A GPU divides by a scalar of the host through its inverse, in the precision it computes in.
            precision = torch.float64 if gradient.dtype == torch.float64 else torch.float32
            gradient.mul_((1.0 / torch.tensor(self.number, dtype=precision)).item())
            return
        (self.operation or _OPERATIONS[self.kind])(gradient, value)


class TakenGradient:
    """One gradient that was taken from `.grad`, shared by the handle in `.grad` and its aliases.

    Attributes:
        pending: the gradient as it arrived. May be replaced by a copy of it: on another device, with strides of its own
            or in another dtype. Never written to but by `absorb`. Absent once the gradient was given back.
        arrived: end of the copy to `pending`; None if there is nothing to wait for.
        shape, strides, dtype, device: of the gradient in `.grad`.
        factors: products recorded since it was taken, in order.
        norm: torch's 2-norm of the gradient without factors, taken on `device`; None if it was not taken.
        is_sum: whether `pending` is a sum of micro-batches, kept in a wider dtype.
        in_use: whether `pending` is read by work under way, so that `absorb` must leave it as it is.
        version: counts changes of `pending` by `absorb`.
        given: the ordinary gradient, once it was given back.
        alias: the same memory, as aliases made before see it; None before.
    """

    __slots__ = (
        "__weakref__",
        "_handed_norm",
        "_keeper",
        "_owner",
        "alias",
        "arrived",
        "device",
        "dtype",
        "factors",
        "given",
        "in_use",
        "is_sum",
        "norm",
        "pending",
        "shape",
        "strides",
        "version",
    )

    def __init__(self, gradient: Tensor, owner: Owner | None = None, keeper: Keeper | None = None) -> None:
        self.pending = gradient
        self.shape = gradient.shape
        self.strides = gradient.stride()
        self.dtype = gradient.dtype
        self.device = gradient.device
        # To the owner and not to the parameter, whose weak references forbid torch.utils.swap_tensors.
        self._owner = None if owner is None else weakref.ref(owner)
        self._keeper = None if keeper is None else weakref.ref(keeper)
        self.factors: list[Factor] = []
        self.arrived: Event | None = None
        self.norm: Tensor | None = None
        self._handed_norm: tuple[Tensor, int] | None = None
        self.is_sum = self.in_use = False
        self.version = 0
        self.given: Tensor | None = None
        self.alias: Tensor | None = None

    @staticmethod
    def of_given(gradient: Tensor) -> TakenGradient:
        """Return the record of an ordinary gradient that something else than giving back put in a handle's place."""
        taken = TakenGradient(gradient)
        del taken.pending
        taken.given = taken.alias = gradient
        return taken

    @property
    def is_given(self) -> bool:
        """Whether the gradient was given back."""
        return self.given is not None

    @property
    def keeper(self) -> Keeper | None:
        """Who took it; None if it is gone."""
        return None if self._keeper is None else self._keeper()

    @property
    def parameter(self) -> Tensor | None:
        """The tensor whose `.grad` this was; None if its owner is gone."""
        owner = None if self._owner is None else self._owner()
        return None if owner is None else owner.parameter

    # -- values --------------------------------------------------------------------------------------------------------

    def ready(self) -> Tensor:
        """Return `pending` once it has arrived."""
        if self.arrived is not None:
            self.arrived.synchronize()
            self.arrived = None
        return self.pending

    def value(self) -> Tensor:
        """Return what torch would hold in `.grad` now, on its device and in its layout.

        May be `pending` itself: not to be written to.
        """
        if self.given is not None:
            return self.given
        value = self._as_it_was(self.ready())
        if self.factors:
            if value is self.pending:
                value = self._copy_of(value)
            for factor in self.factors:
                factor.apply(value)
        return value

    def scaled(self) -> Tensor:
        """Return the same values as `value()`, where `pending` is and with its strides; `pending` if it holds them.

        A sum without factors keeps its wider dtype.
        """
        if self.given is not None:
            return self.given
        pending = self.ready()
        if not self.factors:
            return pending if self.is_sum or pending.dtype == self.dtype else pending.to(self.dtype)
        scaled = torch.empty_like(pending, dtype=self.dtype).copy_(pending)
        for factor in self.factors:
            if pending.device == self.device:
                factor.apply(scaled)
            else:
                factor.apply_on_host(scaled)
        return scaled

    def _empty(self) -> Tensor:
        return torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=self.device)

    def _copy_of(self, gradient: Tensor) -> Tensor:
        return self._empty().copy_(gradient)

    def _as_it_was(self, pending: Tensor) -> Tensor:
        """Return `pending` in the dtype, layout and place of the gradient; itself where it is so."""
        if pending.dtype == self.dtype and pending.device == self.device and pending.stride() == self.strides:
            return pending
        return self._copy_of(pending)

    def usable_norm(self) -> Tensor | None:
        """Return torch's 2-norm of the present values, in memory of its own; None if it must be computed."""
        if self.norm is None or self.factors or self.given is not None:
            return None
        if self._handed_norm is None or self._handed_norm[0] is not self.norm:
            self._handed_norm = self.norm, self.norm._version
            return self.norm
        return self.norm.clone() if self.norm._version == self._handed_norm[1] else None

    # -- factors -------------------------------------------------------------------------------------------------------

    def record(self, kind: FactorKind, value: Number) -> None:
        """Record a product in place with a scalar; a tensor may be changed later by its holder."""
        self.record_factor(Factor(kind, value.detach().clone() if isinstance(value, Tensor) else value))

    def record_factor(self, factor: Factor) -> None:
        """Record a product whose value is held by nobody else."""
        if isinstance(factor.value, Tensor) or factor.value != 1:
            self.factors.append(factor)

    def scale(self) -> float | None:
        """Return the one number that the gradient is multiplied with; None if one product would round otherwise.

        That is 1.0 without factors, else a single finite factor of at most 1 on an fp32 or fp64 gradient, rounded as
        torch rounds it: to the gradient's dtype. Reads factors from their device.
        """
        if not self.factors:
            return 1.0
        factors = [factor for factor in self.factors if factor.number != 1.0]
        if not factors:
            return 1.0
        if len(factors) > 1 or self.dtype not in (torch.float32, torch.float64):
            return None
        factor = factors[0]
        if not self.shape and isinstance(factor.value, Tensor) and factor.value.dtype.itemsize > self.dtype.itemsize:
            return None  # torch computes in the wider dtype where neither has dimensions
        scale = factor.number if self.dtype == torch.float64 else ctypes.c_float(factor.number).value
        if factor.kind is FactorKind.DIVIDE:
            if not math.isfinite(scale) or abs(math.frexp(scale)[0]) != 0.5:
                return None
            scale = 1.0 / scale
        return scale if abs(scale) <= 1.0 else None  # also where it is NaN

    def unscale_factor(self) -> float:
        """Return the product of the factors that undo a loss scale; 1.0 without any."""
        return math.prod(factor.number for factor in self.factors if factor.kind is FactorKind.UNSCALE)

    # -- changes -------------------------------------------------------------------------------------------------------

    def absorb(self, new: Tensor) -> None:
        """Add a micro-batch's gradient to a sum without factors, in the sum's dtype."""
        pending = self.ready()
        new = new.detach().to(pending.device, pending.dtype)
        if self.in_use:
            self.pending = pending + new
            self.in_use = False
        else:
            pending.add_(new)
        self.norm = None
        self.version += 1

    def give_back(self) -> Tensor:
        """Make `.grad` an ordinary gradient again, in memory of its own, and return it.

        Where `.grad` is not a handle of this gradient, or refuses it because the parameter has become another, `.grad`
        is left as it is.
        """
        if self.given is not None:
            return self.given
        with outside_inference_mode():
            value = self.value()
            given = self._copy_of(value) if value is self.pending else value
            self.alias = given.detach()
        self.given = given
        del self.pending
        self.factors = []
        self.norm = self.arrived = self._handed_norm = None
        self._put(given)
        keeper = self.keeper
        if keeper is not None:
            keeper.note_given_back(self)
        return given

    def _put(self, given: Tensor) -> None:
        parameter = self.parameter
        gradient = None if parameter is None else parameter.grad
        if parameter is None or gradient is None:
            return
        if getattr(gradient, "taken", None) is self:
            continue_version(given, gradient)
            try:
                parameter.grad = given
            except RuntimeError:  # another dtype or shape meanwhile; the handle forwards to `given`
                return
        else:
            local = getattr(gradient, "_local_tensor", None)  # of a DTensor
            if local is not None and getattr(local, "taken", None) is self:
                continue_version(given, local)
                gradient._local_tensor = given  # type: ignore[attr-defined]


def outside_inference_mode() -> AbstractContextManager[object]:
    """Let tensors count versions."""
    return torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext()


def continue_version(tensor: Tensor, predecessor: Tensor) -> None:
    """Let the versions of `tensor` go on from those of the tensor whose place it takes."""
    behind = 0 if predecessor.is_inference() else predecessor._version - tensor._version
    if behind > 0:
        torch.autograd.graph.increment_version([tensor] * behind)
