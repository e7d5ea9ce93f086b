"""Lists of the elements whose rounded new value depends on the verdict's factor, and what replaces these values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from superadam.kernels import native

NARROWER = (torch.bfloat16, torch.float16)
"""Dtypes of working copies that have lists: new values are rounded to them."""

LISTED_SHARE = 32
"""A list has room for one element in this many; a parameter that has more uncertain ones is not worth patching."""

_GRAIN = 16  # entries to which a list's capacity is rounded up, so that its arrays begin at cache lines
_ARRAYS = ("index", "master", "exp_avg", "exp_avg_sq", "gradient", "max_exp_avg_sq")
_ENTRY_BYTES = 4  # of each array; a narrower gradient leaves some unused


def list_bytes(numel: int, *, with_max: bool = False) -> int:
    """Return the bytes of the list of a parameter with this many elements; `with_max`: it has a `max_exp_avg_sq`."""
    return _capacity(numel) * _ENTRY_BYTES * (len(_ARRAYS) - (not with_max))


def _capacity(numel: int) -> int:
    return -(-numel // (LISTED_SHARE * _GRAIN)) * _GRAIN


class UncertainLists:
    """Lists of some parameters in one piece of memory, for one pass.

    Attributes:
        records: of dtype `superadam.kernels.native.UNCERTAIN`, in the order of the parameters.
    """

    def __init__(self, numels: Sequence[int], with_max: Sequence[bool]) -> None:
        self.records = np.zeros(len(numels), native.UNCERTAIN)
        sizes = [list_bytes(numel, with_max=one) for numel, one in zip(numels, with_max, strict=True)]
        self._memory = torch.empty(sum(sizes), dtype=torch.uint8, device="cpu")
        self.records["capacity"] = [*map(_capacity, numels)]
        begins = self._memory.data_ptr() + np.cumsum([0, *sizes[:-1]], dtype=np.uint64)
        for number, name in enumerate(_ARRAYS):
            self.records[name] = begins + np.uint64(number * _ENTRY_BYTES) * self.records["capacity"].astype(np.uint64)
        self.records[_ARRAYS[-1]][~np.array(with_max, bool)] = 0

    def address(self, position: int) -> int:
        """Return the address of one record, for a segment."""
        return self.records.ctypes.data + self.records.itemsize * position

    def index(self, position: int) -> npt.NDArray[np.uint32]:
        """Return the positions of the elements that are listed for one parameter."""
        record = self.records[position]
        begin = int(record["index"]) - self._memory.data_ptr()
        bytes_ = self._memory.numpy()[begin : begin + _ENTRY_BYTES * int(record["count"])]
        return bytes_.view(np.uint32)


@dataclass(frozen=True, slots=True)
class Listed:
    """The list of one parameter."""

    lists: UncertainLists
    position: int

    @property
    def record(self) -> np.void:
        """The kernel's record of it."""
        record: np.void = self.lists.records[self.position]
        return record

    @property
    def count(self) -> int:
        """Elements that are uncertain, whether or not all of them are listed."""
        return int(self.record["count"])

    @property
    def is_complete(self) -> bool:
        """Whether all of them are listed."""
        return bool(self.record["count"] <= self.record["capacity"])

    @property
    def index(self) -> npt.NDArray[np.uint32]:
        """Their positions."""
        return self.lists.index(self.position)


class Patch(Protocol):
    """New values for the uncertain elements of some parameters of one shadow, with memory for them.

    Attributes:
        values: one flat tensor of the parameters' dtype for each, which kernels fill.
        targets: speculated values into which kernels put each value as well; None where they have left the host.
    """

    values: Sequence[Tensor]
    targets: Sequence[Tensor | None]

    def send(self, indices: Sequence[npt.NDArray[np.uint32]]) -> None:
        """Let the values follow where speculated ones have gone; `indices` are their positions in each parameter."""


class HostPatch:
    """Of speculated values that are still on the host."""

    def __init__(self, targets: Sequence[Tensor], counts: Sequence[int]) -> None:
        self.targets: Sequence[Tensor | None] = targets
        self.values: Sequence[Tensor] = [
            torch.empty(count, dtype=target.dtype, device="cpu") for target, count in zip(targets, counts, strict=True)
        ]

    def send(self, indices: Sequence[npt.NDArray[np.uint32]]) -> None:
        """Return at once: kernels have put them where they belong."""
