"""Reading the per-parameter entries of a `state_dict`: our own, or those of torch.optim's Adam and AdamW.

Everything is checked before anything is used, and tensors are copied: fp32 state is never cast down and never leaves
the CPU.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from superadam.parameter import ParameterState

MOMENTS = ("exp_avg", "exp_avg_sq")
OPTIONAL = ("max_exp_avg_sq", "master")
_LARGEST_STEP = 2.0**53
"""Up to here a double counts every step."""


def _describe(value: object) -> str:
    return f"{value.dtype} of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"


def read_step(value: object, name: str) -> int:
    """Return a step count from a 0-dim tensor or a number.

    Raises:
        ValueError: not a whole number of at least 0, or too large to be a count.
    """
    is_number = isinstance(value, int | float) or (
        isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex()
    )
    number = float(value) if is_number else math.nan  # type: ignore[arg-type]
    if not (0 <= number <= _LARGEST_STEP and number.is_integer()):
        raise ValueError(
            f"the state of {name} has step {value!r}, expected a whole number of at least 0; the checkpoint is damaged"
        )
    return int(number)


def check_entry(entry: object, state: ParameterState) -> None:
    """Raise unless `entry` can be the state of this parameter.

    Raises:
        ValueError: a key is missing or foreign, or a value has a wrong type, dtype or shape.
    """
    name = state.name
    if not isinstance(entry, Mapping):
        raise ValueError(
            f"the state of {name} is {_describe(entry)}, expected a dict with step, exp_avg and exp_avg_sq"
        )
    known = {"step", *MOMENTS, *OPTIONAL}
    missing = sorted({"step", *MOMENTS} - set(entry))
    foreign = sorted(str(key) for key in set(entry) - known)
    if missing or foreign:
        wrong = " and ".join(
            filter(
                None, [f"lacks {', '.join(missing)}" if missing else "", f"has {', '.join(foreign)}" if foreign else ""]
            )
        )
        raise ValueError(
            f"the state of {name} {wrong}, expected step, exp_avg, exp_avg_sq and at most {' and '.join(OPTIONAL)}; "
            "load a checkpoint of Adam, AdamW or superadam"
        )
    read_step(entry["step"], name)
    for key in (*MOMENTS, *OPTIONAL):
        value = entry.get(key)
        if value is None and key in OPTIONAL:
            continue
        if not isinstance(value, Tensor) or not value.is_floating_point() or value.shape != state.parameter.shape:
            raise ValueError(
                f"{key} of {name} is {_describe(value)}, expected floats of shape {tuple(state.parameter.shape)}; "
                "load a checkpoint of the same model"
            )


def packed_ids(state_dict: Mapping[str, Any], expected: Sequence[int]) -> list[Any]:
    """Return the parameter ids of a state dict's groups in order, after checking that the groups fit.

    Args:
        state_dict: with `param_groups`.
        expected: number of parameters of each group of the optimizer.

    Raises:
        ValueError: the groups are not those of an Adam optimizer over as many parameters.
    """
    groups = state_dict["param_groups"]
    if not isinstance(groups, list) or not all(
        isinstance(g, Mapping) and isinstance(g.get("params"), list) for g in groups
    ):
        raise ValueError(
            "param_groups of the state dict is no list of dicts with params; load what optimizer.state_dict() returned"
        )
    if len(groups) != len(expected):
        raise ValueError(
            f"loaded state dict has {len(groups)} parameter groups, expected {len(expected)}; "
            "load a checkpoint of the same model"
        )
    for index, (group, count) in enumerate(zip(groups, expected, strict=True)):
        if len(group["params"]) != count:
            raise ValueError(
                f"loaded state dict has {len(group['params'])} parameters in group {index}, expected {count}; "
                "load a checkpoint of the same model"
            )
        missing = sorted({"lr", "betas", "eps", "weight_decay"} - set(group))
        if missing:
            raise ValueError(
                f"group {index} of the state dict lacks {', '.join(missing)}; "
                "load a checkpoint of Adam, AdamW or superadam"
            )
    return [identifier for group in groups for identifier in group["params"]]


def checked_entries(
    state_dict: Mapping[str, Any], states: Mapping[Any, ParameterState]
) -> dict[ParameterState, Mapping[str, Any]]:
    """Return the entry of every parameter that has one, after checking all of them.

    Args:
        state_dict: with `state`.
        states: the parameter's state by its id in the state dict.

    Raises:
        ValueError: an entry is damaged, foreign, or of a parameter that no group lists.
    """
    entries = state_dict["state"]
    if not isinstance(entries, Mapping):
        raise ValueError(f"state of the state dict is {_describe(entries)}, expected a dict; it is damaged")
    for identifier, entry in entries.items():
        if identifier not in states:
            raise ValueError(
                f"the state dict has state for parameter {identifier!r}, which none of its groups lists; it is damaged"
            )
        if entry:
            check_entry(entry, states[identifier])
    return {states[identifier]: entry for identifier, entry in entries.items() if entry}


def fitted(tensor: Tensor, state: ParameterState) -> Tensor:
    """Return `tensor` itself where kernels can work on it in place, else a copy that they can."""
    fits = tensor.dtype == state.dtype and tensor.device.type == "cpu" and tensor.stride() == state.strides
    return tensor if fits else state.host_copy(tensor, state.dtype)


def copied(entry: Mapping[str, Any], state: ParameterState) -> dict[str, Tensor]:
    """Return a checked entry as tensors of our own: `step` fp32 and 0-dim, the others as the kernels take them."""
    tensors = {"step": torch.tensor(float(read_step(entry["step"], state.name)), dtype=torch.float32, device="cpu")}
    for key in (*MOMENTS, *OPTIONAL):
        if entry.get(key) is not None:
            tensors[key] = state.host_copy(entry[key], state.dtype)
    return tensors
