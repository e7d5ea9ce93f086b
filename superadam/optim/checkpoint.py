"""Reads `state_dict`s: our own, and those of torch.optim's Adam and AdamW.

Everything is checked before anything is used. Tensors are copied in the dtypes of the state, and never leave the CPU.
"""

from __future__ import annotations

import copy
import itertools
import traceback
from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

import torch
from torch import Tensor

from superadam.distributed import shards
from superadam.host.mapped_files import MappedFiles
from superadam.kernels import torch_private
from superadam.kernels.copies import is_plain
from superadam.kernels.dtypes import DTYPES
from superadam.kernels.hyperparameters import Hyperparameters, described, number_of
from superadam.kernels.memory import has_memory, is_expanded
from superadam.optim.entry import Encoded, Entry
from superadam.state.parameter import ARRAYS, TENSORS, ParameterState

MOMENTS = ("exp_avg", "exp_avg_sq")  # which every entry has; the other tensors are optional
OURS = ("step", *TENSORS)
LATER_GROUP_KEYS = {
    "amsgrad": False,
    "maximize": False,
    "foreach": None,
    "capturable": False,
    "differentiable": False,
    "fused": None,
    "decoupled_weight_decay": False,
}
"""Group keys that older versions of torch.optim.Adam lack, with their values in such a checkpoint."""
CORRECTIONS = ("bias_correction", "correct_bias")
"""Group keys of DeepSpeed's and apex' Adam, and of transformers' AdamW, which all others do without."""
_LARGEST_STEP = 2.0**53  # up to which fp64 counts every step
_COUNTING = {torch.float32: 2**24, torch.float64: _LARGEST_STEP, torch.int32: 2**31 - 1, torch.int64: _LARGEST_STEP}
"""Dtypes of a `step` that goes on in place, and up to where they count every step."""


def is_asked_for_template() -> bool:
    """Whether torch.distributed.checkpoint makes this step: its zero gradients could be those of a true step."""
    frames = (frame for frame, _ in traceback.walk_stack(None))
    return torch_private.TEMPLATE_STEP in ((it.f_globals.get("__name__"), it.f_code.co_name) for it in frames)


def _kind_of(value: object) -> str:
    if shards.is_distributed(value):
        return shards.described(value)
    return described(value) if isinstance(value, Tensor) else f"a {type(value).__name__}"


def read_step(value: object, name: str) -> int:
    """Return a step count from a one-element tensor or a number; raise ValueError for anything but a count."""
    number = number_of(value)
    if number is None or not (0 <= number <= _LARGEST_STEP and number.is_integer()):
        raise ValueError(
            f"the state of {name} has step {described(value)}, expected a whole number of at least 0; "
            "the checkpoint is damaged"
        )
    return int(number)


def counts_in_place(value: object, count: int) -> TypeGuard[Tensor]:
    """Whether a step count can go on counting in place, from this count."""
    if not isinstance(value, Tensor) or count > _COUNTING.get(value.dtype, -1):
        return False
    return value.layout is torch.strided and not value.is_inference()


def fitted_step(value: object, count: int) -> Tensor:
    """Return `value`, a step count, where it can go on counting in place, else a tensor as torch.optim.Adam has it.

    It is in fp64 where fp32 would lose count, or torch's default is fp64.
    """
    if counts_in_place(value, count):
        return value
    is_wide = torch.get_default_dtype() == torch.float64 or count > _COUNTING[torch.float32]
    dtype = torch.float64 if is_wide else torch.float32
    with torch_private.ordinary_tensors():
        return torch.tensor(float(count), dtype=dtype, device="cpu")


def is_of_others(entry: object) -> bool:
    """Whether this is an entry in which only others keep something, such as a Lookahead's slow weights."""
    return isinstance(entry, dict) and not entry.keys() & OURS


def _is_dense(value: object, shape: torch.Size) -> bool:
    if not isinstance(value, Tensor) or value.layout is not torch.strided or value.is_nested:
        return False
    if shards.is_distributed(value) or is_expanded(value):
        return False
    return value.dtype in DTYPES and value.shape == shape and has_memory(value)


def local_entry(entry: Mapping[str, Any], state: ParameterState) -> dict[str, Any]:
    """Return a copy of an entry with this rank's parts of its tensors, which must be distributed as the parameter."""
    # torch.distributed.checkpoint has an empty dict for what a flattened one lacks.
    parts = {key: value for key, value in entry.items() if key not in TENSORS or not isinstance(value, dict) or value}
    for key in TENSORS if state.is_distributed else ():
        value = entry.get(key)
        if isinstance(value, Tensor):
            parts[key] = shards.part_of(value, state.parameter)
            if parts[key] is None:
                raise ValueError(
                    f"{key} of {state.name} is {shards.described(value)}, expected it like its parameter, "
                    f"{shards.described(state.parameter)}; load it with torch.distributed.checkpoint"
                )
    return parts


def check_entry(entry: object, state: ParameterState) -> None:
    """Raise ValueError unless `entry`, with this rank's parts of tensors, can be the state of this parameter."""
    name = state.name
    if not isinstance(entry, dict):
        raise ValueError(f"the state of {name} is {_kind_of(entry)}, expected a dict with step, exp_avg and exp_avg_sq")
    missing = {"step", *MOMENTS} - set(entry)
    if missing:
        raise ValueError(
            f"the state of {name} lacks {', '.join(sorted(missing))}, expected step, exp_avg and exp_avg_sq; "
            "load a checkpoint of Adam, AdamW or superadam"
        )
    read_step(entry["step"], name)
    if "exp_avg" in state.encodings and entry.get("max_exp_avg_sq") is not None:
        raise ValueError(
            f"max_exp_avg_sq of {name} is {_kind_of(entry['max_exp_avg_sq'])}, expected none, as moments are '8bit'; "
            "leave it out, or make the optimizer with moments='bf16'"
        )
    for key in TENSORS:
        value = entry.get(key)
        if isinstance(value, Encoded) or (value is None and key not in MOMENTS):
            continue
        if not _is_dense(value, state.local.shape):
            raise ValueError(
                f"{key} of {name} is {_kind_of(value)}, expected floats of shape {tuple(state.local.shape)}, "
                "dense and in memory; load a checkpoint of the same model, or delete this state if you resized it"
            )


Read = tuple[list[dict[str, Any]], dict[ParameterState, dict[str, Any]], dict[str, Any]]


def read(
    state_dict: Mapping[str, Any], states: Sequence[ParameterState], own_groups: Sequence[Mapping[str, Any]]
) -> Read:
    """Return copies of a state dict's groups and of the state of each parameter, and what others keep under names.

    `own_groups` are those of the optimizer. Raises ValueError unless the state dict is that of an Adam optimizer over
    such parameters.
    """
    try:
        return _read(state_dict, states, own_groups)
    except (ValueError, OSError):  # such as TimeoutError, which the handler of an alarm may raise
        raise
    except Exception as error:  # foreign objects may raise anything when they are copied, hashed or compared
        if torch_private.is_short_of_memory(error):
            raise
        raise ValueError(
            f"the state dict holds what cannot be copied ({type(error).__name__}), expected tensors and plain values; "
            "load what optimizer.state_dict() returned"
        ) from error


def _read(
    state_dict: Mapping[str, Any], states: Sequence[ParameterState], own_groups: Sequence[Mapping[str, Any]]
) -> Read:
    if not {"state", "param_groups"} <= set(state_dict):
        raise ValueError("the state dict lacks state or param_groups; load what optimizer.state_dict() returned")
    groups, entries = state_dict["param_groups"], state_dict["state"]
    if not isinstance(groups, list) or not all(
        isinstance(g, Mapping)
        and all(isinstance(key, str) for key in g)
        and isinstance(g.get("params"), list)
        and all(isinstance(identifier, int | str) for identifier in g["params"])
        for g in groups
    ):
        raise ValueError(
            "param_groups of the state dict is no list of dicts with params, a list of ids; "
            "load what optimizer.state_dict() returned"
        )
    if len(groups) != len(own_groups):
        raise ValueError(
            f"loaded state dict has {len(groups)} parameter groups, expected {len(own_groups)}; "
            "load a checkpoint of the same model"
        )
    memo: dict[int, Any] = {}  # one for all groups, which may have one learning rate, a tensor
    copies = [_read_group(*pair, index, memo) for index, pair in enumerate(zip(groups, own_groups, strict=True))]
    identifiers = itertools.chain.from_iterable(group["params"] for group in groups)
    by_identifier = dict(zip(identifiers, states, strict=True))
    if len(by_identifier) != len(states):
        raise ValueError("the state dict lists a parameter twice, expected each once; it is damaged")
    if not isinstance(entries, Mapping):
        raise ValueError(f"state of the state dict is {_kind_of(entries)}, expected a dict; it is damaged")
    mapped = MappedFiles()
    read: dict[ParameterState, dict[str, Any]] = {}
    foreign: dict[str, Any] = {}
    for identifier, entry in entries.items():
        state = by_identifier.get(identifier)
        if state is not None:
            if not is_of_others(entry):
                entry = local_entry(entry, state) if isinstance(entry, dict) else entry
                check_entry(entry, state)
            read[state] = copied(entry, state, mapped)
        elif isinstance(identifier, str):
            foreign[identifier] = entry
        else:
            raise ValueError(
                f"the state dict has state for parameter {described(identifier)}, which none of its groups lists; "
                "it is damaged"
            )
    return copies, read, foreign


def _read_group(
    group: Mapping[str, Any], own_group: Mapping[str, Any], index: int, memo: dict[int, Any]
) -> dict[str, Any]:
    size = len(own_group["params"])
    if len(group["params"]) != size:
        raise ValueError(
            f"loaded state dict has {len(group['params'])} parameters in group {index}, expected {size}; "
            "load a checkpoint of the same model"
        )
    missing = sorted({"lr", "betas", "eps", "weight_decay"} - set(group))
    if missing and not size:  # torch.distributed.checkpoint loses the values of a group without parameters
        group = {**own_group, **group}
    elif missing:
        raise ValueError(
            f"group {index} of the state dict lacks {', '.join(missing)}; load a checkpoint of Adam, AdamW or superadam"
        )
    if uncorrected := [key for key in CORRECTIONS if not group.get(key, True) and own_group.get(key, True)]:
        raise ValueError(
            f"group {index} of the state dict has {uncorrected[0]} {group[uncorrected[0]]!r}, expected True, as here; "
            "set that to go on with moments that are corrected"
        )
    foreign = ("params", "capturable", "differentiable")
    values = {key: value for key, value in group.items() if key not in foreign}
    copied = {**LATER_GROUP_KEYS, **copy.deepcopy(values, memo), "params": [None] * size}
    Hyperparameters.of_group(copied)
    return copied


def check_arrays(state: ParameterState) -> None:
    """Raise ValueError unless kernels can still work on every tensor of a state."""
    for key in ARRAYS:
        value = getattr(state, key)
        if value is None or (key not in TENSORS and has_memory(value)):
            continue
        if not (_is_dense(value, state.shape) and state.has_layout(value)):
            raise ValueError(
                f"{key} of {state.name} is {_kind_of(value)}, expected floats of shape {tuple(state.shape)}, dense and "
                "in memory; leave it as it is between steps"
            )


def copied(entry: Mapping[str, Any], state: ParameterState, mapped: MappedFiles) -> dict[str, Any]:
    """Return a copy of a checked entry, its tensors whole and those of a new state: `step` 0-dim, as kernels read them.

    Of a mapped checkpoint, no more than one tensor is in memory at a time.
    """
    copied: dict[str, Any] = Entry({}) if state.encodings else {}
    if "step" in entry:
        step = fitted_step(entry["step"], read_step(entry["step"], state.name))
        copied["step"] = step.detach().to("cpu", copy=True).reshape(())
    for key in TENSORS:
        if entry.get(key) is not None:
            state.store(key, entry[key])
            copied[key] = Encoded.of(state, key) if key in state.encodings else state.whole(getattr(state, key))
            mapped.release(entry[key])
    copied.update({key: _cast(value, state.parameter) for key, value in entry.items() if key not in OURS})
    return copied


def _cast(value: Any, parameter: Tensor) -> Any:
    """Return what others keep, with copies of tensors that have dtype and device of the parameter, as in torch."""
    if isinstance(value, Tensor):
        if is_plain(value) and not has_memory(value):
            raise ValueError("the state dict holds a tensor without memory, expected its values; it is damaged")
        dtype = parameter.dtype if parameter.is_floating_point() else value.dtype
        return value.to(parameter.device, dtype, copy=True)
    if isinstance(value, dict):
        return {key: _cast(each, parameter) for key, each in value.items()}
    return type(value)(_cast(each, parameter) for each in value) if type(value) in (list, tuple) else value
