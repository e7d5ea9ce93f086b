"""Handles in `.grad`: whatever a program does with one has the bits of the same done to an ordinary gradient."""

import copy
import gc
import itertools
import math
import operator
import pickle
import signal
import tracemalloc
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from support import visible
from support.float_modes import flushed_denormals
from support.handles import NotingHolder, Owner
from support.optimizers import DTYPES, through_disk
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, clip_grads_with_norm_, get_total_norm
from torch.utils._python_dispatch import TorchDispatchMode

from superadam import SpeculativeCPUAdam
from superadam.handles.gradient_handle import GradientHandle, is_exclusive, is_held, take_gradient, taken_of
from superadam.handles.taken_gradient import MOST_FACTORS, GradientHolder, HostSum, TakenGradient


def bits(value: Any) -> Any:
    """Return what must be equal: values bit for bit, shape and dtype."""
    if isinstance(value, list | tuple):
        return [bits(item) for item in value]
    return visible.bits(value) if isinstance(value, Tensor) else repr(value)


def take_as_they_arrive(parameter: Tensor) -> Owner:
    """Take gradients in a hook."""
    owner = Owner(parameter)
    alive = weakref.ref(owner)
    parameter.register_post_accumulate_grad_hook(lambda parameter: take_gradient(parameter, alive()) and None)
    return owner


def handle_for(gradient: Tensor, keeper: NotingHolder | None = None) -> tuple[Any, Owner, TakenGradient]:
    """Return a parameter in whose `.grad` is a handle of a copy of `gradient`; later ones are taken as they arrive."""
    parameter: Any = nn.Parameter(torch.zeros_like(gradient))
    parameter.grad = gradient.clone()
    owner = take_as_they_arrive(parameter)
    taken = take_gradient(parameter, owner, keeper)
    assert type(parameter.grad) is GradientHandle
    return parameter, owner, taken


def with_other_strides(tensor: Tensor) -> Tensor:
    """Return a copy in the opposite order of dimensions in memory."""
    order = list(range(tensor.dim()))[::-1]
    return tensor.permute(order).contiguous().permute(order)


def pair_for(gradient: Tensor) -> tuple[Any, Any, Owner]:
    """Return a parameter with a handle, and one with the ordinary gradient."""
    ours, owner, _ = handle_for(gradient)
    theirs = nn.Parameter(torch.zeros_like(gradient))
    theirs.grad = gradient.clone()
    return ours, theirs, owner


# -- any sequence of operations ----------------------------------------------------------------------------------------

Operation = Callable[[Any, list[Any]], Any]
"""Does something to the gradient of a parameter; may add to the aliases that are held. Results are compared."""


def _returns(gradient: Any, operation: Callable[[Any], Any]) -> bool:
    """Do it, and return whether the very object came back."""
    return operation(gradient) is gradient


def _unscaled(parameter: Any, inverse: float | Tensor, *others: Tensor) -> list[Any]:
    found = torch.zeros(())
    torch._amp_foreach_non_finite_check_and_unscale_([*others, parameter.grad], found, torch.as_tensor(inverse))
    return [found.item(), *others]


def _replace(parameter: Any, gradient: Any) -> None:
    parameter.grad = gradient


def _inplace(parameter: Any, operation: Callable[[Any, Any], Any], value: Any) -> None:
    parameter.grad = operation(parameter.grad, value)


def _changed_later(parameter: Any) -> None:
    factor, inverse = torch.tensor(0.3), torch.tensor(0.7)
    parameter.grad.mul_(factor)
    torch._amp_foreach_non_finite_check_and_unscale_([parameter.grad], torch.zeros(()), inverse)
    for one in (factor, inverse):
        one.fill_(100.0)


def _step(parameter: Any, kind: type[torch.optim.Optimizer], **options: Any) -> Tensor:
    kind([parameter], lr=0.25, **options).step()
    return parameter.detach().clone()


def _set_data(parameter: Any, data: Any) -> None:
    parameter.grad.data = data


def _edit_numpy(parameter: Any) -> None:
    if parameter.dtype != torch.bfloat16:
        array = parameter.grad.numpy()
        array *= np.asarray(0.5, array.dtype)


def _accumulate(parameter: Any) -> None:
    (parameter * torch.linspace(-3, 3, parameter.numel(), dtype=parameter.dtype).view_as(parameter)).sum().backward()


def _own(parameter: Any, value: float) -> Tensor:
    return torch.tensor(value, dtype=parameter.dtype)


class Mode(TorchDispatchMode):
    """Sees each operation, and what it returns."""

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = operation(*args, **(kwargs or {}))
        assert (result is None) == (not operation._schema.returns)
        return result


def _in_a_mode(parameter: Any) -> None:
    with Mode():
        clip_grad_norm_([parameter], 0.5)
        parameter.grad.mul_(0.9)


def _in_inference_mode(parameter: Any) -> None:
    with torch.inference_mode():
        parameter.grad.mul_(0.5)
        (parameter.grad * 2).sum().item()
        parameter.grad.add_(0.5)


def _copies_edited(parameter: Any) -> list[Tensor]:
    """Return deep copies and what was loaded, which are written to; a shallow copy shares its memory."""
    g = parameter.grad
    copies = [copy.deepcopy(g), pickle.loads(pickle.dumps(g)), through_disk([g])[0], copy.copy(g)]
    for duplicate in copies:
        assert type(duplicate) is Tensor
        duplicate.add_(1)
    return copies


def _aliases_copied_together(parameter: Any, *, is_view: bool = False) -> list[Tensor]:
    """Return deep copies of a gradient and of an alias, one of which is written to."""
    held = parameter.grad
    alias = held.view(-1) if is_view else held.detach()
    copies = copy.deepcopy([held, alias, held.data])
    copies[1].add_(1)
    return copies


def _with_a_label(parameter: Any, edit: Callable[[Any], object] = lambda parameter: None) -> list[Any]:
    """Give the gradient an attribute of its own; return it, and those of copies, after an edit."""
    parameter.grad.label = [3]
    edit(parameter)
    g = parameter.grad
    copies = [copy.deepcopy(g), pickle.loads(pickle.dumps(g)), copy.copy(g)]
    labels = [one.label for one in (g, *copies)]
    own = [label is labels[0] for label in labels]
    del g.label
    return [labels, own]


def _label_of_a_copy(parameter: Any) -> str:
    """Return an attribute that was set after a write, of what is copied together with a reference from before."""
    before = parameter.grad
    before.label = "first"
    before.add_(1)
    parameter.grad.label = "second"
    label = copy.deepcopy([parameter.grad, before])[0].label
    del parameter.grad.label
    return label  # type: ignore[no-any-return]


def _in_a_transform(act: Callable[[], object]) -> Tensor:
    return torch.vmap(lambda one: (act(), one)[1])(torch.ones(2))


def _attributes_of_copies(gradient: Any) -> list[Any]:
    gradient.label = "first"
    copies = [copy.deepcopy(gradient), pickle.loads(pickle.dumps(gradient))]
    del gradient.label
    return [vars(one) for one in copies]


def _graph_of_before(parameter: Any) -> None:
    graph = (parameter * parameter.grad).sum()
    parameter.grad = None
    graph.backward()


def _graph_of_edited(parameter: Any, edit: Callable[[Any], object] = lambda parameter: parameter.grad.add_(1)) -> None:
    graph = (parameter * parameter.grad).sum()
    edit(parameter)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        graph.backward()


def _sparse(parameter: Any) -> Tensor:
    flat = parameter.grad if parameter.dim() else parameter.grad.view(1)
    return torch.sparse_coo_tensor(torch.arange(len(flat))[None], flat)


def _through_graph(p: Tensor, multiply: Callable[[Tensor, Tensor], object]) -> Any:
    factor = torch.full_like(p, 0.5).detach().requires_grad_()
    multiply(p.grad, factor)
    return p.grad.requires_grad, torch.autograd.grad(p.grad.sum(), factor, retain_graph=True)


def _requiring_grad(parameter: Any, *, is_set: bool = False) -> list[Tensor]:
    held = parameter.grad
    setattr(held, "requires_grad", True) if is_set else held.requires_grad_(True)
    assert all(one.requires_grad for one in (held, parameter.grad, copy.copy(held)))
    derivatives = [torch.autograd.grad((one**2).sum(), one)[0] for one in (parameter.grad, held)]
    parameter.grad.requires_grad = held.requires_grad = False
    return derivatives


def _in_another_parameter(parameter: Any) -> list[Tensor]:
    other = nn.Parameter(torch.zeros_like(parameter))
    other.grad = parameter.grad
    for one in (other, other, parameter):
        one.grad.mul_(0.3)
        one.grad.add_(2)
    return [other.grad, parameter.grad]


def _in_a_parameter_that_differs(parameter: Any, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    nn.Parameter(torch.zeros(shape, dtype=dtype)).grad = parameter.grad


def _moved_and_back(parameter: Any) -> Any:
    other = nn.Parameter(torch.ones_like(parameter))
    other.grad, parameter.grad = parameter.grad, None
    for _ in range(2):
        other.grad.mul_(0.3)
        other.grad.add_(1)
    parameter.grad = other.grad


def _alias_with_data(parameter: Any) -> Tensor:
    alias = parameter.grad.detach()
    alias.data = torch.ones_like(parameter).detach()
    return alias.add_(1)


def _aliases_of_replaced_data(parameter: Any) -> list[Tensor]:
    same, alias, kept = parameter.grad, parameter.grad.detach(), parameter.grad.data
    parameter.grad.add_(1)
    parameter.grad.data = torch.ones_like(parameter).detach()
    alias.mul_(2)
    return [same, alias, kept]


def _data_of_what_was_written_to(parameter: Any) -> list[Tensor]:
    held, other = parameter.grad, nn.Parameter(torch.ones_like(parameter))
    other.grad = held
    held.add_(1)
    held.data = torch.ones(2, 3, dtype=parameter.dtype)
    shape = torch.tensor(held.shape)
    held.mul_(2)
    return [held, other.grad, shape]


def _data_of_an_alias_in_grad(parameter: Any, *, is_written: bool) -> list[Tensor]:
    """Assign data to an alias that was put into `.grad`, twice; another alias, and the gradient, are left alone."""
    held, alias, another = parameter.grad, parameter.grad.detach(), parameter.grad.detach()
    parameter.grad = alias
    if is_written:
        alias.add_(1)
    for value in (2.0, 3.0):
        alias.data = torch.full_like(parameter, value).detach()
    seen = parameter.grad.clone()
    another.data = torch.full_like(parameter, 4.0).detach()
    parameter.grad.data = torch.full_like(parameter, 5.0).detach()
    held.data = torch.full_like(parameter, 6.0).detach()
    another.data = held
    return [held, alias, another, seen, parameter.grad]


def _data_of_the_gradient_for_an_alias(parameter: Any) -> list[Tensor]:
    held, alias = parameter.grad, parameter.grad.detach()
    held.add_(1)
    held.data = torch.ones_like(parameter).detach()
    alias.data = held
    return [held, alias, parameter.grad]


def _versions_of_others(parameter: Any) -> list[Any]:
    """Return what graphs and the optimizer know of writes."""
    others = [torch.ones_like(parameter, requires_grad=False) for _ in range(4)]
    torch._foreach_add_(others[:1], [parameter.grad])
    torch._foreach_mul_([parameter.grad, others[1]], 0.5)
    torch._foreach_zero_([others[2], parameter.grad])
    others[3].add_(parameter.grad)
    return [*others, *(other._version for other in others)]


class Subclass(torch.Tensor):
    """Any."""


def _of_a_subclass(parameter: Any) -> list[Tensor]:
    product = operator.imul(parameter.grad, torch.tensor(0.3).as_subclass(Subclass))
    alias = parameter.grad.as_subclass(Subclass).add_(1)
    assert type(product) is type(alias) is Subclass
    return [product.as_subclass(Tensor), alias.as_subclass(Tensor)]


def _reshaped_and_back(parameter: Any) -> list[Any]:
    gradient = parameter.grad
    gradient.unsqueeze_(-1)
    return [gradient.shape, gradient.stride(), gradient.clone(), gradient.squeeze_(-1).shape]


def _by_another(parameter: Any) -> None:
    scalar, _owner, taken = handle_for(_own(parameter, 0.75))
    parameter.grad.mul_(scalar.grad)
    parameter.grad.mul_(scalar.grad.norm())
    assert taken.given is None


_hidden = torch.library.Library("superadam_hides", "DEF")
_hidden.define("write(Tensor x) -> Tensor")
_hidden.impl("write", lambda x: x.add_(1).sum(), "CPU")

RECORDED: dict[str, Operation] = {
    "mul": lambda p, held: _returns(p.grad, lambda g: g.mul_(0.37)),
    "mul one": lambda p, held: _returns(p.grad, lambda g: g.mul_(1.0)),
    "mul fp32 tensor": lambda p, held: _returns(p.grad, lambda g: g.mul_(torch.tensor(0.7))),
    "mul fp64 tensor": lambda p, held: _returns(p.grad, lambda g: g.mul_(torch.tensor(1 / 3, dtype=torch.float64))),
    "mul own tensor": lambda p, held: _returns(p.grad, lambda g: g.mul_(_own(p, 0.9))),
    "mul Inf": lambda p, held: _returns(p.grad, lambda g: g.mul_(float("inf"))),
    "mul then change": lambda p, held: _changed_later(p),
    "div": lambda p, held: _returns(p.grad, lambda g: g.div_(3.0)),
    "div tensor": lambda p, held: _returns(p.grad, lambda g: g.div_(torch.tensor(2.7))),
    "*=": lambda p, held: _inplace(p, operator.imul, 0.6),
    "foreach mul": lambda p, held: torch._foreach_mul_([p.grad], 0.37),
    "foreach mul tensor": lambda p, held: torch._foreach_mul_([p.grad], torch.tensor(0.61)),
    "foreach mul mixed": lambda p, held: torch._foreach_mul_([_own(p, 3.0), p.grad, p.grad], 0.5),
    "foreach div mixed": lambda p, held: torch._foreach_div_([p.grad, _own(p, 3.0)], 7.0),
    "foreach div": lambda p, held: torch._foreach_div_([p.grad], 3.0),
    "foreach div tensor": lambda p, held: torch._foreach_div_([p.grad], _own(p, 1.7)),
    "unscale": lambda p, held: _unscaled(p, 0.3),
    "unscale mixed": lambda p, held: _unscaled(p, 0.3, _own(p, 7.0)),
    "unscale one": lambda p, held: _unscaled(p, 1.0),
    "clip": lambda p, held: clip_grad_norm_([p], 0.5),
    "clip for each": lambda p, held: clip_grad_norm_([p], 0.5, foreach=False),
    "clip largest": lambda p, held: clip_grad_norm_([p], 0.5, norm_type=float("inf")),
    "clip sum": lambda p, held: clip_grad_norm_([p], 0.5, norm_type=1),
    "clip far": lambda p, held: clip_grad_norm_([p], 1e4),
    "mul alias": lambda p, held: p.grad.detach().mul_(0.3) is not p.grad,
    "mul data": lambda p, held: p.grad.data.div_(1.5) is not p.grad,
    "mul view": lambda p, held: p.grad.view_as(p).mul_(0.8) is not p.grad,
    "zero_grad's check": lambda p, held: _returns(p.grad, lambda g: g.requires_grad_(False)),
    "saved by a graph and clipped": lambda p, held: _graph_of_edited(p, lambda p: clip_grad_norm_([p], 1e-9)),
    "data of its own": lambda p, held: _set_data(p, p.grad),
    "clip in lists": lambda p, held: clip_grad_norm_([p], 0.5, foreach=True),
    "clip if finite": lambda p, held: clip_grad_norm_([p], 0.5, error_if_nonfinite=True),
    "clip in two parts": lambda p, held: clip_grads_with_norm_([p], 0.5, get_total_norm([p.grad])),
    "clip in a mode": lambda p, held: _in_a_mode(p),
}
"""What a handle records."""

READ: dict[str, Operation] = {
    "refused data": lambda p, held: _set_data(p, torch.eye(3).to_sparse()),
    "mul of a sparse tensor": lambda p, held: torch.ones_like(p).detach().to_sparse().mul_(p.grad).to_dense(),
    "in a list": lambda p, held: () if p.dim() else torch.tensor([p.grad, p.grad]),
    "in a complex list": lambda p, held: () if p.dim() else torch.tensor([p.grad], dtype=torch.complex64).real,
    "norm": lambda p, held: p.grad.norm(),
    "norm 3": lambda p, held: p.grad.norm(3),
    "norm of rows": lambda p, held: torch.linalg.vector_norm(p.grad, dim=0),
    "foreach norm": lambda p, held: torch._foreach_norm([p.grad, p.detach(), p.grad]),
    "foreach norm fp64": lambda p, held: torch._foreach_norm([p.grad], 2, torch.float64),
    "total norm": lambda p, held: get_total_norm([p.grad, p.detach()]),
    "is finite": lambda p, held: torch.isfinite(p.grad).all().item(),
    "sum": lambda p, held: p.grad.sum().item(),
    "clone": lambda p, held: p.grad.detach().clone(),
    "double": lambda p, held: p.grad * 2,
    "to": lambda p, held: (p.grad.to(torch.float32), p.grad.to(p.dtype) is p.grad),
    "add to another": lambda p, held: torch.zeros_like(p).add_(p.grad, alpha=0.5),
    "out": lambda p, held: torch.add(p.grad, 1, out=torch.empty_like(p, requires_grad=False)),
    "empty_like": lambda p, held: torch.empty_like(p.grad).stride(),
    "tolist": lambda p, held: p.grad.tolist(),
    "repr": lambda p, held: repr(p.grad).split("grad_fn")[0],  # which an alias has as well
    "format": lambda p, held: f"{p.grad}".split("grad_fn")[0] if p.dim() else f"{p.grad:.3f} {float(p.grad)}",
    "deepcopy": lambda p, held: copy.deepcopy(p.grad),
    "deepcopy list": lambda p, held: copy.deepcopy([p.grad, p.grad]),
    "pickle": lambda p, held: pickle.loads(pickle.dumps([p.grad, p.grad])),
    "save": lambda p, held: through_disk({"gradients": [p.grad]}),
    "SGD": lambda p, held: _step(p, torch.optim.SGD),
    "AdamW": lambda p, held: _step(p, torch.optim.AdamW, foreach=False),
    "AdamW foreach": lambda p, held: _step(p, torch.optim.AdamW, foreach=True),
    "grads out of place": lambda p, held: torch.autograd.grad((p * 2).sum(), p),
    "deep copies of aliases": lambda p, held: _aliases_copied_together(p),
    "attributes of copies": lambda p, held: _attributes_of_copies(p.grad),
    "product that torch refuses": lambda p, held: torch._foreach_mul_([torch.ones(2).int(), p.grad], 0.5),
    "flag in a transform": lambda p, held: _in_a_transform(lambda: p.grad.requires_grad_(False)),
    "flag set in a transform": lambda p, held: _in_a_transform(lambda: setattr(p.grad, "requires_grad", False)),
    "hash": lambda p, held: (hash(p.grad) == id(p.grad), {p.grad: 1}[p.grad]),
    "equality": lambda p, held: (p.grad == p, p.grad == 0.5, p.grad != p.grad),
    "vmap": lambda p, held: torch.vmap(lambda row: row.sum())(p.grad.detach().clone()),
    "in a transform": lambda p, held: torch.func.grad(lambda t: (t * p.grad).sum())(torch.ones_like(p)),
    "shape": lambda p, held: (p.grad.shape, p.grad.stride(), p.grad.is_contiguous(), p.grad.numel(), p.grad.is_leaf),
}
"""What is computed from the gradient."""

WRITTEN: dict[str, Operation] = {
    "add": lambda p, held: _returns(p.grad, lambda g: g.add_(0.25)),
    "+=": lambda p, held: _inplace(p, operator.iadd, p.detach() + 1),
    "**=": lambda p, held: _inplace(p, operator.ipow, 2),
    "+= in place of itself": lambda p, held: _inplace(p, operator.iadd, p.grad),
    "mul itself": lambda p, held: _returns(p.grad, lambda g: g.mul_(g)),
    "mul, as C++ does": lambda p, held: _returns(p.grad, lambda g: torch.ops.aten.mul_.Scalar(g, 0.37)),
    "div, as C++ does": lambda p, held: _returns(p.grad, lambda g: torch.ops.aten.div_.Scalar(g, 3.0)),
    "mul full": lambda p, held: _returns(p.grad, lambda g: g.mul_(torch.ones_like(p))),
    "mul one element": lambda p, held: _returns(p.grad, lambda g: g.mul_(_own(p, 0.5).view(1))),
    "clip value": lambda p, held: clip_grad_value_([p], 0.5),
    "foreach add": lambda p, held: torch._foreach_add_([p.grad, _own(p, 1.0)], 0.5),
    "foreach mul list": lambda p, held: torch._foreach_mul_([p.grad], [0.5]),
    "foreach mul tensors": lambda p, held: torch._foreach_mul_([p.grad], [torch.full_like(p, 0.3).detach()]),
    "zero": lambda p, held: _returns(p.grad, lambda g: g.zero_()),
    "copy": lambda p, held: _returns(p.grad, lambda g: g.copy_(p.detach() + 2)),
    "element": lambda p, held: p.grad.__setitem__((0,) * p.dim(), 7.0),
    "flat edit": lambda p, held: p.grad.view(-1).mul_(0.5),
    "unsafe view edit": lambda p, held: torch.ops.aten._unsafe_view(p.grad, [-1]).mul_(0.75),
    "unsafe split edit": lambda p, held: torch.unsafe_split(p.grad, 1)[0].zero_(),
    "numpy edit": lambda p, held: _edit_numpy(p),
    "out is the gradient": lambda p, held: _returns(p.grad, lambda g: torch.mul(g, 0.5, out=g)),
    "floor division": lambda p, held: _returns(p.grad, lambda g: g.div_(0.3, rounding_mode="floor")),
    "data add": lambda p, held: p.grad.data.add_(1) is not p.grad,
    "detach add": lambda p, held: p.grad.detach().data.detach().add_(1) is not p.grad,
    "nan to num": lambda p, held: _returns(p.grad, torch.nan_to_num_),
    "accumulate": lambda p, held: _accumulate(p),
    "accumulate twice": lambda p, held: (_accumulate(p), _accumulate(p)),
    "SGD with momentum": lambda p, held: _step(p, torch.optim.SGD, momentum=0.9),
    "apply": lambda p, held: p.grad.apply_(lambda a: a + 1),
    "map": lambda p, held: p.grad.map_(p.detach(), lambda a, b: a + b),
    "map with itself": lambda p, held: p.grad.map_(p.grad, lambda a, b: a + b),
    "map2 with itself": lambda p, held: p.grad.map2_(p.grad, p.grad, lambda a, b, c: a + b * c),
    "mul complex": lambda p, held: p.grad.mul_(1j),
    "mul complex tensor": lambda p, held: p.grad.mul_(torch.tensor(1j)),
    "foreach mul vector": lambda p, held: torch._foreach_mul_([p.grad], torch.ones(3)),
    "mul with a graph": lambda p, held: _through_graph(p, lambda gradient, factor: gradient.mul_(factor)),
    "*= with a graph": lambda p, held: _through_graph(p, lambda gradient, factor: _inplace(p, operator.imul, factor)),
    "without the graph": lambda p, held: _returns(p.grad, lambda g: g.detach_()),
    "mul another": lambda p, held: _by_another(p),
    "unscale by fp64": lambda p, held: _unscaled(p, torch.tensor(1.0, dtype=torch.float64)),
    "unscale by two": lambda p, held: _unscaled(p, torch.ones(2)),
    "in inference mode": lambda p, held: _in_inference_mode(p),
    "copies": lambda p, held: _copies_edited(p),
    "deep copies of a view": lambda p, held: _aliases_copied_together(p, is_view=True),
    "attribute": lambda p, held: _with_a_label(p),
    "attribute of what is written to": lambda p, held: _with_a_label(p, lambda p: p.grad.add_(1)),
    "attribute that is set later": lambda p, held: _label_of_a_copy(p),
    "saved by a graph": lambda p, held: _graph_of_edited(p),
    "requires grad": lambda p, held: _requiring_grad(p),
    "requires grad as an attribute": lambda p, held: _requiring_grad(p, is_set=True),
    "in another parameter": lambda p, held: _in_another_parameter(p),
    "in one of another shape": lambda p, held: _in_a_parameter_that_differs(p, (99,), p.dtype),
    "in one of another dtype": lambda p, held: _in_a_parameter_that_differs(p, p.shape, torch.float8_e5m2),
    "alias with other data": lambda p, held: _alias_with_data(p),
    "aliases of replaced data": lambda p, held: _aliases_of_replaced_data(p),
    "data of the gradient for an alias": lambda p, held: _data_of_the_gradient_for_an_alias(p),
    "data of an alias in .grad": lambda p, held: _data_of_an_alias_in_grad(p, is_written=False),
    "data of an alias in .grad that was written to": lambda p, held: _data_of_an_alias_in_grad(p, is_written=True),
    "data of what was written to": lambda p, held: _data_of_what_was_written_to(p),
    "values of a sparse tensor": lambda p, held: _sparse(p)._values().mul_(0.5),
    "write that no schema tells": lambda p, held: torch.ops.superadam_hides.write(p.grad),
    "AdamW fused": lambda p, held: _step(p, torch.optim.AdamW, fused=True),
    "others in lists": lambda p, held: _versions_of_others(p),
    "of a subclass": lambda p, held: _of_a_subclass(p),
    "write of another process": lambda p, held: pickle.loads(ForkingPickler.dumps(p.grad)).add_(1),
    "reshaped and back": lambda p, held: _reshaped_and_back(p),
}
"""What gives the gradient back."""

REPLACED: dict[str, Operation] = {
    "start again": lambda p, held: _replace(p, None) or _accumulate(p),
    "set to none": lambda p, held: (_replace(p, None), _accumulate(p)),
    "set product": lambda p, held: _replace(p, p.grad * 2),
    "set alias": lambda p, held: _replace(p, p.grad.detach()),
    "set data": lambda p, held: _set_data(p, torch.full_like(p, 0.5).detach()),
    "set data to an alias": lambda p, held: _set_data(p, p.grad.detach()),
    "set itself": lambda p, held: _replace(p, p.grad),
    "set product, then a graph": lambda p, held: (held.append(p.grad), _replace(p, p.grad * 2), held[-1].mul_(p))[2],
    "graph of before": lambda p, held: _graph_of_before(p),
    "moved and back": lambda p, held: _moved_and_back(p),
    "set alias that requires grad": lambda p, held: (_replace(p, p.grad.detach()), _requiring_grad(p))[1],
}
"""What puts something else into `.grad`."""

HELD: dict[str, Operation] = {
    "hold": lambda p, held: held.append(p.grad),
    "hold detached": lambda p, held: held.append(p.grad.detach()),
    "hold data": lambda p, held: held.append(p.grad.data),
    "hold view": lambda p, held: held.append(p.grad.view(-1)),
    "hold copy": lambda p, held: held.append(copy.copy(p.grad)),
    "hold aliases of inference mode": torch.inference_mode()(
        lambda p, held: held.extend([p.grad.detach(), p.grad.data, p.grad.view(p.shape)])
    ),
    "edit held": lambda p, held: held and held[0].add_(0.5).dtype,
    "scale held": lambda p, held: held and held[-1].mul_(0.7).dtype,
    "set memory of held": lambda p, held: held and held[-1].set_(torch.arange(5, dtype=p.dtype)).sum(),
    "set held": lambda p, held: held and held[0].shape == p.shape and _replace(p, held[0]),
    "let go": lambda p, held: held.clear(),
}
"""What other references see."""

OPERATIONS = {**RECORDED, **READ, **WRITTEN, **REPLACED, **HELD}
PLACES = ["here", "other strides", "columns"]
"""Where the gradient lies: as it came, elsewhere as one that has travelled, or elsewhere than one that came so."""
Values = Callable[[int], Tensor]
"""Returns as many values."""


def run(operations: list[str], dtype: torch.dtype, shape: tuple[int, ...], place: str, values: Values) -> Any:
    """Do the same to a taken and to an ordinary gradient; return what the first has become."""
    start = values(int(np.prod(shape))).view(shape).to(dtype)
    ours, theirs, _owner = pair_for(with_other_strides(start) if place == "columns" else start)
    taken: Any = taken_of(ours.grad)
    if place != "here":
        taken.pending = with_other_strides(taken.pending) if place == "other strides" else taken.pending.contiguous()
    pending, arrived = taken.pending, taken.pending.clone()
    del taken
    held_ours, held_theirs = list[Any](), list[Any]()
    for name in operations:
        results = []
        for parameter, held in ((ours, held_ours), (theirs, held_theirs)):
            try:
                results.append(bits(OPERATIONS[name](parameter, held)))
            except (IndexError, RuntimeError, ValueError) as error:
                results.append(str(error))
        assert results[0] == results[1], name
        assert bits(ours.grad) == bits(theirs.grad), name
        assert ours.grad.stride() == theirs.grad.stride(), name
        assert bits(held_ours) == bits(held_theirs), name
    assert bits(pending) == bits(arrived)
    assert bits(ours) == bits(theirs)
    return ours.grad


def irregular(count: int) -> Tensor:
    return torch.arange(1, count + 1, dtype=torch.float64).sin() * 3


def with_infinity(count: int) -> Tensor:
    values = irregular(count)
    if count:
        values[count // 2] = float("inf")
    return values


@given(
    operations=st.lists(st.sampled_from(sorted(OPERATIONS)), min_size=1, max_size=8),
    dtype=st.sampled_from(DTYPES),
    shape=st.sampled_from([(5, 7), (33,), (2, 3, 4), (), (0, 3)]),
    place=st.sampled_from(PLACES),
    values=st.sampled_from([irregular, with_infinity]),
)
@example(["*= with a graph", "write of another process"], torch.float32, (5, 7), "here", irregular)
@example(["mul with a graph", "write of another process"], torch.float32, (5, 7), "here", irregular)
def test_any_sequence_is_as_on_an_ordinary_gradient(operations, dtype, shape, place, values):
    run(operations, dtype, shape, place, values)


@pytest.mark.parametrize("name", OPERATIONS)
def test_each_operation_is_as_on_an_ordinary_gradient(name: str) -> None:
    for dtype in (torch.bfloat16, [torch.float32, torch.float16, torch.float64][list(OPERATIONS).index(name) % 3]):
        gradient = run([name], dtype, (5, 7), "other strides", irregular)
        assert taken_of(gradient) is not None or name not in RECORDED.keys() | READ.keys()
    run(["div", name, "norm"], torch.bfloat16, (5, 7), "here", irregular)
    held = ["hold", "hold detached", name, "add", "edit held", "scale held", "norm"]
    run(held, torch.float32, (9,), "here", irregular)
    run([name], torch.float32, (), "here", irregular)


@pytest.mark.parametrize(
    ("shape", "strides"),
    [
        *(((1, 5), (1, 1)), ((3, 1, 2), (1, 1, 3)), ((4, 3, 1, 1), (3, 1, 3, 3)), ((1,), (7,)), ((2, 1), (1, 1))),
        ((2, 1, 3), (3, 3, 1)),
    ],
)
def test_a_view_has_the_strides_that_torch_gives_it(shape: tuple[int, ...], strides: tuple[int, ...]) -> None:
    ours, theirs, _owner = pair_for(torch.empty_strided(shape, strides).fill_(0.5))
    assert ours.grad.stride() == strides
    for view in (lambda g: g.view(shape), lambda g: g.reshape(shape), lambda g: g.view_as(g)):
        assert view(ours.grad).stride() == view(theirs.grad).stride()
    assert (type(ours.grad) is GradientHandle) is (torch.empty(shape).stride() == strides)
    assert ours.grad.reshape(shape[::-1]).stride() == theirs.grad.reshape(shape[::-1]).stride()


# -- training loops ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [None, 0, 2])
def test_finite_check_takes_the_count_of_the_keeper(count: int | None) -> None:
    keeper = NotingHolder(count)
    parameter, _owner, taken = handle_for(torch.tensor([1.0, float("nan")]), keeper)
    found = torch.zeros(())
    torch._amp_foreach_non_finite_check_and_unscale_([parameter.grad], found, torch.tensor(0.5))
    assert found.item() == (count != 0)
    assert taken.unscale_factor() == taken.scale() == 0.5
    parameter.grad.mul_(0.3)
    torch._amp_foreach_non_finite_check_and_unscale_([parameter.grad], found.zero_(), torch.tensor(0.25))
    assert found.item() == 1  # counted after the first product, whatever arrived
    assert taken.unscale_factor() == 0.125


def test_norm_that_was_taken_before_is_used_and_kept_apart() -> None:
    parameter, _owner, taken = handle_for(torch.tensor([3.0, 4.0]))
    taken.norm = torch.tensor(6.0)  # wrong, to be seen
    first, other = torch._foreach_norm([parameter.grad, torch.tensor([1.0])])
    assert (first.item(), other.item()) == (6.0, 1.0)
    (second,) = torch._foreach_norm([parameter.grad])
    second.zero_()
    (third,) = torch._foreach_norm([parameter.grad])
    assert (first.item(), third.item()) == (6.0, 6.0)
    assert torch._foreach_norm([parameter.grad], 1)[0].item() == 7.0
    with flushed_denormals():  # which it may depend on
        assert torch._foreach_norm([parameter.grad])[0].item() == 5.0
    assert torch.linalg.vector_norm(parameter.grad).item() == 5.0  # may be another kernel
    parameter.grad.mul_(2)
    assert torch._foreach_norm([parameter.grad])[0].item() == 10.0


# -- what is taken -----------------------------------------------------------------------------------------------------


def _with_gradient(gradient: Tensor) -> nn.Parameter:
    parameter = nn.Parameter(torch.zeros(gradient.shape, dtype=gradient.dtype))
    parameter.grad = gradient
    return parameter


def test_references_are_counted_while_a_compiler_is_at_work() -> None:
    """Another evaluator of frames, as torch.compile sets for all threads, counts arguments once more."""
    parameter, views = _with_gradient(torch.ones(3)), [torch.ones(3).view(3)]
    held, found = [parameter.grad], []

    def count() -> None:
        found.append(is_exclusive(parameter))
        held.clear()
        found.extend([is_exclusive(parameter), is_held(views, 0, 0)])

    def look(x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        with ThreadPoolExecutor(1) as threads:
            threads.submit(count).result()
        return x + 1

    torch.compile(look, backend="eager")(torch.ones(1))
    torch.compiler.reset()
    assert found == [False, True, False]


HOLDERS: dict[str, Callable[[Any], object]] = {
    "reference": lambda p: p.grad,
    "alias": lambda p: p.grad.detach(),
    "view": lambda p: p.grad[0],
    "weak reference": lambda p: weakref.ref(p.grad),
    "exchange": lambda p: torch.from_dlpack(p.grad),
    "storage": lambda p: p.grad.untyped_storage(),
    "graph": lambda p: (p * p.grad).sum(),
    "capsule": lambda p: p.grad.__dlpack__(),
}


@pytest.mark.parametrize("holder", HOLDERS)
def test_shared_gradient_is_not_taken(holder: str) -> None:
    parameter = _with_gradient(torch.ones(3))
    held = HOLDERS[holder](parameter)
    assert not is_exclusive(parameter)
    assert take_gradient(parameter) is None
    assert type(parameter.grad) is Tensor
    del held
    assert take_gradient(parameter) is not None


UNFIT: dict[str, Callable[[], Tensor]] = {
    "sparse": lambda: torch.eye(3).to_sparse(),
    "with graph": lambda: torch.ones(3, requires_grad=True) * 1,
    "that requires grad": lambda: torch.ones(3, requires_grad=True),
    "of a subclass": lambda: nn.Parameter(torch.ones(3)),
    "of inference mode": lambda: torch.inference_mode()(torch.ones)(3),
    "whose rows overlap": lambda: torch.ones(6).as_strided((2, 3), (1, 1)).detach(),
    "negated lazily, as it was loaded": lambda: pickle.loads(pickle.dumps(torch._neg_view(torch.ones(3)))),
    "with an attribute": lambda: _with(torch.ones(3), "label", "weight"),
    "with a gradient": lambda: _with(torch.ones(3), "grad", torch.ones(3)),
    "that an array has had": lambda: (one := torch.ones(3), one.numpy())[0],
    "of an array": lambda: torch.from_numpy(np.ones(3, np.float32)),
    "of another library": lambda: torch.from_dlpack(np.ones(3, np.float32)),
    "of a file": lambda: torch.from_file(__file__, size=3),
    "with more memory before it": lambda: torch.ones(5)[2:].detach(),
    "with more memory behind it": lambda: torch.ones(5)[:3].detach(),
    "of several processes": lambda: torch.ones(3).share_memory_(),
}


def _with(gradient: Tensor, name: str, value: object) -> Tensor:
    setattr(gradient, name, value)
    return gradient


@pytest.mark.parametrize("kind", UNFIT)
def test_unfit_gradient_is_not_taken(kind: str) -> None:
    parameter = _with_gradient(UNFIT[kind]())
    before = type(parameter.grad)
    assert take_gradient(parameter) is None
    assert type(parameter.grad) is before


@pytest.mark.parametrize("is_taken", [False, True])
def test_tangents_of_gradients_are_as_without_a_scheduler(is_taken: bool) -> None:
    """Of a backward in forward-mode differentiation, which adds to a gradient that was taken outside, or to none."""
    parameter, owner, _ = handle_for(torch.ones(3))
    if not is_taken:
        parameter.grad = None
    with forward_ad.dual_level():
        for _ in range(2):
            factor = forward_ad.make_dual(torch.full((3,), 2.0), torch.full((3,), 7.0))
            (parameter * factor).sum().backward()
        tangent = forward_ad.unpack_dual(parameter.grad).tangent
        assert tangent.tolist() == [14.0 if is_taken else 7.0] * 3  # torch detaches the first one
        assert parameter.grad.tolist() == [4.0 + is_taken] * 3
        parameter.grad = factor * 2
        assert take_gradient(parameter, owner) is None


def test_a_sum_that_is_being_read_is_not_taken_again() -> None:
    parameter, owner, taken = _sum_of(torch.ones(3, dtype=torch.bfloat16))
    assert take_gradient(parameter, owner) is taken
    taken.in_use = True
    assert take_gradient(parameter, owner) is None
    assert taken_of(parameter.grad) is taken


def test_nothing_to_take() -> None:
    parameter = nn.Parameter(torch.zeros(3))
    assert take_gradient(parameter) is parameter.grad is None
    parameter.grad = torch.ones(3)
    taken = take_gradient(parameter)
    handle = parameter.grad
    assert take_gradient(parameter) is None
    assert parameter.grad is handle
    assert taken_of(handle) is taken
    assert taken_of(None) is taken_of(torch.ones(3)) is taken_of(parameter) is None


def test_gradient_that_no_longer_fits_the_parameter_stays() -> None:
    parameter = _with_gradient(torch.ones(3))
    parameter.data = torch.zeros(4)
    assert take_gradient(parameter) is None
    assert bits(parameter.grad) == bits(torch.ones(3))


@pytest.mark.parametrize("give_back", [lambda p: p.grad.add_(1), lambda p: _set_data(p, torch.ones(8, 6))])
@pytest.mark.parametrize("is_read", [False, True])
def test_versions_do_not_run_backwards(give_back: Callable[[Any], object], is_read: bool) -> None:
    ours, theirs, _owner = pair_for(torch.ones(8, 6))
    versions: list[list[int]] = [[], []]
    for parameter, seen in zip((ours, theirs), versions, strict=True):
        for change in (
            lambda p: p.grad,
            lambda p: is_read and p.grad.untyped_storage(),
            lambda p: p.grad.mul_(2),
            give_back,
            lambda p: p.grad.mul_(2),
            lambda p: p.grad.numpy(),
            lambda p: p.grad.div_(2),
            lambda p: _set_data(p, torch.ones(8, 6)),
            _accumulate,
            _accumulate,
        ):
            change(parameter)
            seen.append(parameter.grad._version)
    assert all((b > a) is (d > c) for (a, b), (c, d) in zip(*map(itertools.pairwise, versions), strict=True)), versions
    assert all(ours >= theirs for ours, theirs in zip(*versions, strict=True)), versions


def test_a_gradient_that_was_written_to_a_million_times_is_taken_and_given_back_as_any_other() -> None:
    """As one that `zero_grad(set_to_none=False)` leaves in `.grad` has been after a long training."""
    parameter: Any = _with_gradient(torch.ones(3))
    owner = Owner(parameter)
    torch.autograd.graph.increment_version([parameter.grad] * 10**6)
    tracemalloc.start()
    try:
        assert take_gradient(parameter, owner) is not None
        parameter.grad.zero_()
        assert type(parameter.grad) is Tensor
        assert parameter.grad._version > 10**6
        assert tracemalloc.get_traced_memory()[1] < 10**5  # and so no list of a million
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("is_unrounded", [False, True])
def test_an_old_gradient_that_is_clipped_for_ever_records_few_products(is_unrounded: bool) -> None:
    """Each reads the gradient with all products so far: without a limit, the next takes longer than the one before."""
    gradient = torch.linspace(-3, 5, 64)
    parameter: Any = _with_gradient(gradient.clone())
    plain = _with_gradient(gradient.clone())
    owner = Owner(parameter)
    taken = take_gradient(parameter, owner)
    assert taken is not None
    if is_unrounded:
        taken.become_sum(torch.empty(64))
    for step in range(60):
        norms = [clip_grad_norm_([each], 4.0 - 0.05 * step) for each in (parameter, plain)]
        assert bits(norms[0]) == bits(norms[1])
        assert len(taken.factors) <= MOST_FACTORS
    assert bits(parameter.grad + 0) == bits(plain.grad)


# -- traps -------------------------------------------------------------------------------------------------------------

CONVERSIONS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "half": lambda m: m.half(),
    "bfloat16": lambda m: m.to(torch.bfloat16),
    "double": lambda m: m.double(),
    "no change": lambda m: m.to("cpu"),
    "no change of dtype": lambda m: m.float(),
    "layout": lambda m: m.to(memory_format=torch.contiguous_format),
    "shared memory": lambda m: m.share_memory(),
    "meta": lambda m: m.to("meta"),
    "empty": lambda m: m.to_empty(device="meta"),
}


@pytest.mark.parametrize("swap", [False, True])
@pytest.mark.parametrize("conversion", CONVERSIONS)
def test_modules_are_converted_as_with_ordinary_gradients(conversion: str, swap: bool) -> None:
    pairs = [pair_for(irregular(12).float().view(3, 4)), pair_for(irregular(5).float())]
    both = ours, theirs = [nn.ParameterList([pair[side] for pair in pairs]) for side in (0, 1)]
    for module in both:
        module[0].grad.mul_(0.3)
    torch.__future__.set_swap_module_params_on_conversion(swap)
    try:
        for module in both:
            CONVERSIONS[conversion](module)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    if conversion in ("meta", "empty"):
        assert all(parameter.grad is None or parameter.grad.is_meta for parameter in ours)
        return
    for accumulates in (False, True):
        for parameter in (*ours, *theirs) if accumulates else ():
            _accumulate(parameter)
        assert bits([*ours]) == bits([*theirs])
        assert bits([p.grad for p in ours]) == bits([p.grad for p in theirs])
        assert [p.grad.stride() for p in ours] == [p.grad.stride() for p in theirs]
        if not accumulates:
            assert [taken_of(p.grad) is not None for p in ours] == [conversion.startswith(("no change", "layout"))] * 2


def test_a_leaf_and_its_gradient_are_copied_together() -> None:
    leaf = torch.ones(3, requires_grad=True)
    leaf.grad = torch.ones(3)
    SpeculativeCPUAdam([leaf]).speculate()
    both, reverse = copy.deepcopy([leaf, leaf.grad]), copy.deepcopy([leaf.grad, leaf])
    assert both[0].grad is both[1]
    assert reverse[1].grad is reverse[0]
    with pytest.raises(TypeError):
        leaf.grad.data = 1


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
def test_memory_is_the_gradient_itself() -> None:
    for use in (
        lambda g: g.data_ptr(),
        lambda g: getattr(g, "const_data_ptr", g.data_ptr)(),
        lambda g: g.untyped_storage().data_ptr(),
        lambda g: g.storage().data_ptr(),
        lambda g: g.numpy().__array_interface__["data"][0],
        lambda g: np.asarray(g).__array_interface__["data"][0],
        lambda g: torch.from_dlpack(g).data_ptr(),
        lambda g: torch.from_dlpack(g.__dlpack__()).data_ptr(),
        lambda g: torch.from_dlpack(torch.utils.dlpack.to_dlpack(g)).data_ptr(),
        lambda g: torch.from_dlpack(torch.to_dlpack(g)).data_ptr(),
        lambda g: torch.as_tensor(np.asarray(g)).data_ptr(),
        lambda g: torch.asarray(g, copy=False).data_ptr(),
        lambda g: np.from_dlpack(g).__array_interface__["data"][0],
        lambda g: g.data.data_ptr(),
        lambda g: g.share_memory_().data_ptr(),
    ):
        parameter, _owner, _taken = handle_for(torch.tensor([1.0, 2.0]))
        handle: Any = parameter.grad
        address = use(handle)
        assert address == parameter.grad.data_ptr() != 0
        assert address == parameter.grad.data_ptr() == handle.data_ptr()
        assert parameter.grad.tolist() == [1.0, 2.0]


def test_dlpack_of_other_tensors_is_that_of_torch() -> None:
    tensor = torch.tensor([1.0, 2.0])
    assert torch.from_dlpack(torch.utils.dlpack.to_dlpack(tensor)).data_ptr() == tensor.data_ptr()
    with pytest.raises(TypeError):
        torch.utils.dlpack.to_dlpack([1.0, 2.0])


def test_storage_gives_back_unless_a_compiler_or_code_in_cpp_looks() -> None:
    """The latter gets an error."""
    parameter, _owner, _taken = handle_for(torch.tensor([1.0, 2.0]))
    gradient: Any = parameter.grad
    with pytest.raises(RuntimeError, match=r"data pointer|storage"):
        torch.Tensor.data_ptr(gradient)
    with torch._guards.tracing(torch._guards.TracingContext(None)):
        gradient.untyped_storage()
        assert taken_of(gradient) is not None
    gradient.untyped_storage()
    assert taken_of(gradient) is None
    assert torch.Tensor.data_ptr(gradient.data) == parameter.grad.data_ptr()


def test_sparse_gradient_after_a_dense_one() -> None:
    results = []
    for takes in (True, False):
        torch.default_generator.manual_seed(0)
        embedding = nn.Embedding(10, 4, sparse=True)
        owner = take_as_they_arrive(embedding.weight) if takes else None
        embedding.weight.sum().backward()
        assert (taken_of(embedding.weight.grad) is not None) is (owner is not None) is takes
        embedding(torch.tensor([1, 1, 3])).pow(2).sum().backward()
        results.append(bits(embedding.weight.grad))
    assert results[0] == results[1]


def test_reads_from_many_threads() -> None:
    ours, theirs, _owner = pair_for(irregular(48).float())
    with ThreadPoolExecutor(4) as threads:
        results = [*threads.map(lambda _: [bits(ours.grad.norm()) for _ in range(80)], range(4))]
    assert results == [[bits(theirs.grad.norm())] * 80] * 4


def test_nothing_is_kept_alive_after_giving_back() -> None:
    parameter, owner, taken = handle_for(torch.ones(3))
    gradient: Any = parameter.grad
    gradient.add_(1)
    references = [weakref.ref(it) for it in (parameter, taken, gradient, parameter.grad)]
    gc.disable()
    try:
        del parameter, owner, taken, gradient
        assert [reference() for reference in references] == [None] * 4  # without the collector
    finally:
        gc.enable()


# -- sums of micro-batches ---------------------------------------------------------------------------------------------


def _sum_of(first: Tensor) -> tuple[nn.Parameter, Owner, TakenGradient]:
    parameter, owner, taken = handle_for(first)
    taken.pending = taken.pending.to(torch.float32)
    taken.is_unrounded, taken.exact_dtype = True, taken.pending.dtype
    return parameter, owner, taken


class Signalling(GradientHolder):
    """A holder, and an event, in whose methods a signal comes."""

    def unrounded(self, new: Tensor) -> Tensor:
        signal.raise_signal(signal.SIGUSR1)
        return new

    def _adds(self, total: HostSum, taken: TakenGradient, new: Tensor) -> bool:
        signal.raise_signal(signal.SIGUSR1)
        return False

    def synchronize(self) -> None:
        signal.raise_signal(signal.SIGUSR1)


@pytest.mark.parametrize("is_sum", [True, False])
def test_a_handler_that_gives_back_runs_once_a_change_is_made(is_sum: bool) -> None:
    parameter, _owner, taken = (_sum_of if is_sum else handle_for)(torch.ones(3, dtype=torch.bfloat16))
    holder = Signalling()
    if is_sum:
        taken._holder = lambda: holder
    else:
        taken.arrived = holder
    handled: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda *_: handled.append(parameter.grad.data_ptr()))
    try:
        parameter.grad.add_(torch.ones(3, dtype=torch.bfloat16))
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert handled
    assert parameter.grad.tolist() == [2.0] * 3


@pytest.mark.parametrize(
    "write",
    [
        lambda g, x: g.add_(x, alpha=2),
        lambda g, x: g.add_(1),
        lambda g, x: g.add_(x.float()),
        lambda g, x: g.add_(x[:1]),
        lambda g, x: g.sub_(x),
        lambda g, x: torch._foreach_add_([g], [x]),
        lambda g, x: g.add_(g),
    ],
)
def test_other_writes_round_the_sum(write: Callable[[Any, Tensor], Any]) -> None:
    first = torch.tensor([1.0, 3.0], dtype=torch.bfloat16)
    other = torch.tensor([0.125, 0.3], dtype=torch.bfloat16)
    parameter, _owner, taken = _sum_of(first)
    taken.pending.add_(2**-12)
    rounded = (first.float() + 2**-12).to(torch.bfloat16)
    write(parameter.grad, other)
    write(rounded, other)
    assert type(parameter.grad) is Tensor
    assert bits(parameter.grad) == bits(rounded)


@pytest.mark.parametrize("counted", [None, 0])
def test_unscaling_and_products_come_before_rounding(counted: int | None) -> None:
    """7e4 is more than fp16 can hold."""
    parameter, _owner, taken = handle_for(torch.tensor([6e4], dtype=torch.float16), NotingHolder(counted))
    taken.pending = torch.tensor([7e4])
    taken.is_unrounded, taken.exact_dtype = True, taken.pending.dtype
    assert parameter.grad.isinf().all()
    found = torch.zeros(())
    torch._amp_foreach_non_finite_check_and_unscale_([parameter.grad], found, torch.tensor(0.5))
    assert found.item() == 0
    parameter.grad.mul_(0.1)
    assert torch.equal(taken.exact(), torch.tensor([7e4]).mul_(0.5).mul_(0.1))
    assert torch.equal(parameter.grad, taken.exact().half())


def test_a_product_in_another_mode_is_made_of_each_gradient_in_a_list():
    first = torch.tensor([1.0, 3.0], dtype=torch.bfloat16)
    unrounded, _owner, taken = _sum_of(first)
    other, _other_owner, ordinary = handle_for(first)
    own, read = first.clone(), taken.pending
    with flushed_denormals():
        torch._foreach_mul_([unrounded.grad, other.grad, own], 0.5)
    assert taken.given is None
    assert ordinary.given is not None
    assert unrounded.grad.tolist() == other.grad.tolist() == own.tolist() == [0.5, 1.5]
    assert read.tolist() == first.tolist()


@pytest.mark.parametrize("is_list", [False, True])
def test_what_arrived_unrounded_stays_so_when_it_is_zeroed(is_list: bool) -> None:
    first = torch.tensor([1.0, 3.0], dtype=torch.bfloat16)
    parameter, _owner, taken = _sum_of(first)
    taken.is_reduced = taken.in_use = True
    read, version, taken.norm = taken.pending, taken.version, torch.tensor(6.0)
    other, _other_owner, ordinary = handle_for(first)
    parameter.grad.mul_(math.inf)
    if is_list:
        torch._foreach_zero_([parameter.grad, other.grad])
    else:
        with Mode():
            parameter.grad.zero_()
        other.grad.zero_()
    assert ordinary.given is not None
    assert other.grad.tolist() == parameter.grad.tolist() == [0.0, 0.0]
    assert taken_of(parameter.grad) is taken
    assert read.tolist() == [1.0, 3.0]
    assert taken.version > version
    assert not taken.in_use
    assert taken.norm is None
    parameter.grad += first
    (parameter * first).sum().backward()
    assert taken_of(parameter.grad) is taken
    assert taken.pending.tolist() == [2.0, 6.0]


@pytest.mark.parametrize("order", [1.0, 2.0, math.inf])
def test_norms_come_before_rounding(order: float) -> None:
    """1.0035 rounds to 1, and its norm does not round to that of 1."""
    parameter, _owner, taken = _sum_of(torch.ones(2, dtype=torch.bfloat16))
    taken.pending += 0.0035
    other, _other_owner, _ = handle_for(torch.ones(2, dtype=torch.bfloat16))
    norms = torch._foreach_norm([other.grad, parameter.grad, torch.ones(2, dtype=torch.bfloat16)], order)
    expected = [torch.linalg.vector_norm(torch.full((2,), 1.0 + more), order).bfloat16() for more in (0, 0.0035, 0)]
    assert expected[0] < expected[1] or order != 2
    assert bits(torch.stack(norms)) == bits(torch.stack(expected))
    for gradient, norm in zip((other.grad, parameter.grad), expected, strict=False):
        assert torch.equal(torch.linalg.vector_norm(gradient, order), norm)
        assert torch.linalg.vector_norm(gradient, order, dtype=torch.float64).dtype is torch.float64
    assert taken_of(parameter.grad) is taken


# -- distributed tensors -----------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("one_rank")
def test_local_gradients_of_distributed_tensors() -> None:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor

    mesh = DeviceMesh("cpu", [0])
    results = []
    for takes in (True, False):
        parameter: Any = nn.Parameter(distribute_tensor(torch.zeros(4, 3), mesh, [Shard(0)]))
        whole = torch.arange(12.0).view(4, 3)
        parameter.grad = distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None)  # no collective holds it
        owner = Owner(parameter)
        taken = take_gradient(parameter, owner) if takes else None
        assert (taken is None) is not takes
        assert taken_of(parameter.grad) is taken
        norm = clip_grad_norm_([parameter], 0.5)
        assert isinstance(norm, DTensor)
        results.append(bits([norm.full_tensor(), parameter.grad.full_tensor(), parameter.grad.to_local().norm()]))
        assert (type(parameter.grad._local_tensor) is GradientHandle) is takes
        parameter.grad.add_(1)
        assert type(parameter.grad._local_tensor) is Tensor
        parameter.grad.to_local().mul_(0.3)
        torch.optim.AdamW([parameter], lr=0.1).step()
        results.append(bits([parameter.full_tensor(), parameter.grad.full_tensor()]))
        assert taken_of(parameter.grad) is None
    assert results[:2] == results[2:]


def test_every_order_of_two_writes() -> None:
    for first, second in itertools.product(("add", "mul", "accumulate", "data add"), repeat=2):
        run([first, second, "clip"], torch.bfloat16, (4,), "other strides", irregular)
