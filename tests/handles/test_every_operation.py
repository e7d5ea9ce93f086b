"""Each operation that torch's own tests know: on the handle in `.grad` it has the bits that it has on the gradient."""

import copy
import functools
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from support import visible
from support.deep import DEEP
from torch import Tensor, nn
from torch.testing._internal.common_methods_invocations import op_db

from superadam import SpeculativeCPUAdamW
from superadam.handles.gradient_handle import GradientHandle

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900), pytest.mark.usefixtures("one_torch_thread")]

ONE_OF = 1 if DEEP else 12
SAMPLES = 12
MOST_ELEMENTS = 5000

UNDEFINED = {"empty_like", "new_empty", "new_empty_strided"}
"""Their values are whatever the memory held."""

BY_ANOTHER_ROUTINE = {"linalg.svdvals", "linalg.eigvalsh", "linalg.cond"}
"""For any subclass torch lets LAPACK compute vectors as well, and so other last bits; `docs/guarantees.md` says so."""

VARYING = {"linalg.lstsq", "linalg.lstsq.grad_oriented"}
"""Last bits of some solutions depend on where memory lies."""


def seen(value: Any) -> Any:
    """Return what must be equal: bits, strides and whether autograd tracks it."""
    if isinstance(value, Tensor) and value.layout is torch.strided and not value.is_quantized:
        return visible.bits(value.detach().resolve_conj().resolve_neg()), value.stride(), value.requires_grad
    if isinstance(value, Tensor):
        return visible.bits(value.to_dense()), value.layout
    if isinstance(value, list | tuple):
        return [seen(item) for item in value]
    if isinstance(value, dict):
        return {key: seen(item) for key, item in value.items()}
    return repr(value)


def has_memory_of_its_own(value: Any, dtype: torch.dtype) -> bool:
    """Whether this can be a gradient: each element in memory of its own."""
    return (
        isinstance(value, Tensor)
        and value.dtype == dtype
        and value.layout is torch.strided
        and value.numel() <= MOST_ELEMENTS
        and all(stride or size <= 1 for size, stride in zip(value.shape, value.stride(), strict=True))
    )


def observed(gradient: Tensor, call: Callable[[Tensor], Any], *, is_taken: bool) -> Iterator[Any]:
    """Call an operation with a copy of a tensor as the gradient, or its handle; yield what is seen then, and later."""
    parameter: Any = nn.Parameter(torch.zeros_like(gradient))
    parameter.grad = gradient.detach().clone()
    optimizer = SpeculativeCPUAdamW([parameter], lr=1e-3)
    if is_taken:
        optimizer.speculate()
        assert type(parameter.grad) is GradientHandle
    given = parameter.grad
    result, others = outcome_of(lambda: call(given))
    yield "result", seen(result), result is given, seen(others)
    yield "gradient", seen(parameter.grad)
    if isinstance(result, Tensor) and result.layout is torch.strided:
        yield "write to the result", seen(outcome_of(lambda: (result.detach().mul_(2), None)))
        yield "gradient after the write", seen(parameter.grad)
    yield "step", seen(outcome_of(lambda: (optimizer.step(), None))), seen(parameter)


def outcome_of(call: Callable[[], tuple[Any, Any]]) -> tuple[Any, Any]:
    """Return what a call returns, from the same random numbers each time, or which error it raises."""
    torch.default_generator.manual_seed(0)  # the others keep the stack of each call
    random.seed(0)
    np.random.seed(0)
    try:
        return call()
    except Exception as error:
        return type(error), None


def call_with(
    function: Callable[..., Any], arguments: list[Any], named: dict[str, Any], place: int, gradient: Tensor
) -> tuple[Any, list[Any]]:
    """Return what a function returns for a gradient at a place among copies of other arguments, and those."""
    others, named = copy.deepcopy((arguments, named))
    others[place] = gradient
    return function(*others, **named), others[:place] + others[place + 1 :]


def calls(operation: Any, dtype: torch.dtype) -> Iterator[tuple[str, Tensor, Callable[[Tensor], Any]]]:
    """Yield ways to call an operation: what is called, and its argument that is to be the gradient."""
    for sample in list(operation.sample_inputs("cpu", dtype))[:SAMPLES]:
        for place, argument in enumerate([sample.input, *sample.args]):
            if not has_memory_of_its_own(argument, dtype):
                continue
            for name in ("op", "method_variant", "inplace_variant"):
                function = getattr(operation, name)

                if function is not None:
                    call = functools.partial(call_with, function, [sample.input, *sample.args], sample.kwargs, place)
                    yield f"{operation.name} {operation.variant_test_name} {name} {place}", argument, call


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.filterwarnings("ignore")
def test_operation_has_the_bits_that_it_has_on_the_gradient(dtype: torch.dtype) -> None:
    found, tried = [], 0
    for operation in op_db[::ONE_OF]:
        if dtype not in operation.dtypes or operation.name in UNDEFINED | BY_ANOTHER_ROUTINE | VARYING:
            continue
        for name, gradient, call in calls(operation, dtype):
            ours, theirs = (observed(gradient, call, is_taken=is_taken) for is_taken in (True, False))
            tried += 1
            found += [f"{name}: {mine[0]}" for mine, other in zip(ours, theirs, strict=True) if mine != other][:1]
    assert not found
    assert tried > 200
