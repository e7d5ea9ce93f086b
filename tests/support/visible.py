"""What a user can see of an optimizer, as bits: to show that something changed nothing, or that two runs are one."""

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import Optimizer

from superadam.handles.gradient_handle import taken_of

Bits = tuple[str, tuple[int, ...], bytes]


def bits(tensor: Tensor) -> Bits:
    """Return dtype, shape and bytes of a tensor; NaN equals NaN whatever its payload, +0 and -0 differ."""
    values = torch.empty(tensor.numel(), dtype=tensor.dtype, device="cpu")
    values.copy_(tensor.detach().clone().reshape(-1))  # of a clone: a view of a taken gradient gives it back
    if values.is_floating_point() and values.element_size() > 1 and math.isnan(values.sum()):  # torch sums no float8
        values = values.masked_fill(values.isnan(), math.nan)
    return str(tensor.dtype), tuple(tensor.shape), values.view(torch.uint8).numpy().tobytes()


def entry_bits(entry: Mapping[str, Tensor]) -> dict[str, Bits]:
    return {key: bits(value) for key, value in entry.items()}


def _seen(value: Any) -> Any:
    return bits(value) if isinstance(value, Tensor) else value


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def shown(optimizer: Optimizer) -> list[Bits]:
    """Return the parameters alone, which commits nothing."""
    return [bits(parameter) for parameter in parameters_of(optimizer)]


def state_bits(optimizer: Optimizer, *, without: Iterable[str] = ()) -> dict[str, Any]:
    """Return parameters and per-parameter state; commits what is accepted."""
    hidden = set(without)
    state = optimizer.state_dict()["state"]
    return {
        "parameters": shown(optimizer),
        "state": {i: {key: _seen(v) for key, v in e.items() if key not in hidden} for i, e in state.items()},
    }


def visible(optimizer: Optimizer) -> dict[str, Any]:
    """Return parameters, gradients, and everything in `state_dict()`; commits what is accepted."""
    groups = optimizer.state_dict()["param_groups"]
    return {
        **state_bits(optimizer),
        "gradients": [_seen(parameter.grad) for parameter in parameters_of(optimizer)],
        "groups": [{key: _seen(value) for key, value in group.items()} for group in groups],
    }


@contextmanager
def refused(optimizer: Optimizer, error: type[Exception], sentence: str) -> Iterator[None]:
    """Expect `error` with a text that holds `sentence`, and that nothing a user can see was changed by the attempt."""
    before = visible(optimizer)
    with pytest.raises(error, match=sentence) as caught:
        yield
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400
    assert visible(optimizer) == before


def parameter(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype))


def give_gradients(optimizer: Any, seed: int, size: float = 1.0, *, speculative: bool = False) -> None:
    """Set `.grad` of every parameter that requires one; if `speculative`, speculate on all of them."""
    generator = torch.Generator().manual_seed(1000 + seed)
    for one in parameters_of(optimizer):
        gradient = (torch.randn(one.shape, generator=generator) * size).to(one.dtype)
        if one.requires_grad:
            one.grad = gradient
        del gradient  # a gradient that is held elsewhere would not be taken
    if speculative:
        optimizer.speculate()
        assert all(are_taken(optimizer)) or torch.is_inference_mode_enabled()


def are_taken(optimizer: Optimizer) -> list[bool]:
    """Return of every gradient in `.grad` whether the optimizer has taken it."""
    return [taken_of(one.grad) is not None for one in parameters_of(optimizer) if one.grad is not None]


def speculate(optimizer: Any, seed: int, size: float = 1.0) -> None:
    give_gradients(optimizer, seed, size, speculative=True)


def train(optimizer: Any, seed: int, size: float = 1.0, *, speculative: bool = False) -> None:
    """Make one step with the gradients of this seed, in one or in two parts, and drop them."""
    give_gradients(optimizer, seed, size, speculative=speculative)
    (optimizer.resolve if speculative else optimizer.step)()
    optimizer.zero_grad()


def plain(value: Any) -> Any:
    """Return what a checkpoint may hold as values that compare to the last bit, DTensors whole on every rank."""
    if isinstance(value, Tensor):
        whole: Tensor = value.full_tensor() if hasattr(value, "full_tensor") else value
        return whole.dtype, whole.shape, whole.detach().contiguous().reshape(-1).view(torch.uint8).tolist()
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, list | tuple) else value


def content(model: torch.nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    return {"model": plain(dict(model.state_dict())), "optimizer": plain(optimizer.state_dict())}
