"""Tensors in arguments and results of torch's operations: in lists, tuples and dicts of these."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor


def map_tensors(value: Any, of: Callable[[Tensor], Any]) -> Any:
    """Return an argument or a result with its tensors replaced."""
    if isinstance(value, Tensor):
        return of(value)
    if isinstance(value, dict):
        return {name: map_tensors(item, of) for name, item in value.items()}
    return type(value)([map_tensors(item, of) for item in value]) if isinstance(value, list | tuple) else value


def tensors_in(value: Any) -> list[Tensor]:
    """Return the tensors of an argument or a result, in their order."""
    found: list[Tensor] = []
    map_tensors(value, found.append)
    return found
