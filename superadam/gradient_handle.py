"""The tensor that stays in `.grad` when the optimizer has taken the gradient.

A handle has the gradient's shape, strides, dtype and device, and no memory. Norms and products with one scalar are
answered or recorded; reads are computed from the gradient. A write or an alias gives the gradient back: `.grad` is an
ordinary tensor again, and handles that are still held elsewhere forward to it. A handle is never used for a second
gradient.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._guards import TracingContext
from torch.utils import _foreach_utils

from superadam.taken_gradient import (
    Factor,
    FactorKind,
    Keeper,
    Number,
    Owner,
    TakenGradient,
    continue_version,
    outside_inference_mode,
)

aten = torch.ops.aten

_READABLE = frozenset({"aten", "_c10d_functional"})
"""Namespaces whose schemas can be trusted to say what is written to."""


class GradientHandle(torch.Tensor):
    """A gradient that was taken, as the rest of a program sees it.

    Several handles may stand for one gradient: what `detach()`, `.data` or a view of the same shape of one returns is
    another.

    Attributes:
        taken: the record of the gradient.
        is_alias: whether it was made from another handle. Replacing the memory of one does not change the other.
        has_memory: whether it has got the memory of the gradient that was given back.
    """

    taken: TakenGradient
    is_alias = False
    has_memory = False

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # `.shape` stays fast

    @staticmethod
    def __new__(cls, taken: TakenGradient) -> GradientHandle:
        """Make a handle of a gradient that was not given back."""
        handle: GradientHandle = torch.Tensor._make_wrapper_subclass(
            cls,
            taken.shape,
            strides=taken.strides,
            dtype=taken.dtype,
            device=taken.device,
        )
        handle.taken = taken
        torch._C._set_throw_on_mutable_data_ptr(handle)  # C++ that asks for memory gets an exception, not address 0
        return handle

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, operation: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Answer or record the operation, or run it on ordinary tensors."""
        kwargs = kwargs or {}
        serve = _LAZY.get(operation)
        if serve is not None:
            result = serve(operation, *args, **kwargs)
            if result is not NotImplemented:
                return result
        return _run(operation, args, kwargs)

    # -- what never reaches the dispatcher -----------------------------------------------------------------------------

    @property
    def data(self) -> Tensor:
        """As in torch: an alias without history."""
        return _memory(self).data if self.taken.is_given else _alias_of(self.taken)

    @data.setter
    def data(self, new: Tensor) -> None:
        if isinstance(new, GradientHandle):
            if new.taken is self.taken:  # as `module.to()` does where nothing changes
                return
            new = _memory(new)
        parameter = self.taken.parameter
        is_gradient = parameter is not None and parameter.grad is self
        _set_memory(self, new)
        with outside_inference_mode():
            given = new.detach()
        continue_version(given, self)
        self.taken = TakenGradient.of_given(given)
        if parameter is not None and is_gradient:
            try:
                parameter.grad = given
            except RuntimeError:  # the parameter has another dtype or shape: the handle forwards
                return

    @property
    def requires_grad(self) -> bool:
        """As in torch; setting it to True gives back."""
        return bool(torch.Tensor.requires_grad.__get__(self))  # type: ignore[attr-defined]

    @requires_grad.setter
    def requires_grad(self, requires_grad: bool) -> None:
        self.requires_grad_(requires_grad)

    def requires_grad_(self, requires_grad: bool = True) -> Tensor:
        """As in torch; True gives back."""
        if not requires_grad and not self.requires_grad:
            return self
        given = _memory(self)
        super().requires_grad_(requires_grad)  # for graphs built on this object
        return given.requires_grad_(requires_grad)

    @property
    def __cuda_array_interface__(self) -> Any:
        return _memory(self).__cuda_array_interface__

    def untyped_storage(self) -> torch.UntypedStorage:
        """As in torch. Does not give back while a compiler looks at it, which must not see `.grad` change."""
        return super().untyped_storage() if _is_tracing() else _memory(self).untyped_storage()

    def is_shared(self) -> bool:
        """As in torch."""
        return _memory(self).is_shared() if self.taken.is_given else self.is_cuda  # type: ignore[no-untyped-call]

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return repr(_value(self))

    def __format__(self, format_spec: str) -> str:
        return format(_value(self), format_spec)

    def tolist(self) -> Any:
        """As in torch."""
        return _value(self).tolist()

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        if id(self) not in memo:
            memo[id(self)] = _copy(self).requires_grad_(self.requires_grad)
        copied: Tensor = memo[id(self)]
        return copied

    def __copy__(self) -> Tensor:
        given = _memory(self)
        return given.detach().requires_grad_(given.requires_grad)

    def __reduce_ex__(self, protocol: Any) -> Any:
        whole = _memory(self) if self.taken.is_given else _copy(self)
        return whole.__reduce_ex__(protocol)  # type: ignore[no-untyped-call]


def _alias_of(taken: TakenGradient) -> GradientHandle:
    """Return another handle of the gradient."""
    handle = GradientHandle(taken)
    handle.is_alias = True
    return handle


def _copy(handle: GradientHandle) -> Tensor:
    """Return the values in memory of their own."""
    value = _value(handle)
    is_held = handle.taken.is_given or value is handle.taken.pending
    return value.detach().clone() if is_held else value.detach()


def _is_tracing() -> bool:
    """Return whether a compiler looks at tensors."""
    compiled_autograd = sys.modules.get("torch._dynamo.compiled_autograd")  # importing it takes seconds
    return (
        torch.compiler.is_compiling()
        or TracingContext.try_get() is not None
        or bool(getattr(compiled_autograd, "compiled_autograd_enabled", False))
    )


def _value(tensor: Tensor) -> Tensor:
    """Return the values of a handle, not to be written to; any other tensor as it is."""
    if not isinstance(tensor, GradientHandle):
        return tensor
    return _memory(tensor) if tensor.taken.is_given else tensor.taken.value()


def _memory(handle: GradientHandle) -> Tensor:
    """Give back, and return the ordinary tensor; let code in C++ that holds the handle find its memory."""
    taken = handle.taken
    given = taken.give_back()
    if handle.is_alias and taken.alias is not None:
        given = taken.alias
    if not handle.has_memory:
        _set_memory(handle, given)
    return given


def _set_memory(handle: GradientHandle, memory: Tensor) -> None:
    """Let the handle itself have the memory of an ordinary tensor."""
    with torch.inference_mode(False):  # within the dispatcher, only this lets the setter reach autograd
        torch.Tensor.data.__set__(handle, memory.detach())  # type: ignore[attr-defined]
    handle.has_memory = True


def _give_memory_to(name: str) -> None:
    """Let a method work on the ordinary tensor."""

    def method(self: GradientHandle, *args: Any, **kwargs: Any) -> Any:
        return getattr(_memory(self), name)(*args, **kwargs)

    method.__name__ = name
    setattr(GradientHandle, name, method)


def _return_gradient_from(name: str) -> None:
    """Let `p.grad += x` put the ordinary tensor into `.grad` where the operation gave it back."""
    operator = getattr(torch.Tensor, name)

    def method(self: GradientHandle, other: Any) -> Any:
        result = operator(self, other)
        return _memory(self) if result is self and self.taken.is_given else result

    method.__name__ = name
    setattr(GradientHandle, name, method)


for _name in (
    "__array__",
    "__dlpack__",
    "_typed_storage",
    "data_ptr",
    "numpy",
    "share_memory_",
    "storage",
):
    _give_memory_to(_name)

for _name in ("add", "and", "floordiv", "lshift", "mod", "mul", "or", "pow", "rshift", "sub", "truediv", "xor"):
    if hasattr(torch.Tensor, f"__i{_name}__"):
        _return_gradient_from(f"__i{_name}__")

if GradientHandle not in _foreach_utils._foreach_supported_types:  # as torch.distributed.tensor does for DTensor
    _foreach_utils._foreach_supported_types.append(GradientHandle)  # type: ignore[arg-type]

# -- operations on ordinary tensors ------------------------------------------------------------------------------------


def _map(value: Any, of: Callable[[GradientHandle], Tensor]) -> Any:
    """Return an argument with its handles replaced."""
    if isinstance(value, GradientHandle):
        return of(value)
    if isinstance(value, list | tuple):
        return type(value)([_map(item, of) for item in value])
    return value


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, list | tuple):
        return []
    return [tensor for item in value for tensor in _tensors(item)]


def _run(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operation on the values of handles that it only reads, and on the gradients of others, given back."""
    schema = _schema_of(operation)
    for handle in _handles_at(schema.aliased, args, kwargs):
        _memory(handle)
    read: list[tuple[GradientHandle, Tensor]] = []
    passed: dict[int, GradientHandle] = {}

    def ordinary(handle: GradientHandle) -> Tensor:
        if handle.taken.given is None:
            value = handle.taken.value()
            read.append((handle, value))
            return value
        memory = _memory(handle)
        passed.setdefault(id(memory), handle)
        return memory

    result = operation(*_map(args, ordinary), **{name: _map(value, ordinary) for name, value in kwargs.items()})
    if read and _share_memory(result, [value for _, value in read]):  # although the schema says otherwise
        for handle, _ in read:
            _memory(handle)
        return _run(operation, args, kwargs)
    for handle in _handles_at(schema.written, args, kwargs):
        memory = _memory(handle)
        if not memory.is_inference():
            torch.autograd.graph.increment_version(memory)  # the dispatcher counts a version of the handle only
    if schema.returns_written:  # an operation in place returns the object that was passed
        if isinstance(result, Tensor):
            return passed.get(id(result), result)
        if isinstance(result, list | tuple):
            return type(result)([passed.get(id(item), item) for item in result])
    return result


@dataclass(frozen=True)
class _Schema:
    """What an operation does to its arguments, as far as it can be trusted.

    Attributes:
        written: place and name of arguments that are written to.
        aliased: of those, and of those that results may be aliases of; of all, where the schema cannot be trusted.
        returns_written: whether results are arguments that were written to.
    """

    written: tuple[tuple[int, str], ...]
    aliased: tuple[tuple[int, str], ...]
    returns_written: bool


@functools.cache
def _schema_of(operation: Any) -> _Schema:
    arguments = operation._schema.arguments
    marked = [(it.alias_info, (place, it.name)) for place, it in enumerate(arguments) if it.alias_info is not None]
    is_trusted = operation.namespace in _READABLE
    return _Schema(
        tuple(where for alias, where in marked if alias.is_write),
        tuple((place, it.name) for place, it in enumerate(arguments) if not is_trusted or it.alias_info is not None),
        any(result.alias_info is not None and result.alias_info.is_write for result in operation._schema.returns),
    )


def _handles_at(
    places: tuple[tuple[int, str], ...], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[GradientHandle]:
    return _handles([args[place] if place < len(args) else kwargs.get(name) for place, name in places])


def _handles(value: Any) -> list[GradientHandle]:
    return [tensor for tensor in _tensors(value) if isinstance(tensor, GradientHandle)]


def _share_memory(result: Any, values: list[Tensor]) -> bool:
    """Return whether a result lies in the memory of one of the values."""
    memory = {value.untyped_storage()._cdata for value in values}
    return any(
        tensor.layout is torch.strided and tensor.untyped_storage()._cdata in memory for tensor in _tensors(result)
    )


# -- operations that are answered or recorded --------------------------------------------------------------------------

_LAZY: dict[Any, Callable[..., Any]] = {}
"""Functions that get the operation and its arguments; NotImplemented where they cannot answer."""


def _serves(*operations: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        _LAZY.update(dict.fromkeys(operations, function))
        return function

    return register


def _taken(tensor: Any) -> TakenGradient | None:
    """Return the record of a handle whose gradient was not given back."""
    if type(tensor) is not GradientHandle or tensor.taken.given is not None:
        return None
    return tensor.taken


def _is_scalar_for(tensor: Tensor, value: Any) -> bool:
    """Return whether a product with `value` can be recorded."""
    if type(value) is not Tensor:
        return isinstance(value, int | float)
    return (
        not value.shape
        and not value.requires_grad
        and not value.is_complex()
        and value.layout is torch.strided
        and (value.is_cpu or value.device == tensor.device)
    )


def _kept(value: Number) -> Number:
    """Return a scalar that its holder cannot change."""
    return value.clone() if isinstance(value, Tensor) else value


@_serves(aten.detach.default, aten.alias.default)
def _detach(operation: Any, tensor: Tensor) -> Any:
    taken = _taken(tensor)
    return NotImplemented if taken is None else _alias_of(taken)


@_serves(aten.view.default)
def _view(operation: Any, tensor: Tensor, size: list[int]) -> Any:
    taken = _taken(tensor)
    return NotImplemented if taken is None or tuple(size) != tuple(taken.shape) else _alias_of(taken)


@_serves(aten._foreach_norm.Scalar)
def _foreach_norm(operation: Any, tensors: list[Tensor], ord: Any = 2, dtype: Any = None) -> Any:
    norms: list[Tensor | None] = []
    for tensor in tensors:
        taken = _taken(tensor)
        norm = None
        if taken is not None and ord == 2 and dtype is None:
            keeper = taken.keeper
            if keeper is not None:
                keeper.note_norm(taken)
            norm = taken.usable_norm()
        norms.append(norm)
    missing = [_value(tensor) for tensor, norm in zip(tensors, norms, strict=True) if norm is None]
    computed = iter(operation(missing, ord, dtype=dtype) if missing else ())
    return [next(computed) if norm is None else norm for norm in norms]


def _recorded(kind: FactorKind) -> Callable[..., Any]:
    def record(operation: Any, tensor: Tensor, value: Any) -> Any:
        taken = _taken(tensor)
        if taken is None or not _is_scalar_for(tensor, value):
            return NotImplemented
        taken.record_factor(Factor(kind, _kept(value)))
        return tensor

    return record


_serves(aten.mul_.Tensor, aten.mul_.Scalar)(_recorded(FactorKind.MULTIPLY))
_serves(aten.div_.Tensor, aten.div_.Scalar)(_recorded(FactorKind.DIVIDE))


def _recorded_in_list(kind: FactorKind) -> Callable[..., Any]:
    def record(operation: Any, tensors: list[Tensor], value: Any) -> Any:
        if not all(_taken(tensor) is None or _is_scalar_for(tensor, value) for tensor in tensors):
            return NotImplemented
        factor = Factor(kind, _kept(value), lambda gradient, scalar: operation([gradient], scalar))
        others = _record_each(tensors, factor)
        if others:
            operation(others, value)
        return None

    return record


def _record_each(tensors: list[Tensor], factor: Factor) -> list[Tensor]:
    """Record one product on all open handles and return the other tensors."""
    others = []
    for tensor in tensors:
        taken = _taken(tensor)
        if taken is None:
            others.append(_value(tensor))
        else:
            taken.record_factor(factor)
    return others


_serves(aten._foreach_mul_.Scalar, aten._foreach_mul_.Tensor)(_recorded_in_list(FactorKind.MULTIPLY))
_serves(aten._foreach_div_.Scalar, aten._foreach_div_.Tensor)(_recorded_in_list(FactorKind.DIVIDE))


@_serves(aten._amp_foreach_non_finite_check_and_unscale_.default)
def _unscale(operation: Any, tensors: list[Tensor], found: Tensor, inverse: Tensor) -> Any:
    if (
        type(inverse) is not Tensor
        or type(found) is not Tensor
        or inverse.numel() != 1
        or found.numel() != 1
        or inverse.dtype != torch.float32
        or found.dtype != torch.float32
    ):
        return NotImplemented
    for tensor in tensors:
        taken = _taken(tensor)
        if taken is None:
            continue
        keeper = taken.keeper
        # A sum in a wider dtype can be finite where the gradient, rounded, is not.
        is_as_arrived = keeper is not None and not taken.factors and not taken.is_sum
        count = keeper.nonfinite_of(taken) if keeper is not None and is_as_arrived else None
        if count is None:
            found.masked_fill_(~torch.isfinite(taken.value()).all().to(found.device), 1.0)
        elif count:
            found.fill_(1.0)
    others = _record_each(tensors, Factor(FactorKind.UNSCALE, inverse.clone()))
    if others:
        operation(others, found, inverse)
    return None


@_serves(aten.add_.Tensor)
def _accumulate(operation: Any, tensor: Tensor, other: Any, *, alpha: Any = 1) -> Any:
    """Let a sum in a wider dtype take in the next micro-batch, as autograd adds it."""
    taken = _taken(tensor)
    if (
        taken is None
        or not taken.is_sum
        or taken.factors
        or alpha != 1
        or type(other) is not Tensor
        or other.shape != taken.shape
        or other.dtype != taken.dtype
        or other.device != taken.device
        or other.layout is not torch.strided
        or other.requires_grad
    ):
        return NotImplemented
    taken.absorb(other)
    return tensor


# -- taking ------------------------------------------------------------------------------------------------------------


def taken_of(tensor: Tensor | None) -> TakenGradient | None:
    """Return the record of a handle, or of a DTensor's local one; None for a gradient that lies in memory.

    So also for a handle whose gradient was given back.
    """
    kind = type(tensor)
    if kind is Tensor or tensor is None:
        return None
    if kind is GradientHandle:
        return _taken(tensor)
    return _taken(getattr(tensor, "_local_tensor", None))


def settle(parameter: Tensor) -> None:
    """Replace a handle left in `.grad` whose gradient was given back by that gradient."""
    gradient = parameter.grad
    if type(gradient) is GradientHandle and gradient.taken.given is not None:
        parameter.grad = _memory(gradient)


def _references(parameter: Tensor) -> tuple[int, int, int, int]:
    """Count who holds the gradient and its memory, with this function itself."""
    gradient: Any = parameter.grad
    storage = gradient.untyped_storage()
    return (
        sys.getrefcount(gradient),
        gradient._use_count(),
        sys.getrefcount(storage),
        torch._C._storage_Use_Count(storage._cdata),
    )


def _references_of_nobody_else() -> tuple[int, int, int, int]:
    parameter = torch.empty(1, device="cpu")
    parameter.grad = torch.empty(1, device="cpu")
    return _references(parameter)


_USUAL = _references_of_nobody_else()


def is_exclusive(parameter: Tensor) -> bool:
    """Return whether nothing but `.grad` holds the gradient or its memory; the caller must not, either."""
    if parameter.grad is None or parameter.grad.layout is not torch.strided:
        return False
    python, uses, storage, storage_uses = _references(parameter)
    return python <= _USUAL[0] and uses <= _USUAL[1] and storage <= _USUAL[2] and storage_uses <= _USUAL[3]


def take(parameter: Tensor, owner: Owner | None = None, keeper: Keeper | None = None) -> TakenGradient | None:
    """Take the gradient out of `.grad` and leave a handle there; None, and no change, where it cannot be taken.

    It can if it is an ordinary dense tensor without a graph, which neither the caller nor anything else holds. The
    local gradient of a DTensor is taken without that last condition: it is a part of a buffer that FSDP2 lets go.

    Args:
        parameter: the tensor whose `.grad` is taken.
        owner: finds the parameter when the gradient is given back; held weakly.
        keeper: is asked and told about the gradient; held weakly.
    """
    if type(parameter.grad) is not Tensor:
        return _take_local(parameter, owner, keeper)
    if not is_exclusive(parameter):
        return None
    gradient = parameter.grad
    if not _can_be_taken(gradient):
        return None
    taken = TakenGradient(gradient, owner, keeper)
    handle = _handle_for(taken)
    try:
        parameter.grad = handle
    except RuntimeError:  # the parameter has got another dtype or shape
        return None
    return taken


def _take_local(parameter: Tensor, owner: Owner | None, keeper: Keeper | None) -> TakenGradient | None:
    """Take the local gradient of a DTensor."""
    gradient: Any = parameter.grad
    local = getattr(gradient, "_local_tensor", None)
    if type(local) is not Tensor or gradient.requires_grad or not _can_be_taken(local):
        return None
    taken = TakenGradient(local, owner, keeper)
    handle = _handle_for(taken)
    try:
        parameter.grad = type(gradient)(handle, gradient._spec, requires_grad=False)
    except RuntimeError:
        return None
    return taken


def _can_be_taken(gradient: Tensor) -> bool:
    return (
        not gradient.requires_grad
        and gradient.layout is torch.strided
        and not gradient.is_inference()
        and not gradient.is_neg()
        and (gradient.is_contiguous() or torch._debug_has_internal_overlap(gradient) == 0)
    )


def _handle_for(taken: TakenGradient) -> GradientHandle:
    handle = GradientHandle(taken)
    if taken.pending._version:
        continue_version(handle, taken.pending)
    return handle
