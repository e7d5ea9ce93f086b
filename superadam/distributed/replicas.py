"""Notices ranks whose ordinary parameters are no replicas of each other, where nothing says who steps together."""

from __future__ import annotations

import hashlib
import itertools
import warnings
import weakref
from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch import distributed as dist

_world: Any = None  # a weak reference to the process group of all ranks that was seen last
_worlds, _optimizers = 0, itertools.count()  # seen so far, and compared since


def warn_of_others(parameters: Sequence[Tensor], names: Sequence[str]) -> None:
    """Warn once if the first rank that called this has other parameters, by name, shape and dtype.

    Ranks call it for their optimizers in the same order. None waits for another, and where the job's store cannot
    answer, nothing is compared.
    """
    global _world, _worlds, _optimizers
    if not (dist.is_available() and dist.is_initialized()):
        return
    world: Any = dist.group.WORLD
    if _world is None or _world() is not world:
        _world, _worlds, _optimizers = weakref.ref(world), _worlds + 1, itertools.count()
    kinds = [
        (name, tuple(parameter.shape), str(parameter.dtype)) for name, parameter in zip(names, parameters, strict=True)
    ]
    digest = hashlib.sha256(repr(kinds).encode()).hexdigest()
    mine = f"{dist.get_rank()} {len(kinds)} {digest}"
    try:
        first = world.get_group_store().compare_set(f"superadam/parameters/{_worlds}/{next(_optimizers)}", "", mine)
        rank, count, digest_there = first.decode().split()
    except Exception:  # of a store without this, or whose server has ended
        return
    if digest_there != digest:
        warnings.warn(
            f"rank {dist.get_rank()} has other parameters ({len(kinds)}) in its optimizer than rank {rank} ({count}), "
            "so each decides by itself whether to skip or clip a step; pass "
            "process_group=torch.distributed.group.WORLD to the optimizer if they train one model, as the stages of a "
            "pipeline, or a group of those ranks that do",
            stacklevel=2,
        )
