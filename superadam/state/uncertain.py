"""Lists of the elements whose rounded new value depends on the verdict's factor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from superadam.kernels import native

NARROWER = (torch.bfloat16, torch.float16)
"""Dtypes of working copies that have lists: new values are rounded to them."""

LISTED_SHARE = 32
"""A list has room for one element in this many; with more uncertain ones, a patch is not worth it."""

_GRAIN = 16  # entries to which a list's capacity is rounded up, so that its arrays begin at cache lines
_ARRAYS = ("index", "master", "exp_avg", "exp_avg_sq", "gradient", "max_exp_avg_sq")
_ENTRY_BYTES = 4  # of each array; a narrower gradient leaves some unused


def list_bytes(numel: int, *, with_max: bool = False) -> int:
    """Return the bytes of the list of a parameter with this many elements; `with_max`: it has a `max_exp_avg_sq`."""
    return _capacity(numel) * _ENTRY_BYTES * (len(_ARRAYS) - (not with_max))


def _capacity(numel: int) -> int:
    return -(-numel // (LISTED_SHARE * _GRAIN)) * _GRAIN


@dataclass(frozen=True, slots=True)
class Listed:
    """The list of the uncertain elements of one parameter.

    Attributes:
        memory: that holds its arrays, shared with the lists of other parameters.
        records: the kernel's record of it, of dtype `superadam.kernels.native.UNCERTAIN`, as an array of one.
    """

    memory: Tensor
    records: npt.NDArray[np.void]

    @property
    def count(self) -> int:
        """Elements that are uncertain, whether or not all of them are listed."""
        return int(self.records["count"][0])

    @property
    def is_complete(self) -> bool:
        """Whether all of them are listed."""
        return bool(self.count <= self.records["capacity"][0])


def empty_lists(numels: Sequence[int], with_max: Sequence[bool]) -> list[Listed]:
    """Return empty lists for parameters with these numbers of elements; `with_max`: which have a `max_exp_avg_sq`."""
    records = np.zeros(len(numels), native.UNCERTAIN)
    sizes = [list_bytes(numel, with_max=has_max) for numel, has_max in zip(numels, with_max, strict=True)]
    memory = torch.empty(sum(sizes), dtype=torch.uint8, device="cpu")
    records["capacity"] = [*map(_capacity, numels)]
    begins = memory.data_ptr() + np.cumsum([0, *sizes[:-1]], dtype=np.uint64)
    for number, name in enumerate(_ARRAYS):
        records[name] = begins + np.uint64(number * _ENTRY_BYTES) * records["capacity"].astype(np.uint64)
    records[_ARRAYS[-1]][~np.array(with_max, bool)] = 0
    return [Listed(memory, records[position : position + 1]) for position in range(len(numels))]
