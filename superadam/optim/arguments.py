"""Checks of the optimizer's arguments and parameter groups; they change nothing."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from superadam.kernels.hyperparameters import Hyperparameters, described, number_of
from superadam.kernels.torch_private import are_flattened
from superadam.state.storage import Master, Moments, Storage

_FORMATS = {"moments", "master"}
_OF_ALL_GROUPS = _FORMATS | {"max_grad_norm", "on_nonfinite", "process_group"}


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    """Return the parameters of all groups, in their order."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def without_wrapper(optimizer: Any) -> Any:
    """Return what Accelerate or Lightning has wrapped; any other wrapper, as a Lookahead, may have state of its own."""
    makers = {kind.__module__.partition(".")[0] for kind in type(optimizer).__mro__}
    is_wrapper = makers & {"accelerate", "lightning", "lightning_fabric", "pytorch_lightning"}
    return getattr(optimizer, "optimizer", optimizer) if is_wrapper else optimizer


def check_group(group: dict[str, Any]) -> None:
    """Raise ValueError for a hyper-parameter out of range, RuntimeError for `capturable` or `differentiable`."""
    for key in ("capturable", "differentiable"):
        if group.get(key):
            raise RuntimeError(
                f"{key}=True is not possible, because the update runs on the CPU outside CUDA graphs and autograd; "
                "leave it False or use torch.optim.AdamW"
            )
    if (lr := Hyperparameters.of_group(group).lr) < 0.0:
        raise ValueError(f"Invalid learning rate: {lr}; expected a number of at least 0 to begin with")


def check_together(
    lr: float | Tensor, betas: tuple[float | Tensor, float | Tensor], *, foreach: bool | None, fused: bool | None
) -> None:
    """Refuse the combinations of constructor arguments that torch.optim.Adam refuses, with its messages."""
    if foreach and isinstance(lr, Tensor):
        raise ValueError("lr as a Tensor is not supported for capturable=False and foreach=True; leave foreach None")
    are_tensors = [isinstance(beta, Tensor) for beta in betas] if isinstance(betas, tuple | list) else []
    if any(are_tensors) and not all(are_tensors):
        raise ValueError(f"betas must be either both floats or both Tensors, got {described(betas)}; pass floats")
    if foreach and any(are_tensors):
        raise ValueError(
            "betas[0] as a Tensor is not supported for capturable=False and foreach=True; leave foreach None"
        )
    if foreach and fused:
        raise RuntimeError("`fused` and `foreach` cannot be `True` together; leave both None")


def is_flattened(parameters: Iterable[Tensor]) -> bool:
    """Return whether parameters are shards of FSDP1 on several ranks, each of which judges a step by its own part."""
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return False
    return torch.distributed.get_world_size() > 1 and are_flattened(parameters)


def refuse_limit_of_shard(limit: float | None) -> None:
    """Raise RuntimeError if there is a limit, by which each rank would clip differently."""
    if limit is not None and limit != math.inf:
        raise RuntimeError(
            f"max_grad_norm is {limit}, but under FSDP1 this optimizer sees the gradients of one rank only, expected "
            "no limit; set max_grad_norm=None, and call clip_grad_norm_() of the FullyShardedDataParallel model"
        )


def checked_storage(moments: object, master: object) -> Storage:
    """Return how state is to be stored; raise ValueError for names of no format."""
    for name, value, kinds in (("moments", moments, Moments), ("master", master, Master)):
        names = [kind.value for kind in kinds]
        if not isinstance(value, str) or value not in names:
            raise ValueError(f"{name} is {described(value)}, expected {' or '.join(map(repr, names))}")
    return Storage(Moments(moments), Master(master))


def check_stored(group: Mapping[str, Any], storage: Storage, *, is_loaded: bool) -> None:
    """Raise ValueError for a group with arguments of the whole optimizer, or with amsgrad where moments have 8 bits.

    One that was loaded may have the limits of another optimizer, which do not count here.
    """
    for name in (_FORMATS if is_loaded else _OF_ALL_GROUPS) & group.keys():
        raise ValueError(
            f"a parameter group has {name}, expected it as an argument of the optimizer alone; leave it out of groups"
        )
    if group.get("amsgrad") and storage.moments is Moments.EIGHT_BIT:
        raise ValueError("amsgrad is True, but moments is '8bit', expected amsgrad=False; or pass moments='bf16'")


def checked_limit(name: str, value: float, *, may_be_zero: bool) -> float:
    """Return a limit of the gradient norm as a float; raise ValueError for what is none, as NaN."""
    limit = number_of(value)
    if limit is None or not limit >= 0.0 or not (limit or may_be_zero):
        expected = "a number of at least 0, or math.inf" if may_be_zero else "a positive number, or None"
        raise ValueError(f"{name} is {described(value)}, expected {expected} for no limit")
    return limit
