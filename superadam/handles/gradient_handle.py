"""The tensor that stays in `.grad` when the optimizer has taken the gradient.

A handle has the gradient's shape, strides, dtype and device, and no memory:

- Norms, and products with one scalar, are answered or recorded.
- Reads are computed from the gradient.
- A write or an alias gives the gradient back. `.grad` is then an ordinary tensor, to which old handles forward.
"""

from __future__ import annotations

import copy
import functools
import operator
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from multiprocessing.reduction import ForkingPickler
from typing import Any, ParamSpec, TypeVar

import torch
import torch.utils.dlpack
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor

from superadam.distributed import shards
from superadam.handles.taken_gradient import (
    MOST_FACTORS,
    Factor,
    FactorKind,
    GradientHolder,
    TakenGradient,
    attributes_of,
    continue_version,
    needs_present_mode,
)
from superadam.host.signals import THIS_THREAD
from superadam.kernels import torch_private
from superadam.kernels.nested import map_tensors, tensors_in
from superadam.kernels.torch_private import base_of, missing, storage_key, storage_use_count, tensor_use_count

aten = torch.ops.aten

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


def _ordinarily(function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """Let a function make ordinary tensors within a transform of torch.func or a mode of fake ones: they outlive it."""

    @functools.wraps(function)
    def wrapped(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        with torch_private.without_transforms(), torch_private.without_fake_mode():
            return function(*args, **kwargs)

    return wrapped


_set_flag: Callable[[Tensor, bool], None] = torch.Tensor.requires_grad.__set__  # type: ignore[attr-defined]


class GradientHandle(torch.Tensor):
    """A gradient that was taken, as the rest of a program sees it.

    `detach()`, `.data` or a view of the same shape returns an alias: another handle of the same gradient.
    """

    taken: TakenGradient
    is_alias = False
    has_memory = False  # that of the gradient, which was given back
    own: Tensor | None = None  # the ordinary tensor that an alias forwards to: `set_()` on it moves no other alias

    __torch_function__ = torch_private.no_torch_function  # `.shape` stays fast

    @staticmethod
    def __new__(cls, taken: TakenGradient, *, is_alias: bool = False) -> GradientHandle:
        """Make a handle of a gradient that was not given back."""
        with torch_private.inference_mode(False):  # there, too, an alias counts versions and may be written to later
            handle: GradientHandle = torch_private.make_wrapper_subclass(
                cls, taken.shape, strides=taken.strides, dtype=taken.dtype, device=taken.device
            )
        handle.taken, handle.is_alias = taken, is_alias
        torch_private.forbid_memory(handle)
        return handle

    @classmethod
    @torch_private.uncompiled  # as DTensor's
    def __torch_dispatch__(
        cls, operation: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        serve = _LAZY.get(operation)
        result = NotImplemented if serve is None else serve(operation, *args, **kwargs)
        if result is NotImplemented:
            result = _run(operation, args, kwargs)
        if torch_private.is_foreach(operation):  # whose writes the dispatcher does not count
            written = _tensors_at(_positions(operation)[0], args, kwargs)
            torch.autograd.graph.increment_version([tensor for tensor in written if not tensor.is_inference()])
        return result

    # -- what never reaches the dispatcher -----------------------------------------------------------------------------

    @property
    def given(self) -> Any:
        """The ordinary tensor that this forwards to, once the gradient was given back; None before."""
        if not self.is_alias:
            return self.taken.given
        if self.own is None and self.taken.alias is not None:
            self.own = self.taken.alias.detach()
        return self.own

    @property
    def data(self) -> Tensor:
        """As in torch: an alias without history."""
        return _memory(self).data if self.taken.given is not None else GradientHandle(self.taken, is_alias=True)

    @data.setter
    def data(self, new: Tensor) -> None:
        if isinstance(new, GradientHandle):
            if new.taken is self.taken and new.taken.given is None:  # as `module.to()` does where nothing changes
                return
            new = _memory(new)
        if self.taken.given is not None and not self.is_alias:  # then this and what is in `.grad` are one tensor
            self.taken.given.data = new
            _set_memory(self, new)
            return
        parameter = self.taken.parameter
        given = _set_memory(self, new)
        continue_version(given, self)
        self.taken, self.is_alias = TakenGradient.of_given(given), False
        if parameter is not None and parameter.grad is self:
            with suppress(RuntimeError):  # the parameter has another dtype or shape: the handle forwards
                parameter.grad = given

    def requires_grad_(self, requires_grad: bool = True) -> Tensor:
        """As in torch, also where it refuses; True gives back."""
        if not requires_grad and not self.requires_grad:
            return super().requires_grad_(requires_grad)
        given = _memory(self)
        super().requires_grad_(requires_grad)  # for graphs built on this object
        return given.requires_grad_(requires_grad)

    def _set_requires_grad(self, requires_grad: bool) -> None:
        """Do the same: transforms of torch.func refuse the method, but not the attribute."""
        if requires_grad or self.requires_grad:
            _set_flag(_memory(self), requires_grad)
        _set_flag(self, requires_grad)

    requires_grad = property(torch.Tensor.requires_grad.__get__, _set_requires_grad)  # type: ignore[attr-defined]

    def untyped_storage(self) -> torch.UntypedStorage:
        """As in torch. Does not give back while a compiler traces, which must not see `.grad` change."""
        return super().untyped_storage() if torch_private.is_tracing() else _memory(self).untyped_storage()

    @_ordinarily
    def __copy__(self) -> Tensor:
        copied = _memory(self).detach()
        vars(copied).update(attributes_of(self))
        return copied.requires_grad_() if self.requires_grad else copied

    @_ordinarily
    def __deepcopy__(self, memo: dict[Any, Any]) -> Tensor:
        if self.grad_fn is not None:  # as in torch, which refuses it
            return Tensor.as_subclass(self, Tensor).__deepcopy__(memo)  # type: ignore[no-any-return,no-untyped-call]
        if id(self) in memo:  # torch copies the gradient of a tensor without asking
            return memo[id(self)]  # type: ignore[no-any-return]
        if self.taken.given is not None:
            whole = _memory(self).__deepcopy__(memo)  # type: ignore[no-untyped-call]
        elif (whole := memo.get(self.taken)) is None:  # copies of aliases are aliases, too
            whole = memo[self.taken] = self.taken.value().detach().clone()
        copied = memo[id(self)] = whole.detach()  # with attributes of its own, as this has
        vars(copied).update(copy.deepcopy(attributes_of(self), memo))
        # Transforms refuse any call of requires_grad_().
        return copied.requires_grad_() if self.requires_grad else copied  # type: ignore[no-any-return]

    @_ordinarily
    def __reduce_ex__(self, protocol: Any) -> Any:
        whole = self.__copy__() if self.taken.given is not None else _value(self).detach().clone()
        vars(whole).update(attributes_of(self))
        return whole.__reduce_ex__(protocol)  # type: ignore[no-untyped-call]


def _value(tensor: Tensor) -> Tensor:
    """Return the values of a handle, not to be written to, or any other tensor."""
    return _value_of(tensor) if isinstance(tensor, GradientHandle) else tensor


@_ordinarily
def _value_of(handle: GradientHandle) -> Tensor:
    return _memory(handle) if handle.taken.given is not None else handle.taken.value()


@_ordinarily
def _memory(handle: GradientHandle) -> Tensor:
    """Give the gradient back and return the ordinary tensor, whose memory becomes the handle's, too."""
    handle.taken.give_back()
    given: Tensor = handle.given
    if not handle.has_memory:
        _set_memory(handle, given)
    return given


def _set_memory(handle: GradientHandle, memory: Tensor) -> Tensor:
    """Give the handle itself the memory of an ordinary tensor, and return another tensor with that memory."""
    # Within the dispatcher, only outside inference mode does the setter reach autograd.
    with THIS_THREAD.without_handlers, torch_private.inference_mode(False):
        given = Tensor.detach(memory)
        try:
            torch.Tensor.data.__set__(handle, given)  # type: ignore[attr-defined]
        except RuntimeError:  # torch gives no subclass memory of a PrivateUse1 backend: the handle forwards to `given`
            if given.layout is not torch.strided or given.device != handle.device:
                raise
    handle.has_memory = True
    return given


def _forward(name: str, ordinary: Callable[[GradientHandle], Tensor]) -> None:
    """Make a method work on an ordinary tensor, which has the handle's graph."""

    def method(self: GradientHandle, *args: Any, **kwargs: Any) -> Any:
        graph = self.grad_fn is not None
        tensor = Tensor.as_subclass(self, Tensor) if graph else ordinary(self)
        return getattr(tensor, name)(*map_tensors(args, _value), **kwargs)  # torch maps over no subclasses

    setattr(GradientHandle, name, method)


def _return_gradient_from(name: str) -> None:
    """Make `p.grad += x` put the ordinary tensor into `.grad` where the operation gave it back."""

    def method(self: GradientHandle, other: Any) -> Any:
        result = getattr(torch.Tensor, name)(self, other)
        is_plain = result is self and self.taken.given is not None and self.grad_fn is None
        return _memory(self) if is_plain else result

    setattr(GradientHandle, name, method)


def _give_back_before_dlpack(module: Any) -> None:
    """Give a handle back before a function in C++, which neither dispatches nor asks a tensor's class."""
    ordinary: Callable[[Any], Any] = module.to_dlpack

    @functools.wraps(ordinary)
    def to_dlpack(tensor: Any) -> Any:
        return ordinary(_memory(tensor) if isinstance(tensor, GradientHandle) else tensor)

    module.to_dlpack = to_dlpack


for _name in ("__dlpack__", "apply_", "as_subclass", "data_ptr", "map2_", "map_", "numpy", "share_memory_"):
    _forward(_name, _memory)
if hasattr(Tensor, "const_data_ptr"):  # in newer releases of torch
    _forward("const_data_ptr", _memory)
for _name in ("__complex__", "__float__", "__format__", "__repr__", "tolist"):  # others dispatch
    _forward(_name, _value)
for _name in ("add", "and", "floordiv", "lshift", "mod", "mul", "or", "pow", "rshift", "sub", "truediv", "xor"):
    _return_gradient_from(f"__i{_name}__")

for _module in (torch, torch.utils.dlpack):
    _give_back_before_dlpack(_module)


def _shared_between_processes(handle: GradientHandle) -> Any:
    """As in torch, which refuses a tensor with a graph."""
    has_graph = handle.grad_fn is not None
    return reduce_tensor(Tensor.as_subclass(handle, Tensor) if has_graph else copy.copy(handle))  # type: ignore[no-untyped-call]


ForkingPickler.register(GradientHandle, _shared_between_processes)

torch_private.foreach_types.append(GradientHandle)  # as torch.distributed.tensor does for DTensor

# -- operations on ordinary tensors ------------------------------------------------------------------------------------

_Positions = list[tuple[int, str]]


def _run(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operation on the values of handles; those that it writes to or returns aliases of are given back."""
    written, aliased = _positions(operation)
    for handle in _handles_at(aliased, args, kwargs):
        _memory(handle)
    read: list[GradientHandle] = []
    memory: set[int] = set()

    def ordinary(handle: Tensor) -> Tensor:
        is_taken = _taken(handle) is not None  # as yet: another thread may give it back
        value = _value(handle)
        if is_taken and isinstance(handle, GradientHandle):
            read.append(handle)
            memory.add(storage_key(value.untyped_storage()))
        return value

    result = operation(*map_tensors(args, ordinary), **map_tensors(kwargs, ordinary))
    # Although the schema says otherwise: a new sparse tensor may have the very values that it is made of.
    found = tensors_in(result) if memory else []
    strided = [tensor for tensor in found if tensor.layout is torch.strided]
    is_made_of_it = len(strided) < len(found) and not written
    if is_made_of_it or any(storage_key(tensor.untyped_storage()) in memory for tensor in strided):
        for handle in read:
            _memory(handle)
        return _run(operation, args, kwargs)
    has_graph = written and torch.is_grad_enabled() and any(it.requires_grad for it in tensors_in((args, kwargs)))
    has_graph = has_graph or torch_private.forward_level() >= 0  # or a tangent
    for handle in _handles_at(written, args, kwargs):
        given = _memory(handle)
        torch.autograd.graph.increment_version(given)  # the dispatcher only increments the handle's
        parameter: Any = handle.taken.parameter
        if has_graph and parameter is not None and parameter.grad is handle.taken.given:
            parameter.grad = handle  # which autograd gives the graph
        if (handle.shape, handle.stride()) != (given.shape, given.stride()):  # `g.t_()`, `g.resize_(3)`
            _set_memory(handle, given)
    return result  # for `g.add_(1)` torch returns g


@functools.cache
def _positions(operation: Any) -> tuple[_Positions, _Positions]:
    """Return position and name of the arguments that are written to, and of those that results may alias."""
    arguments = torch_private.schema_of(operation).arguments
    positions = [(it.alias_info, (position, it.name)) for position, it in enumerate(arguments)]
    is_trusted = operation.namespace in torch_private.TRUSTED_NAMESPACES  # other schemas may hide what is written to
    return (
        [where for alias, where in positions if alias is not None and alias.is_write],
        [where for alias, where in positions if alias is not None or not is_trusted],
    )


def _tensors_at(positions: _Positions, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    return tensors_in([args[position] if position < len(args) else kwargs.get(name) for position, name in positions])


def _handles_at(positions: _Positions, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[GradientHandle]:
    return [tensor for tensor in _tensors_at(positions, args, kwargs) if isinstance(tensor, GradientHandle)]


# -- operations that are answered or recorded: these functions return NotImplemented where they cannot -----------------


def _taken(tensor: Any) -> TakenGradient | None:
    """Return the record of a handle whose gradient was not given back."""
    return tensor.taken if type(tensor) is GradientHandle and tensor.taken.given is None else None


def _all_taken(tensors: list[Tensor]) -> list[TakenGradient]:
    return [taken for taken in map(_taken, tensors) if taken is not None]


def _detach(operation: Any, tensor: Tensor, size: list[int] | None = None) -> Any:
    """Return an alias; a view only if it has the same shape and strides."""
    taken = _taken(tensor)
    if taken is None or (size is not None and taken.shape != tuple(size)):
        return NotImplemented
    # Of dimensions of one element torch chooses the strides of a view.
    if size is not None and 1 in size and taken.strides != torch.empty(size, device="meta").stride():
        return NotImplemented
    return GradientHandle(taken, is_alias=True)


def _foreach_norm(operation: Any, tensors: list[Tensor], ord: Any = 2, dtype: Any = None) -> Any:
    """Answer with norms that torch has computed before, and with those of unrounded gradients."""
    if dtype is not None:
        return NotImplemented
    known: dict[int, Tensor] = {}
    unknown: dict[torch.dtype | None, dict[int, Tensor]] = {}  # by what their norms are rounded to
    may_be_known = ord == 2 and not needs_present_mode(_all_taken(tensors))
    for position, tensor in enumerate(tensors):
        taken = _taken(tensor)
        if taken is not None and ord == 2:
            taken.holder._norm_was_asked(taken)
        if taken is None:
            unknown.setdefault(None, {})[position] = _value(tensor)
        elif taken.norm is not None and not taken.factors and may_be_known:
            known[position] = taken.norm
        else:
            unknown.setdefault(taken.norm_dtype, {})[position] = taken.exact()
    # All at once: the caller may write to the copies.
    norms = dict(zip(known, torch_private.foreach_abs([*known.values()]), strict=True)) if known else {}
    for dtype, group in unknown.items():
        computed = torch_private.foreach_norm([*group.values()], ord)
        norms |= {i: norm if dtype is None else norm.to(dtype) for i, norm in zip(group, computed, strict=True)}
    return [norms[position] for position in range(len(tensors))]


def _vector_norm(operation: Any, tensor: Tensor, *args: Any, dtype: Any = None, **kwargs: Any) -> Any:
    """Return the norm of an unrounded gradient."""
    taken = _taken(tensor)
    if taken is None or not taken.is_unrounded or dtype is not None:
        return NotImplemented
    return operation(taken.exact(), *args, **kwargs).to(taken.dtype)


def _scale(kind: FactorKind, operation: Any, target: Any, value: Any) -> Any:
    """Record a product of one gradient, or of all in a list, with a scalar."""
    is_list = not isinstance(target, Tensor)
    tensors = target if is_list else [target]
    every = _all_taken(tensors)
    if not every or not _is_scalar_for(every, value):
        return NotImplemented
    kept = value.clone() if isinstance(value, Tensor) else value  # its holder may change it
    _record(Factor(kind, kept, is_list), operation, target, value)
    return None if is_list else target


def _is_scalar_for(every: list[TakenGradient], value: Any) -> bool:
    if type(value) is not Tensor:
        return isinstance(value, int | float)
    return (
        not value.shape
        and not value.requires_grad
        and not value.is_complex()
        and value.layout is torch.strided
        and (value.is_cpu or all(value.device == taken.device for taken in every))
    )


def _record(factor: Factor, operation: Any, target: Any, *arguments: Any) -> None:
    """Record a product on the gradients that were taken, and apply it to the other tensors.

    Where the present mode counts, or one of them has `MOST_FACTORS`, it is applied to all.
    """
    is_list = not isinstance(target, Tensor)
    ordinary, handles = list[Tensor](), list[Any]()
    for tensor in target if is_list else [target]:
        (ordinary if _taken(tensor) is None else handles).append(tensor)
    every, left = [handle.taken for handle in handles], list[Tensor]()
    is_made_now = needs_present_mode(every) or any(len(taken.factors) >= MOST_FACTORS for taken in every)
    if ordinary:  # before anything is recorded, because torch may refuse them
        _run(operation, (ordinary if is_list else target, *arguments), {})
    for handle, taken in zip(handles, every, strict=True):
        is_made = taken.record(factor) if not is_made_now else taken.is_unrounded and taken.multiply(factor)
        if not is_made:  # also where another thread has given it back
            left.append(handle)
    if left:
        _run(operation, (left if is_list else target, *arguments), {})


def _unscale(operation: Any, tensors: list[Tensor], found: Tensor, inverse: Tensor) -> Any:
    """Check for Inf and NaN, and record the product with the inverse of a loss scale."""
    if any(type(it) is not Tensor or it.numel() != 1 or it.dtype != torch.float32 for it in (found, inverse)):
        return NotImplemented
    for taken in _all_taken(tensors):
        count = None if taken.factors else taken.holder._nonfinite_of(taken)
        if count is None:
            found.masked_fill_(~torch.isfinite(taken.exact()).all().to(found.device), 1.0)
        elif count:
            found.fill_(1.0)
    _record(Factor(FactorKind.UNSCALE, inverse.clone()), operation, tensors, found, inverse)
    return None


def _accumulate(operation: Any, tensor: Tensor, other: Any, *, alpha: Any = 1) -> Any:
    """Add the next micro-batch to an unrounded gradient, as autograd adds it."""
    taken = _taken(tensor)
    if taken is None or not taken.is_unrounded or alpha != 1:
        return NotImplemented
    if type(other) is not Tensor or other.requires_grad or other.layout is not torch.strided:
        return NotImplemented
    if (other.shape, other.dtype, other.device) != (taken.shape, taken.dtype, taken.device):
        return NotImplemented
    return tensor if taken.absorb(other) else NotImplemented


def _zero(operation: Any, target: Any) -> Any:
    """Set gradients to zero; those that arrived unrounded stay handles, so that what is added later is not rounded."""
    is_list, others = not isinstance(target, Tensor), list[Tensor]()
    for tensor in target if is_list else [target]:
        taken = _taken(tensor)
        if taken is None or not taken.is_reduced or not taken.zero():
            others.append(tensor)
    if others:
        _run(operation, (others if is_list else target,), {})
    return None if is_list else target


_LAZY: dict[Any, Callable[..., Any]] = {
    aten.detach.default: _detach,
    aten.alias.default: _detach,
    aten.view.default: _detach,
    aten.linalg_vector_norm.default: _vector_norm,
    torch_private.foreach_norm: _foreach_norm,
    torch_private.check_and_unscale: _unscale,
    aten.add_.Tensor: _accumulate,
    aten.zero_.default: _zero,
    torch_private.foreach_zero_: _zero,
}
for _kind in (FactorKind.MULTIPLY, FactorKind.DIVIDE):
    _of_one = getattr(aten, _kind.value)
    # Not `_of_one.Scalar`, which C++ calls with a number, where Python calls `Tensor`: torch rounds otherwise there.
    for _operation in (_of_one.Tensor, *torch_private.foreach_products[_kind.value].values()):
        _LAZY[_operation] = functools.partial(_scale, _kind)

# -- taking ------------------------------------------------------------------------------------------------------------


def taken_of(tensor: Tensor | None) -> TakenGradient | None:
    """Return the record of a handle, or of a DTensor's local one; None for a gradient that lies in memory."""
    if type(tensor) is Tensor:
        return None
    return _taken(tensor if type(tensor) is GradientHandle else shards.local_of(tensor))


allocators: list[Callable[[int], bool]] = []
"""Each says whether it gave the memory at an address to a storage alone; torch's own need not say."""


def is_uncounted(tensor: Tensor) -> bool:
    """Whether references to a tensor's memory may be counted by nobody: of arrays, as numpy's, or other processes."""
    storage = tensor.untyped_storage()
    is_torchs = storage.resizable() or any(is_own(storage.data_ptr()) for is_own in allocators)
    return not is_torchs or (tensor.is_cpu and storage.is_shared())


def references(in_python: int, tensor: Any) -> tuple[int, int, int, int]:
    """Count the references to a tensor, Python's, weak ones too, and torch's, and those to its memory.

    Versions of both count differently, so compare with a tensor that is referred to as usual. The caller counts
    Python's, of an attribute or an element: while torch.compile is at work in any thread, and from an error of
    it on, what is passed to a function in Python is referred to once more.
    """
    storage = tensor.untyped_storage()
    of_memory = sys.getrefcount(storage) + weakref.getweakrefcount(storage), storage_use_count(storage_key(storage))
    return in_python + weakref.getweakrefcount(tensor), tensor_use_count(tensor), *of_memory


_alone = torch.empty(1, device="cpu")
_alone.grad = torch.empty(1, device="cpu")
_views = [torch.empty(1, device="cpu").view(1)]
_OF_GRADIENT = references(sys.getrefcount(_alone.grad), _alone.grad)
_past = TakenGradient(_alone.grad)
_alone.grad = None
_OF_PENDING = references(sys.getrefcount(_past.pending), _past.pending)
_OF_ELEMENT = references(sys.getrefcount(_views[0]), _views[0])
_OF_BASE = _OF_GRADIENT if missing else references(sys.getrefcount(base_of(_views[0])), base_of(_views[0]))


def is_held(values: Any, key: Any, holders: int) -> bool:
    """Whether more objects than these holders and `values` refer to `values[key]`, a tensor, or any to its memory.

    The tensor that it is a view of may be referred to by the view alone. Of numpy arrays, only those that have its
    memory now count: one that is gone must not keep state held.
    """
    if missing:  # nothing is counted
        return True
    try:
        found, is_view = references(sys.getrefcount(values[key]), values[key]), base_of(values[key]) is not None
        if values[key].is_cpu and values[key].untyped_storage().is_shared():  # with another process
            return True
    except NotImplementedError:  # of a transform of torch.func, which has no memory to look at
        return True
    usual = (_OF_ELEMENT[0] + holders, _OF_ELEMENT[1], _OF_GRADIENT[2], _OF_GRADIENT[3] + is_view)
    of_base = references(sys.getrefcount(base_of(values[key])), base_of(values[key])) if is_view else _OF_BASE
    if not all(map(operator.le, of_base, _OF_BASE)):
        return True
    return not all(map(operator.le, found, usual))


def is_exclusive(parameter: Any) -> bool:
    """Return whether only `.grad` refers to the gradient and its memory, not even the caller or weakly.

    One with attributes of its own, or a part of larger memory, stays as well: they would be lost.
    """
    count = sys.getrefcount(parameter.grad)
    gradient = parameter.grad  # another thread may have replaced it
    is_strided = isinstance(gradient, Tensor) and gradient.layout is torch.strided
    if not is_strided or gradient.__dict__ or is_uncounted(gradient):
        return False
    if gradient.nbytes != gradient.untyped_storage().nbytes():
        return False
    return all(map(operator.le, references(count, gradient), _OF_GRADIENT))


def _is_exclusive_distributed(parameter: Any) -> bool:
    """Return the same of a gradient that may be a DTensor; the memory of its part is left to `shared_memory`."""
    gradient = parameter.grad
    if not (shards.is_distributed(gradient) and torch_private.can_have_handle(gradient)):
        return False
    local: Any = shards.local_of(gradient)
    if gradient.__dict__ or local.__dict__ or weakref.getweakrefcount(gradient) or weakref.getweakrefcount(local):
        return False
    present = sys.getrefcount(gradient), tensor_use_count(gradient), sys.getrefcount(local), tensor_use_count(local)
    in_variable = _OF_GRADIENT[0] + 1
    return all(map(operator.le, present, (in_variable, _OF_GRADIENT[1], in_variable, 1)))  # the attribute has the part


def shared_memory(parameters: Iterable[Tensor]) -> set[int]:
    """Return the positions of gradients whose part on this rank has memory that is referenced elsewhere.

    FSDP2 cuts the gradients of several parameters from one buffer, so that all have to be looked at together.
    """
    parts: dict[int, Tensor] = {}
    for position, parameter in enumerate(parameters):
        if shards.is_distributed(parameter.grad):
            local = shards.local_of(parameter.grad)
            taken = _taken(local)
            if taken is not None:
                parts[position] = taken.pending
            elif type(local) is Tensor:  # nothing else is taken
                parts[position] = local
    ours: Counter[int] = Counter()
    ends: dict[int, int] = {}  # addresses, by storage
    for part in sorted(parts.values(), key=Tensor.data_ptr):
        key = storage_key(part.untyped_storage())
        is_apart = part.data_ptr() >= ends.get(key, 0)  # else the program has given one gradient to two parameters
        ours[key], ends[key] = ours[key] + is_apart, part.data_ptr() + part.nbytes

    def is_shared(part: Tensor) -> bool:
        _, _, in_python, in_torch = references(0, part)
        known = ours[storage_key(part.untyped_storage())] + (base_of(part) is not None)
        return is_uncounted(part) or in_python > _OF_GRADIENT[2] or in_torch - known >= _OF_GRADIENT[3]

    return {position for position, part in parts.items() if is_shared(part)}


def take_gradient(parameter: Tensor, owner: Any = None, holder: GradientHolder | None = None) -> TakenGradient | None:
    """Take the gradient out of `.grad` and leave a handle there; None, and no change, where it cannot be taken.

    It can if it is an ordinary dense tensor without a graph, or the DTensor of one, and neither the caller nor anything
    else refers to it. One that counts unrounded has a handle already, and can be taken unless it is in use. The owner
    has the parameter as `parameter`; the holder answers questions about the gradient. Both are referenced weakly.
    """
    if missing or torch_private.forward_level() >= 0:  # where it may have a tangent
        return None
    is_plain = type(parameter.grad) is Tensor
    known = None if is_plain else taken_of(parameter.grad)
    if known is not None:
        return known if known.is_unrounded and not known.in_use else None
    if not (is_exclusive(parameter) if is_plain else _is_exclusive_distributed(parameter)):
        return None
    gradient: Any = parameter.grad
    local = gradient if is_plain else shards.local_of(gradient)
    if (
        type(local) is not Tensor
        or gradient.requires_grad
        or gradient.grad is not None
        or (local is not gradient and (local.requires_grad or local.layout is not torch.strided))
        or local.is_neg()
        or (not local.is_contiguous() and torch_private.has_internal_overlap(local) != 0)
    ):
        return None
    taken = TakenGradient(local, owner, holder)
    handle = _leave_handle(parameter, gradient, taken)
    if handle is None:
        return None
    if is_plain:
        del gradient, local
        if not all(map(operator.le, references(sys.getrefcount(taken.pending), taken.pending), _OF_PENDING)):
            gradient = taken.pending  # at which another thread has looked before the handle was there
            taken.forward_to(gradient)
            if parameter.grad is handle:  # no other thread runs before the next line
                parameter.grad = gradient
            return None
    return taken


def take_reduced(parameter: Tensor, unrounded: Tensor, owner: Any, holder: GradientHolder) -> None:
    """Take a gradient that was rounded for `.grad`, with its unrounded values."""
    gradient: Any = parameter.grad
    taken = TakenGradient(shards.local_of(gradient), owner, holder)
    taken.pending, taken.exact_dtype = unrounded, unrounded.dtype
    taken.is_unrounded = taken.is_reduced = True
    _leave_handle(parameter, gradient, taken)


def _leave_handle(parameter: Tensor, gradient: Any, taken: TakenGradient) -> GradientHandle | None:
    """Replace `.grad` by a handle; None, and no change, if it counts no versions, does not fit, or was replaced."""
    is_plain = type(gradient) is Tensor
    local = gradient if is_plain else shards.local_of(gradient)
    if local.is_inference():
        return None
    handle = GradientHandle(taken)
    continue_version(handle, local)
    whole = handle if is_plain else torch_private.dtensor_like(gradient, handle)
    if parameter.grad is not gradient:  # no other thread, and no handler of a signal, runs before the assignment
        return None
    try:
        parameter.grad = whole
    except RuntimeError:  # the parameter has got another dtype or shape
        return None
    return handle
