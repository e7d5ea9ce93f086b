"""The part of a distributed tensor (DTensor) that lies on this rank.

Never imports `torch.distributed.tensor`, which is slow: if nothing else has imported it, no DTensor exists.
"""

from __future__ import annotations

import math
import sys
from typing import Any

import torch
from torch import Tensor

from superadam.kernels.torch_private import dtensor_part


def is_distributed(tensor: object) -> bool:
    """Whether this is a DTensor."""
    kind = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
    return kind is not None and isinstance(tensor, kind)


def local_of(tensor: Any) -> Tensor:
    """Return the very tensor that holds this rank's part; an ordinary tensor itself."""
    local: Tensor = dtensor_part(tensor) if is_distributed(tensor) else tensor
    return local


def part_of(tensor: Any, like: Any) -> Tensor | None:
    """Return this rank's part of a tensor; None unless it is distributed as `like` is, or neither is."""
    if is_distributed(tensor) != is_distributed(like):
        return None
    if is_distributed(like) and (
        tensor.shape != like.shape or tensor.placements != like.placements or tensor.device_mesh != like.device_mesh
    ):
        return None
    local = local_of(tensor)
    return local.wait() if hasattr(local, "wait") else local  # the result of a collective that is under way


def described(tensor: Any) -> str:
    """Return how a tensor is distributed, for error messages."""
    if not is_distributed(tensor):
        return f"an ordinary tensor of shape {tuple(tensor.shape)}"
    mesh = tuple(tensor.device_mesh.mesh.shape)
    return f"a DTensor of shape {tuple(tensor.shape)} placed {list(tensor.placements)} on {mesh} ranks"


def check_placement(tensor: Any, name: str) -> None:
    """Raise TypeError unless a DTensor has whole elements, some of them possibly on this rank."""
    if not is_distributed(tensor):
        return
    if any(placement.is_partial() for placement in tensor.placements):
        raise TypeError(
            f"{name} is placed {list(tensor.placements)}, expected Shard or Replicate, because a Partial tensor is not "
            "summed yet; redistribute() it before optimizing"
        )
    if tensor.device_mesh.get_coordinate() is None:
        raise TypeError(
            f"{name} lies on ranks {members_of(tensor)} only, expected a tensor with a part on this rank, "
            f"{torch.distributed.get_rank()}; leave it out here"
        )


def first_position(tensor: Any) -> int:
    """Return where the first element of this rank's part lies in the whole tensor, in the order of a dense memory.

    0 where the part is not rows that follow one another.
    """
    kind = getattr(sys.modules.get("torch.distributed.tensor"), "Shard", None)
    if not is_distributed(tensor) or not tensor.dim():
        return 0
    mesh, begin, rows = tensor.device_mesh, 0, tensor.shape[0]
    for ranks, rank, placement in zip(mesh.shape, mesh.get_coordinate(), tensor.placements, strict=True):
        if placement.is_replicate():
            continue
        if type(placement) is not kind or placement.dim != 0:
            return 0  # as of several meshes, whose rows alternate
        each = -(-rows // ranks)
        skipped = min(each * rank, rows)
        begin, rows = begin + skipped, min(each, rows - skipped)
    return int(begin * math.prod(tensor.shape[1:]))


def members_of(tensor: Any) -> list[int]:
    """Return the ranks that a DTensor is distributed over, sorted."""
    return sorted(tensor.device_mesh.mesh.flatten().tolist())


def counted_part(tensor: Any) -> str | None:
    """Return which elements of a tensor this rank counts, in words that are equal on two ranks only for the same ones.

    None where it counts none: another rank of the mesh has the first replica of this rank's part, or the mesh lies on
    others alone.
    """
    if not is_distributed(tensor):
        return "all"
    mesh, here = tensor.device_mesh, tensor.device_mesh.get_coordinate()
    if here is None:
        return None
    if any(at and placement.is_replicate() for at, placement in zip(here, tensor.placements, strict=True)):
        return None
    return f"{[*tensor.placements]} at {[*here]} of {tuple(mesh.mesh.shape)}"
