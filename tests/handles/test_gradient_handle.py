"""Handles in `.grad`: whatever a program does with one has the bits of the same done to an ordinary gradient."""

from __future__ import annotations

import copy
import gc
import itertools
import math
import pickle
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support import visible
from support.handles import NotingHolder, Owner
from support.optimizers import DTYPES, through_disk
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, clip_grads_with_norm_, get_total_norm

from superadam.handles.gradient_handle import GradientHandle, is_exclusive, take_gradient, taken_of
from superadam.handles.taken_gradient import TakenGradient


def bits(value: Any) -> Any:
    """Return what must be equal: values bit for bit, shape and dtype."""
    if isinstance(value, list | tuple):
        return [bits(item) for item in value]
    return visible.bits(value) if isinstance(value, Tensor) else repr(value)


def handle_for(gradient: Tensor, keeper: NotingHolder | None = None) -> tuple[nn.Parameter, Owner, TakenGradient]:
    """Return a parameter in whose `.grad` is a handle of a copy of `gradient`."""
    parameter = nn.Parameter(torch.zeros_like(gradient))
    parameter.grad = gradient.clone()
    owner = Owner(parameter)
    taken = take_gradient(parameter, owner, keeper)
    assert taken is not None
    assert type(parameter.grad) is GradientHandle
    return parameter, owner, taken


def move_elsewhere(taken: TakenGradient, dtype: torch.dtype | None = None) -> None:
    """Replace the gradient by a copy with other strides, as one that has travelled."""
    order = list(range(len(taken.shape)))[::-1]
    elsewhere = taken.pending.permute(order).contiguous().permute(order)
    taken.pending = elsewhere.to(dtype or taken.dtype)


def model(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)).to(dtype)


INPUTS = torch.linspace(-1, 1, 24).view(4, 6)


def backward(module: nn.Module, factor: float = 1.0) -> None:
    dtype = next(module.parameters()).dtype
    (module((INPUTS * factor).to(dtype)).pow(2).sum() * 5).backward()


class Taking:
    """Takes the gradients of a model as they arrive."""

    def __init__(self, module: nn.Module, keeper: NotingHolder | None = None) -> None:
        self.owners = [Owner(parameter) for parameter in module.parameters()]
        self.holder = keeper
        self.count = 0
        self.hooks = [
            owner.parameter.register_post_accumulate_grad_hook(self.hook(owner))  # type: ignore[attr-defined]
            for owner in self.owners
        ]

    def hook(self, owner: Owner) -> Callable[[Tensor], None]:
        place = self.owners.index(owner)
        me = weakref.ref(self)

        def taking(parameter: Tensor) -> None:
            self = me()
            if self is not None and take_gradient(parameter, self.owners[place], self.holder) is not None:
                self.count += 1

        return taking


@dataclass
class Pair:
    """Two equal models; the gradients of one are taken."""

    taking: nn.Sequential
    plain: nn.Sequential
    takes: Taking

    def __iter__(self) -> Iterator[nn.Sequential]:
        yield self.taking  # a generator, which keeps `takes`
        yield self.plain

    def check(self) -> None:
        ours, theirs = list(self.taking.parameters()), list(self.plain.parameters())
        assert [bits(p) for p in ours] == [bits(p) for p in theirs]
        assert [bits(p.grad) for p in ours] == [bits(p.grad) for p in theirs]
        assert [p.grad is not None and p.grad.stride() for p in ours] == [
            p.grad is not None and p.grad.stride() for p in theirs
        ]

    def handles(self) -> int:
        return sum(taken_of(p.grad) is not None for p in self.taking.parameters())


def pair(dtype: torch.dtype = torch.float32, *, with_gradients: bool = True) -> Pair:
    ours, theirs = model(dtype), model(dtype)
    result = Pair(ours, theirs, Taking(ours))
    if with_gradients:
        for module in result:
            backward(module)
        assert result.handles() == 4
    return result


def weight(module: nn.Module) -> Any:
    return module.get_parameter("0.weight")


# -- any sequence of operations ----------------------------------------------------------------------------------------

Operation = Callable[[Any, list[Any]], Any]
"""Does something to the gradient of a parameter; may add to the aliases that are held. Results are compared."""


def _returns(gradient: Any, operation: Callable[[Any], Any]) -> bool:
    """Do it, and return whether the very object came back."""
    return operation(gradient) is gradient


def _unscaled(parameter: Any, inverse: float) -> float:
    found = torch.zeros(())
    torch._amp_foreach_non_finite_check_and_unscale_([parameter.grad], found, torch.tensor(inverse))
    return found.item()


def _replace(parameter: Any, gradient: Any) -> None:
    parameter.grad = gradient


def _inplace(parameter: Any, operator: str, value: Any) -> None:
    if operator == "+=":
        parameter.grad += value
    elif operator == "-=":
        parameter.grad -= value
    elif operator == "*=":
        parameter.grad *= value
    elif operator == "/=":
        parameter.grad /= value
    else:
        parameter.grad **= value


def _changed_later(parameter: Any) -> None:
    factor = torch.tensor(0.3)
    parameter.grad.mul_(factor)
    factor.fill_(100.0)


def _step(parameter: Any, kind: type[torch.optim.Optimizer], **options: Any) -> Tensor:
    kind([parameter], lr=0.25, **options).step()  # type: ignore[call-arg]
    return parameter.detach().clone()


def _set_data(parameter: Any, data: Any) -> None:
    parameter.grad.data = data


def _edit_numpy(parameter: Any) -> None:
    if parameter.dtype != torch.bfloat16:
        array = parameter.grad.numpy()
        array *= np.asarray(0.5, array.dtype)


def _accumulate(parameter: Any) -> None:
    (parameter * torch.linspace(-3, 3, parameter.numel(), dtype=parameter.dtype).view_as(parameter)).sum().backward()


def _start_again(parameter: Any) -> None:
    parameter.grad = None
    _accumulate(parameter)


def _own(parameter: Any, value: float) -> Tensor:
    return torch.tensor(value, dtype=parameter.dtype)


RECORDED: dict[str, Operation] = {
    "mul": lambda p, held: _returns(p.grad, lambda g: g.mul_(0.37)),
    "mul integer": lambda p, held: _returns(p.grad, lambda g: g.mul_(-2)),
    "mul one": lambda p, held: _returns(p.grad, lambda g: g.mul_(1.0)),
    "mul fp32 tensor": lambda p, held: _returns(p.grad, lambda g: g.mul_(torch.tensor(0.7))),
    "mul fp64 tensor": lambda p, held: _returns(p.grad, lambda g: g.mul_(torch.tensor(1 / 3, dtype=torch.float64))),
    "mul own tensor": lambda p, held: _returns(p.grad, lambda g: g.mul_(_own(p, 0.9))),
    "mul Inf": lambda p, held: _returns(p.grad, lambda g: g.mul_(float("inf"))),
    "mul then change": lambda p, held: _changed_later(p),
    "div": lambda p, held: _returns(p.grad, lambda g: g.div_(3.0)),
    "div power of two": lambda p, held: _returns(p.grad, lambda g: g.div_(4)),
    "div tensor": lambda p, held: _returns(p.grad, lambda g: g.div_(torch.tensor(2.7))),
    "*=": lambda p, held: _inplace(p, "*=", 0.6),
    "/=": lambda p, held: _inplace(p, "/=", 7),
    "foreach mul": lambda p, held: torch._foreach_mul_([p.grad], 0.37),
    "foreach mul tensor": lambda p, held: torch._foreach_mul_([p.grad], torch.tensor(0.61)),
    "foreach mul mixed": lambda p, held: torch._foreach_mul_([_own(p, 3.0), p.grad, p.grad], 0.5),
    "foreach div": lambda p, held: torch._foreach_div_([p.grad], 3.0),
    "foreach div tensor": lambda p, held: torch._foreach_div_([p.grad], _own(p, 1.7)),
    "unscale": lambda p, held: _unscaled(p, 0.3),
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
    "data of its own": lambda p, held: _set_data(p, p.grad),
}
"""What a handle records."""

READ: dict[str, Operation] = {
    "norm": lambda p, held: p.grad.norm(),
    "norm 3": lambda p, held: p.grad.norm(3),
    "norm of rows": lambda p, held: torch.linalg.vector_norm(p.grad, dim=0),
    "foreach norm": lambda p, held: torch._foreach_norm([p.grad, p.detach(), p.grad]),
    "foreach norm fp64": lambda p, held: torch._foreach_norm([p.grad], 2, torch.float64),
    "total norm": lambda p, held: get_total_norm([p.grad, p.detach()]),
    "largest": lambda p, held: p.grad.abs().max(),
    "is finite": lambda p, held: torch.isfinite(p.grad).all().item(),
    "sum": lambda p, held: p.grad.sum().item(),
    "clone": lambda p, held: p.grad.detach().clone(),
    "double": lambda p, held: p.grad * 2,
    "to": lambda p, held: (p.grad.to(torch.float32), p.grad.to(p.dtype) is p.grad),
    "add to another": lambda p, held: torch.zeros_like(p).add_(p.grad, alpha=0.5),
    "out": lambda p, held: torch.add(p.grad, 1, out=torch.empty_like(p, requires_grad=False)),
    "cat": lambda p, held: torch.cat([p.grad, p.grad]),
    "empty_like": lambda p, held: torch.empty_like(p.grad).stride(),
    "tolist": lambda p, held: p.grad.tolist(),
    "repr": lambda p, held: repr(p.grad),
    "format": lambda p, held: f"{p.grad}" if p.dim() else f"{p.grad:.3f} {float(p.grad)}",
    "deepcopy": lambda p, held: copy.deepcopy(p.grad),
    "deepcopy list": lambda p, held: copy.deepcopy([p.grad, p.grad]),
    "pickle": lambda p, held: pickle.loads(pickle.dumps([p.grad, p.grad])),
    "save": lambda p, held: through_disk({"gradients": [p.grad]}),
    "SGD": lambda p, held: _step(p, torch.optim.SGD),
    "AdamW": lambda p, held: _step(p, torch.optim.AdamW, foreach=False),
    "AdamW foreach": lambda p, held: _step(p, torch.optim.AdamW, foreach=True),
    "grads out of place": lambda p, held: torch.autograd.grad((p * 2).sum(), p),
    "shape": lambda p, held: (p.grad.shape, p.grad.stride(), p.grad.is_contiguous(), p.grad.numel(), p.grad.is_leaf),
}
"""What is computed from the gradient."""

WRITTEN: dict[str, Operation] = {
    "add": lambda p, held: _returns(p.grad, lambda g: g.add_(0.25)),
    "+=": lambda p, held: _inplace(p, "+=", p.detach() + 1),
    "-=": lambda p, held: _inplace(p, "-=", 0.125),
    "**=": lambda p, held: _inplace(p, "**=", 2),
    "+= in place of itself": lambda p, held: _inplace(p, "+=", p.grad),
    "mul itself": lambda p, held: _returns(p.grad, lambda g: g.mul_(g)),
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
    "flatten edit": lambda p, held: p.grad.flatten().add_(0.5),
    "unsafe view edit": lambda p, held: torch.ops.aten._unsafe_view(p.grad, [-1]).mul_(0.75),
    "unsafe split edit": lambda p, held: torch.unsafe_split(p.grad, 1)[0].zero_(),
    "numpy edit": lambda p, held: _edit_numpy(p),
    "masked fill": lambda p, held: _returns(p.grad, lambda g: g.masked_fill_(g > 1, 0.0)),
    "out is the gradient": lambda p, held: _returns(p.grad, lambda g: torch.mul(g, 0.5, out=g)),
    "lerp": lambda p, held: _returns(p.grad, lambda g: g.lerp_(p.detach(), 0.5)),
    "floor division": lambda p, held: _returns(p.grad, lambda g: g.div_(0.3, rounding_mode="floor")),
    "data add": lambda p, held: p.grad.data.add_(1) is not p.grad,
    "detach add": lambda p, held: p.grad.detach().data.detach().add_(1) is not p.grad,
    "nan to num": lambda p, held: _returns(p.grad, torch.nan_to_num_),
    "accumulate": lambda p, held: _accumulate(p),
    "accumulate twice": lambda p, held: (_accumulate(p), _accumulate(p)),
    "AdamW fused": lambda p, held: _step(p, torch.optim.AdamW, fused=True),
}
"""What gives the gradient back."""

REPLACED: dict[str, Operation] = {
    "start again": lambda p, held: _start_again(p),
    "set to none": lambda p, held: (_replace(p, None), _accumulate(p)),
    "set product": lambda p, held: _replace(p, p.grad * 2),
    "set alias": lambda p, held: _replace(p, p.grad.detach()),
    "set data": lambda p, held: _set_data(p, torch.full_like(p, 0.5).detach()),
    "set data to an alias": lambda p, held: _set_data(p, p.grad.detach()),
    "set itself": lambda p, held: _replace(p, p.grad),
}
"""What puts something else into `.grad`."""

HELD: dict[str, Operation] = {
    "hold": lambda p, held: held.append(p.grad),
    "hold detached": lambda p, held: held.append(p.grad.detach()),
    "hold data": lambda p, held: held.append(p.grad.data),
    "hold view": lambda p, held: held.append(p.grad.view(-1)),
    "hold copy": lambda p, held: held.append(copy.copy(p.grad)),
    "edit held": lambda p, held: held and held[0].add_(0.5).dtype,
    "scale held": lambda p, held: held and held[-1].mul_(0.7).dtype,
    "set held": lambda p, held: held and held[0].shape == p.shape and _replace(p, held[0]),
    "let go": lambda p, held: held.clear(),
}
"""What other references see."""

OPERATIONS = {**RECORDED, **READ, **WRITTEN, **REPLACED, **HELD}
ELSEWHERE = ["here", "other strides"]
Values = Callable[[int], Tensor]
"""Returns as many values."""


def run(operations: list[str], dtype: torch.dtype, shape: tuple[int, ...], place: str, values: Values) -> None:
    """Do the same to a taken and to an ordinary gradient."""
    start = values(int(np.prod(shape))).view(shape).to(dtype)
    ours, owner, taken = handle_for(start)
    theirs = nn.Parameter(torch.zeros_like(start))
    theirs.grad = start.clone()
    if place == "other strides":
        move_elsewhere(taken)
    arrived = taken.pending.clone()
    pending = taken.pending
    del taken
    ours.register_post_accumulate_grad_hook(lambda parameter: take_gradient(parameter, owner) and None)
    held_ours, held_theirs = list[Any](), list[Any]()
    for name in operations:
        results = []
        for parameter, held in ((ours, held_ours), (theirs, held_theirs)):
            torch.manual_seed(0)
            try:
                results.append(bits(OPERATIONS[name](parameter, held)))
            except RuntimeError as error:
                results.append(str(error))
        assert results[0] == results[1], name
        assert bits(ours.grad) == bits(theirs.grad), name
        assert ours.grad is not None
        assert theirs.grad is not None
        assert ours.grad.stride() == theirs.grad.stride(), name
        assert bits(held_ours) == bits(held_theirs), name
    assert bits(pending) == bits(arrived)
    assert bits(ours) == bits(theirs)


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
    shape=st.sampled_from([(5, 7), (33,), (2, 3, 4), ()]),
    place=st.sampled_from(ELSEWHERE),
    values=st.sampled_from([irregular, with_infinity]),
)
def test_any_sequence_is_as_on_an_ordinary_gradient(
    operations: list[str], dtype: torch.dtype, shape: tuple[int, ...], place: str, values: Values
) -> None:
    run(operations, dtype, shape, place, values)


@pytest.mark.parametrize("name", OPERATIONS)
def test_each_operation_is_as_on_an_ordinary_gradient(name: str) -> None:
    for dtype in DTYPES:
        run([name], dtype, (5, 7), "other strides", irregular)
    run(["div", name, "norm"], torch.bfloat16, (5, 7), "here", irregular)
    run(["hold", name, "hold detached", "add", "norm"], torch.float32, (9,), "here", irregular)


# -- training loops ----------------------------------------------------------------------------------------------------

Clip = Callable[[nn.Module], Any]
CLIPS: dict[str, Clip] = {
    "none": lambda m: None,
    "norm": lambda m: clip_grad_norm_(m.parameters(), 0.5),
    "norm for each": lambda m: clip_grad_norm_(m.parameters(), 0.5, foreach=False),
    "norm in lists": lambda m: clip_grad_norm_(m.parameters(), 0.5, foreach=True),
    "norm and error": lambda m: clip_grad_norm_(m.parameters(), 0.5, error_if_nonfinite=True),
    "largest": lambda m: clip_grad_norm_(m.parameters(), 0.5, norm_type=float("inf")),
    "value": lambda m: clip_grad_value_(m.parameters(), 0.01),
    "in two parts": lambda m: clip_grads_with_norm_(
        m.parameters(), 0.5, get_total_norm([p.grad for p in m.parameters() if p.grad is not None])
    ),
    "flat norm": lambda m: torch.cat([p.grad.flatten() for p in m.parameters() if p.grad is not None]).norm(),
}
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.1),
    "AdamW foreach": lambda parameters: torch.optim.AdamW(parameters, lr=0.1, foreach=True),
    "AdamW fused": lambda parameters: torch.optim.AdamW(parameters, lr=0.1, fused=True),
}


@pytest.mark.parametrize("clip", CLIPS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_torch_optimizers_step_on_handles(optimizer: str, clip: str) -> None:
    both = pair(with_gradients=False)
    optimizers = [OPTIMIZERS[optimizer](module.parameters()) for module in both]
    for step in range(3):
        norms = []
        for module, each in zip(both, optimizers, strict=True):
            backward(module, step + 1)
            backward(module, step - 1)
            norms.append(bits(CLIPS[clip](module)))
            each.step()
        assert norms[0] == norms[1]
        both.check()
        for each in optimizers:
            each.zero_grad(set_to_none=step == 0)
    assert both.takes.count == 24


@pytest.mark.parametrize("count", [None, 0, 2])
def test_finite_check_takes_the_count_of_the_keeper(count: int | None) -> None:
    keeper = NotingHolder(count)
    parameter, _owner, taken = handle_for(torch.tensor([1.0, float("nan")]), keeper)
    found = torch.zeros(())
    torch._amp_foreach_non_finite_check_and_unscale_([parameter.grad], found, torch.tensor(0.5))
    assert found.item() == (count != 0)
    assert taken.unscale_factor() == taken.scale() == 0.5
    torch._amp_foreach_non_finite_check_and_unscale_([parameter.grad], found.zero_(), torch.tensor(0.25))
    assert found.item() == 1  # counted after the first product, whatever arrived
    assert taken.unscale_factor() == 0.125


def test_clipping_does_not_give_back_and_asks_for_norms() -> None:
    both = pair(with_gradients=False)
    keeper = both.takes.holder = NotingHolder()
    for module in both:
        backward(module)
        clip_grad_norm_(module.parameters(), 0.5)
    assert len(keeper.norms) == both.handles() == 4
    assert keeper.given == []
    scales = {taken.scale() for taken in keeper.norms}
    assert len(scales) == 1
    assert 0 < scales.pop() < 1  # type: ignore[operator]
    both.check()


def test_norm_that_was_taken_before_is_used_and_kept_apart() -> None:
    parameter, _owner, taken = handle_for(torch.tensor([3.0, 4.0]))
    taken.norm = torch.tensor(6.0)  # wrong, to be seen
    first, other = torch._foreach_norm([parameter.grad, torch.tensor([1.0])])
    assert (first.item(), other.item()) == (6.0, 1.0)
    (second,) = torch._foreach_norm([parameter.grad])
    second.zero_()
    (third,) = torch._foreach_norm([parameter.grad])
    assert (first.item(), third.item()) == (6.0, 6.0)
    first.zero_()
    assert torch._foreach_norm([parameter.grad])[0].item() == 6.0
    assert torch._foreach_norm([parameter.grad], 1)[0].item() == 7.0
    assert torch.linalg.vector_norm(parameter.grad).item() == 5.0  # may be another kernel
    assert parameter.grad is not None
    parameter.grad.mul_(2)
    assert torch._foreach_norm([parameter.grad])[0].item() == 10.0


# -- what is taken -----------------------------------------------------------------------------------------------------


def _with_gradient(gradient: Tensor) -> nn.Parameter:
    parameter = nn.Parameter(torch.zeros(gradient.shape, dtype=gradient.dtype))
    parameter.grad = gradient
    return parameter


def test_gradient_is_taken_in_later_calls_too() -> None:
    module = model()
    backward(module)
    for parameter in module.parameters():
        assert is_exclusive(parameter)
        assert (lambda it: (lambda it: take_gradient(it))(it))(parameter) is not None
        assert taken_of(parameter.grad) is not None


HOLDERS: dict[str, Callable[[Any], object]] = {
    "reference": lambda p: p.grad,
    "alias": lambda p: p.grad.detach(),
    "view": lambda p: p.grad[0],
    "array": lambda p: p.grad.numpy(),
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
    assert is_exclusive(parameter)
    assert take_gradient(parameter) is not None


def test_slices_of_one_buffer_are_not_taken() -> None:
    both = pair(with_gradients=False)
    buffers = []
    for module in both:
        buffer = torch.zeros(sum(parameter.numel() for parameter in module.parameters()))
        start = 0
        for parameter in module.parameters():
            parameter.grad = buffer[start : start + parameter.numel()].view_as(parameter)
            start += parameter.numel()
        buffers.append(buffer)
        backward(module)
        buffer.mul_(0.5)
    both.check()
    assert both.takes.count == 0
    assert torch.equal(*buffers)


UNFIT: dict[str, Callable[[], Tensor]] = {
    "sparse": lambda: torch.eye(3).to_sparse(),
    "with graph": lambda: torch.ones(3, requires_grad=True) * 1,
    "that requires grad": lambda: torch.ones(3, requires_grad=True),
    "of a subclass": lambda: nn.Parameter(torch.ones(3)),
    "of inference mode": lambda: torch.inference_mode()(torch.ones)(3),
    "expanded": lambda: torch.ones(1).expand(3).detach(),
    "negated lazily": lambda: torch.zeros(3, dtype=torch.complex64).conj().imag,
}


@pytest.mark.parametrize("kind", UNFIT)
def test_unfit_gradient_is_not_taken(kind: str) -> None:
    gradient = UNFIT[kind]()
    parameter = nn.Parameter(torch.zeros(gradient.shape))
    parameter.grad = gradient
    del gradient
    before = type(parameter.grad)
    assert take_gradient(parameter) is None
    assert type(parameter.grad) is before


def test_nothing_to_take() -> None:
    parameter = nn.Parameter(torch.zeros(3))
    assert take_gradient(parameter) is None
    assert parameter.grad is None
    parameter.grad = torch.ones(3)
    taken = take_gradient(parameter)
    handle = parameter.grad
    assert take_gradient(parameter) is None
    assert parameter.grad is handle
    assert taken_of(handle) is taken
    assert taken_of(None) is None
    assert taken_of(torch.ones(3)) is taken_of(parameter) is None


def test_gradient_that_no_longer_fits_the_parameter_stays() -> None:
    parameter = _with_gradient(torch.ones(3))
    parameter.data = torch.zeros(4)
    assert take_gradient(parameter) is None
    assert bits(parameter.grad) == bits(torch.ones(3))


def test_layouts_are_kept() -> None:
    for gradient in (
        torch.arange(24.0).view(2, 3, 2, 2).to(memory_format=torch.channels_last),
        torch.arange(6.0).view(2, 3).t(),
        torch.tensor(2.0),
        torch.empty(0, 3),
    ):
        parameter, _owner, taken = handle_for(gradient)
        assert parameter.grad is not None
        assert (parameter.grad.stride(), taken.strides) == (gradient.stride(), gradient.stride())
        assert bits(parameter.grad) == bits(gradient)
        move_elsewhere(taken)
        assert bits(parameter.grad) == bits(gradient)
        parameter.grad.add_(1)
        assert parameter.grad.stride() == gradient.stride()
        assert bits(parameter.grad) == bits(gradient + 1)


def test_gradient_of_another_dtype_than_the_parameter() -> None:
    parameter = nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))
    parameter.grad_dtype = torch.float32  # type: ignore[attr-defined]
    owner = Owner(parameter)
    parameter.grad = torch.tensor([1.0, 1.0 + 2**-20, 2.0])
    taken = take_gradient(parameter, owner)
    assert taken is not None
    assert taken.dtype == torch.float32
    parameter.grad.add_(0)
    assert bits(parameter.grad) == bits(torch.tensor([1.0, 1.0 + 2**-20, 2.0]))
    assert type(parameter.grad) is Tensor


# -- giving back -------------------------------------------------------------------------------------------------------


def test_handles_held_elsewhere_forward_to_the_gradient() -> None:
    parameter, _owner, taken = handle_for(torch.tensor([1.0, 2.0]))
    gradient: Any = parameter.grad
    alias = gradient.detach()
    assert type(alias) is GradientHandle
    alias.mul_(2)
    assert gradient.tolist() == [2.0, 4.0]
    gradient.add_(1)
    real: Any = parameter.grad
    assert type(real) is Tensor
    assert taken.given is real
    for held in (gradient, alias):
        assert taken_of(held) is None
        assert held.tolist() == [3.0, 5.0]
        assert held.data_ptr() == real.data_ptr() == held.untyped_storage().data_ptr()
        held.mul_(2)
        assert real.tolist() == [6.0, 10.0]
        real.div_(2)
        assert torch.equal(held, real)
        assert held.data.data_ptr() == real.data_ptr()
        assert torch._foreach_norm([held, real])[0].item() == pytest.approx(34**0.5)
        assert held.numpy().tolist() == [3.0, 5.0]


def test_lists_may_mix_everything() -> None:
    gradients = [torch.tensor([1.0, 2.0]) * (1 + place) for place in range(4)]
    fresh, _owner, _taken = handle_for(gradients[0])
    owners = [handle_for(gradient) for gradient in gradients[1:3]]
    tensors: list[Any] = [fresh.grad, owners[0][0].grad, owners[1][0].grad, gradients[3].clone()]
    tensors[1].add_(0)
    tensors[2].data.add_(0)
    for operation in (
        lambda: torch._foreach_mul_(tensors, 0.3),
        lambda: torch._foreach_mul_(tensors, torch.tensor(0.7)),
        lambda: torch._foreach_div_(tensors, 3.0),
        lambda: torch._amp_foreach_non_finite_check_and_unscale_(tensors, torch.zeros(()), torch.tensor(0.9)),
    ):
        operation()
    for gradient in gradients:
        gradient.mul_(0.3).mul_(torch.tensor(0.7)).div_(3.0).mul_(torch.tensor(0.9))
    assert bits(tensors) == bits(gradients)
    assert bits(torch._foreach_norm(tensors)) == bits(torch._foreach_norm(gradients))
    assert taken_of(fresh.grad) is not None


def test_old_references_do_not_show_the_next_gradient() -> None:
    both = pair()
    held = [[(p.grad, p.grad.detach()) for p in module.parameters() if p.grad is not None] for module in both]
    graphs = [(weight(module) * weight(module).grad).sum() for module in both]
    for module in both:
        module.zero_grad()
        backward(module, 0.5)
    assert both.handles() == 4
    assert bits(held[0]) == bits(held[1])
    for graph, module in zip(graphs, both, strict=True):
        module.zero_grad()
        graph.backward()
    both.check()


def test_versions_do_not_run_backwards() -> None:
    both = pair()
    versions: list[list[int]] = [[], []]
    for module, seen in zip(both, versions, strict=True):
        parameter = weight(module)
        for change in (
            lambda g: g.mul_(2),
            lambda g: g.add_(1),
            lambda g: g.mul_(2),
            lambda g: g.numpy(),
            lambda g: g.div_(2),
        ):
            change(parameter.grad)
            seen.append(parameter.grad._version)
        backward(module)
        seen.append(parameter.grad._version)
        backward(module)
        seen.append(parameter.grad._version)
    assert all((b > a) is (d > c) for (a, b), (c, d) in zip(*map(itertools.pairwise, versions), strict=True)), versions
    assert all(ours >= theirs for ours, theirs in zip(*versions, strict=True)), versions


def test_edit_of_a_gradient_that_a_graph_saved_is_an_error_as_in_torch() -> None:
    for module in pair():
        parameter = weight(module)
        graph = (parameter * parameter.grad).sum()
        parameter.grad.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            graph.backward()


def test_gradient_is_given_back_within_inference_mode() -> None:
    both = pair()
    for module in both:
        gradient = weight(module).grad
        with torch.inference_mode():
            gradient.mul_(0.5)
            (gradient * 2).sum().item()
            gradient.add_(0.5)
        weight(module).grad.add_(1)
    both.check()


def test_requires_grad_gives_back() -> None:
    results = []
    for module in pair():
        gradient = weight(module).grad
        gradient.requires_grad_(True)
        assert weight(module).grad.requires_grad
        assert gradient.requires_grad
        results.append(torch.autograd.grad((weight(module).grad ** 2).sum(), weight(module).grad)[0])
        results.append(torch.autograd.grad((gradient**2).sum(), gradient)[0])
    assert bits(results[:2]) == bits(results[2:])
    for module in pair():
        weight(module).grad.requires_grad = True
        assert weight(module).grad.requires_grad
        weight(module).grad.requires_grad = False
        assert type(weight(module).grad) is Tensor


def test_handle_in_the_grad_of_another_parameter() -> None:
    results = []
    for module in pair():
        other = nn.Parameter(torch.zeros(8, 6))
        other.grad = weight(module).grad
        other.grad.mul_(0.3)
        other.grad.add_(2)
        other.grad.add_(1)
        weight(module).grad.add_(1)
        results.append(bits([other.grad, weight(module).grad]))
    assert results[0] == results[1]


def test_setter_of_grad_checks_as_in_torch() -> None:
    for shape, dtype in (((8, 5), torch.float32), ((8, 6), torch.float64)):
        messages = []
        for module in pair():
            with pytest.raises(RuntimeError) as caught:
                nn.Parameter(torch.zeros(shape, dtype=dtype)).grad = weight(module).grad
            messages.append(str(caught.value))
        assert messages[0] == messages[1]


def test_gradient_outlives_owner_and_keeper() -> None:
    both = pair()
    del both.takes
    gc.collect()
    gradients = []
    for module in both:
        weight(module).grad.mul_(0.3)
        weight(module).grad.add_(1)
        backward(module)
        gradients.append(bits([p.grad for p in module.parameters()]))
    assert gradients[0] == gradients[1]


def test_data_of_an_alias_is_its_own() -> None:
    results = []
    for module in pair():
        alias = weight(module).grad.detach()
        alias.data = torch.ones(8, 6)
        alias.add_(1)
        weight(module).grad.mul_(0.5)
        results.append(bits([alias, weight(module).grad]))
    assert results[0] == results[1]


def test_aliases_keep_the_memory_that_data_replaces() -> None:
    results = []
    for module in pair():
        parameter = weight(module)
        same, alias, kept = parameter.grad, parameter.grad.detach(), parameter.grad.data
        parameter.grad.add_(1)
        parameter.grad.data = torch.ones(8, 6)
        alias.mul_(2)
        results.append(bits([same, alias, kept, parameter.grad]))
    assert results[0] == results[1]


def test_operands_are_only_read() -> None:
    both = pair()
    for module in both:
        bias, last = module.get_parameter("0.bias"), module.get_parameter("2.weight")
        assert bias.grad is not None
        assert last.grad is not None
        bias.grad.add_(last.grad.sum(0))
        torch._foreach_mul_([bias.grad], [last.grad.sum(0)])
        torch._foreach_addcmul_([bias.grad], [bias.grad], [module.get_parameter("0.bias").grad], 2.0)
        weight(module).grad.mul_(last.grad.norm())
    both.check()
    assert both.handles() == 3


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
    both = pair()
    for module in both:
        weight(module).grad.mul_(0.3)
    torch.__future__.set_swap_module_params_on_conversion(swap)
    try:
        for module in both:
            CONVERSIONS[conversion](module)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    if conversion in ("meta", "empty"):
        assert all(parameter.grad is None or parameter.grad.is_meta for parameter in both.taking.parameters())
        return
    both.check()
    assert both.handles() == (4 if conversion.startswith(("no change", "layout")) else 0)
    for module in both:
        backward(module)
    both.check()


@pytest.mark.parametrize("swap", [False, True])
def test_gradient_moves_with_a_swapped_parameter(swap: bool) -> None:
    results = []
    for module in pair():
        parameter, other = weight(module), nn.Parameter(torch.ones(8, 6))
        if swap:
            torch.utils.swap_tensors(parameter, other)
        else:
            other.grad, parameter.grad = parameter.grad, None
        assert parameter.grad is None
        other.grad.mul_(0.3)  # type: ignore[union-attr]
        other.grad.add_(1)  # type: ignore[union-attr]
        other.grad.add_(1)  # type: ignore[union-attr]
        results.append(bits(other.grad))
    assert results[0] == results[1]


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
def test_memory_is_the_gradient_itself() -> None:
    for use in (
        lambda g: g.data_ptr(),
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
        assert parameter.grad is not None
        assert address == parameter.grad.data_ptr() != 0
        assert address == parameter.grad.data_ptr() == handle.data_ptr()
        assert parameter.grad.tolist() == [1.0, 2.0]


def test_functions_of_python_write_to_the_gradient() -> None:
    other = torch.tensor([3.0, 4.0])
    for use in (
        lambda g: g.apply_(lambda a: a + 1),
        lambda g: g.map_(other, lambda a, b: a + b),
        lambda g: g.map2_(other, other, lambda a, b, c: a + b + c),
    ):
        parameter, _owner, _taken = handle_for(torch.tensor([1.0, 2.0]))
        handle: Any = parameter.grad
        expected = use(torch.tensor([1.0, 2.0]))
        assert bits(use(handle)) == bits(parameter.grad) == bits(handle) == bits(expected)


def test_processes_share_the_gradient_itself() -> None:
    parameter, _owner, _taken = handle_for(torch.tensor([1.0, 2.0]))
    received = pickle.loads(ForkingPickler.dumps(parameter.grad))
    assert type(received) is Tensor
    received.add_(1)
    assert parameter.grad is not None
    assert parameter.grad.tolist() == [2.0, 3.0]


def test_dlpack_of_other_tensors_is_that_of_torch() -> None:
    tensor = torch.tensor([1.0, 2.0])
    assert torch.from_dlpack(torch.utils.dlpack.to_dlpack(tensor)).data_ptr() == tensor.data_ptr()
    with pytest.raises(TypeError):
        torch.utils.dlpack.to_dlpack([1.0, 2.0])


def test_code_in_cpp_that_wants_memory_gets_an_error() -> None:
    parameter, _owner, _taken = handle_for(torch.tensor([1.0, 2.0]))
    with pytest.raises(RuntimeError, match=r"data pointer|storage"):
        torch.Tensor.data_ptr(parameter.grad)  # type: ignore[arg-type]
    assert taken_of(parameter.grad) is not None


def test_storage_gives_back_unless_a_compiler_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    parameter, _owner, _taken = handle_for(torch.tensor([1.0, 2.0]))
    gradient: Any = parameter.grad
    with torch._guards.tracing(torch._guards.TracingContext(None)):
        gradient.untyped_storage()
        assert taken_of(gradient) is not None
    with monkeypatch.context() as patch:
        collecting = SimpleNamespace(compiled_autograd_enabled=True)
        patch.setitem(sys.modules, "torch._dynamo.compiled_autograd", collecting)
        gradient.untyped_storage()
        assert taken_of(gradient) is not None
    gradient.untyped_storage()
    assert taken_of(gradient) is None


def test_copies_are_plain_and_apart() -> None:
    both = pair()
    for module in both:
        weight(module).grad.mul_(0.3)
    gradient = weight(both.taking).grad
    for duplicate in (
        copy.deepcopy(gradient),
        pickle.loads(pickle.dumps(gradient)),
        through_disk([gradient])[0],
        copy.deepcopy(both.taking)[0].weight.grad,
    ):
        if duplicate is None:  # torch does not copy the gradients of parameters
            continue
        assert type(duplicate) is Tensor
        assert bits(duplicate) == bits(gradient)
        duplicate.add_(1)
    assert taken_of(gradient) is not None
    both.check()
    shallow = copy.copy(gradient)
    assert type(shallow) is Tensor
    shallow.add_(1)
    assert bits(shallow) == bits(weight(both.taking).grad)


def test_hash_and_equality_are_those_of_tensors() -> None:
    parameter, _owner, _taken = handle_for(torch.tensor([1.0, 2.0]))
    gradient: Any = parameter.grad
    assert hash(gradient) == id(gradient)
    assert {gradient: 1}[gradient] == 1
    assert (gradient == torch.tensor([1.0, 3.0])).tolist() == [True, False]
    assert (gradient != gradient).tolist() == [False, False]
    assert taken_of(gradient) is not None


NOT_RECORDED: dict[str, Callable[[Any], Any]] = {
    "complex": lambda g: g.mul_(1j),
    "gradient": lambda g: g.mul_(g.norm().requires_grad_()),
    "itself": lambda g: g.mul_(g),
    "element": lambda g: g.mul_(torch.ones(1)),
    "inverse of another dtype": lambda g: torch._amp_foreach_non_finite_check_and_unscale_(
        [g], torch.zeros(()), torch.tensor(1.0, dtype=torch.float64)
    ),
}


@pytest.mark.parametrize("kind", NOT_RECORDED)
def test_only_products_with_plain_scalars_are_recorded(kind: str) -> None:
    results: list[Any] = []
    for module in pair():
        gradient = weight(module).grad
        try:
            NOT_RECORDED[kind](gradient)
            results.append(bits(weight(module).grad))
        except RuntimeError as error:
            results.append(str(error).split("\n")[0])
        assert type(weight(module).grad) is Tensor
    assert results[0] == results[1]


def test_product_with_another_handle_is_not_recorded() -> None:
    parameter, _owner, _taken = handle_for(torch.tensor([1.0, 2.0]))
    scalar, _other, _record = handle_for(torch.tensor(3.0))
    assert parameter.grad is not None
    parameter.grad.mul_(scalar.grad)  # type: ignore[arg-type]
    assert parameter.grad.tolist() == [3.0, 6.0]
    assert type(parameter.grad) is Tensor
    assert taken_of(scalar.grad) is not None


def test_sparse_gradient_after_a_dense_one() -> None:
    results = []
    for takes in (True, False):
        torch.manual_seed(0)
        embedding = nn.Embedding(10, 4, sparse=True)
        hooks = Taking(embedding) if takes else None
        embedding.weight.sum().backward()
        embedding(torch.tensor([1, 1, 3])).pow(2).sum().backward()
        results.append(bits(embedding.weight.grad))
        assert hooks is None or hooks.count > 0
    assert results[0] == results[1]


def test_hooks_of_others_may_edit_after_the_gradient_was_taken() -> None:
    def edit(parameter: Any) -> None:
        parameter.grad.clamp_(-0.1, 0.1)

    both = pair(with_gradients=False)
    for module in both:
        for parameter in module.parameters():
            parameter.register_post_accumulate_grad_hook(edit)  # type: ignore[attr-defined]
    for turn in range(3):
        for module in both:
            backward(module, turn)
        both.check()
    assert both.takes.count == 12


def test_hooks_of_others_may_keep_the_gradient_before_it_is_taken() -> None:
    kept: list[list[Any]] = [[], []]
    modules = [model(), model()]
    for module, list_of in zip(modules, kept, strict=True):
        for parameter in module.parameters():
            hook = (lambda to: lambda p: to.append(p.grad))(list_of)
            parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[attr-defined]
    both = Pair(modules[0], modules[1], Taking(modules[0]))
    for module, list_of in zip(both, kept, strict=True):
        backward(module)
        torch._foreach_mul_(list_of, 0.5)
    assert both.takes.count == 0
    both.check()


def test_transforms_and_modes() -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return operation(*args, **(kwargs or {}))

    both = pair()
    results = []
    for module in both:
        gradient = weight(module).grad
        results.append(bits(torch.vmap(lambda row: row.sum())(gradient.detach().clone())))
        results.append(bits(torch.func.grad(lambda t, g=gradient: (t * g).sum())(torch.ones(8, 6))))
        with Mode():
            clip_grad_norm_(module.parameters(), 0.5)
    assert results[:2] == results[2:]
    both.check()
    assert both.handles() == 4


def test_reads_from_many_threads() -> None:
    both = pair()
    results: list[Any] = []

    def read() -> None:
        results.extend(bits([p.grad.norm() for p in both.taking.parameters() if p.grad is not None]) for _ in range(20))

    threads = [threading.Thread(target=read) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    expected = bits([p.grad.norm() for p in both.plain.parameters() if p.grad is not None])
    assert results == [expected] * 80


def test_nothing_is_kept_alive() -> None:
    both = pair()
    gradient: Any = weight(both.taking).grad
    gradient.detach()
    parameters = [weakref.ref(parameter) for parameter in both.taking.parameters()]
    taken = gradient.taken
    record, pending, handle = weakref.ref(taken), weakref.ref(taken.pending), weakref.ref(gradient)
    del both, gradient, taken
    gc.collect()
    assert [reference() for reference in [*parameters, record, pending, handle]] == [None] * 7


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


def test_tensors_do_not_grow_in_number() -> None:
    module = model()
    takes = Taking(module)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    counts = []
    gc.collect()
    gc.disable()
    try:
        for _ in range(8):
            backward(module)
            clip_grad_norm_(module.parameters(), 0.5)
            weight(module).grad.add_(1)
            optimizer.step()
            optimizer.zero_grad()
            counts.append(sum(issubclass(type(it), Tensor) for it in gc.get_objects()) if len(counts) > 1 else 0)
    finally:
        gc.enable()
    assert counts[-1] == counts[2]
    assert takes.count == 32


# -- sums of micro-batches ---------------------------------------------------------------------------------------------


def _sum_of(first: Tensor) -> tuple[nn.Parameter, Owner, TakenGradient]:
    parameter, owner, taken = handle_for(first)
    taken.pending = taken.pending.to(torch.float32)
    taken.is_unrounded = True
    parameter.register_post_accumulate_grad_hook(lambda p: take_gradient(p, owner) and None)
    return parameter, owner, taken


def test_sum_absorbs_what_autograd_adds() -> None:
    batches = [(torch.arange(1, 9) * factor).to(torch.bfloat16) for factor in (1.0, 1 / 3, 1e-3)]
    parameter, _owner, taken = _sum_of(batches[0])
    handle = parameter.grad
    for batch in batches[1:]:
        (parameter * batch).sum().backward()
    assert parameter.grad is handle
    assert taken_of(handle) is taken
    expected = batches[0].float() + batches[1].float() + batches[2].float()
    assert bits(taken.pending) == bits(expected) == bits(taken.scaled())
    assert bits(handle) == bits(expected.to(torch.bfloat16))
    assert taken.version == 2
    parameter.grad += torch.ones(8, dtype=torch.bfloat16)
    assert parameter.grad is handle
    assert taken.version == 3
    expected = expected.add_(1).mul_(0.3)
    before = taken.pending.clone()
    taken.in_use, read = True, taken.pending
    parameter.grad.mul_(0.3).add_(batches[0])
    assert bits(taken.pending) == bits(expected + batches[0].float())
    assert bits(read) == bits(before)
    assert not taken.factors


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
    taken.is_unrounded = True
    assert parameter.grad is not None
    assert parameter.grad.isinf().all()
    found = torch.zeros(())
    torch._amp_foreach_non_finite_check_and_unscale_([parameter.grad], found, torch.tensor(0.5))
    assert found.item() == 0
    parameter.grad.mul_(0.1)
    assert torch.equal(taken.exact(), torch.tensor([7e4]).mul_(0.5).mul_(0.1))
    assert torch.equal(parameter.grad, taken.exact().half())


@pytest.mark.parametrize("is_list", [False, True])
def test_what_arrived_unrounded_stays_so_when_it_is_zeroed(is_list: bool) -> None:
    first = torch.tensor([1.0, 3.0], dtype=torch.bfloat16)
    parameter, _owner, taken = _sum_of(first)
    taken.is_reduced = taken.in_use = True
    read, version = taken.pending, taken.version
    other, _other_owner, ordinary = handle_for(first)
    parameter.grad.mul_(3)
    if is_list:
        torch._foreach_zero_([parameter.grad, other.grad])
    else:
        parameter.grad.zero_()
        other.grad.zero_()
    assert ordinary.is_given
    assert other.grad.tolist() == parameter.grad.tolist() == [0.0, 0.0]
    assert taken_of(parameter.grad) is taken
    assert read.tolist() == [1.0, 3.0]
    assert taken.version > version
    assert not taken.in_use
    parameter.grad.add_(first)
    assert taken.pending.tolist() == [1.0, 3.0]


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
        assert gradient is not None
        assert torch.equal(torch.linalg.vector_norm(gradient, order), norm)
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
