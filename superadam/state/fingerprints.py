"""Version counters, storages and addresses of parameters, as they were after our last write to each.

Others mean that the parameter may have been written by others: a hint, not a proof. What was written is found by
comparing values, in outside_writes.py. This module knows tensors, and nothing of their state.

An address alone does not identify memory: the allocator hands it out again, often at once. So storages are compared as
well, by the address of torch's StorageImpl, and a weak reference to each keeps that address from being used again; the
storage's memory is freed all the same. One thing stays unseen: a storage that is resized to 0 and back between two
looks, and gets the same address again.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import NoReturn

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

_get_version = operator.attrgetter("_version")
_DISTRUSTED = -1
_NOWHERE = np.iinfo(np.uint64).max
_NO_STORAGE = 0


def _storage_of(tensor: Tensor) -> int:
    """Return the address of a tensor's StorageImpl; for tensors that have none, always the same number."""
    try:
        address: int = tensor.untyped_storage()._cdata
    except RuntimeError:
        return _NO_STORAGE
    return address


def _weak_reference(tensor: Tensor) -> StorageWeakRef | None:
    """Return what keeps the address of a tensor's StorageImpl, but not its memory, from being used again."""
    has_storage = _storage_of(tensor) != _NO_STORAGE
    return StorageWeakRef(tensor.untyped_storage()) if has_storage else None  # type: ignore[no-untyped-call]


class Fingerprints:
    """One version, storage and address for each of a fixed list of parameters, called by their row in it."""

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self._parameters = list(parameters)
        self._references = [_weak_reference(parameter) for parameter in self._parameters]
        self._pointers, self._storages, self._versions = self._present()
        self._seen_versions = self._versions.copy()

    def __reduce__(self) -> NoReturn:
        raise TypeError("fingerprints are of this process's memory and cannot be copied; make new ones of the copies")

    def are_of(self, parameters: Sequence[Tensor]) -> bool:
        """Whether these very tensors were listed, in this order."""
        return len(parameters) == len(self._parameters) and all(map(operator.is_, parameters, self._parameters))

    def look(self) -> list[int]:
        """Look at every parameter; return the rows of those that lie elsewhere now, or did in an earlier look.

        A row counts as moved until it is remembered.
        """
        pointers, storages, self._seen_versions = self._present()
        moved = np.flatnonzero((pointers != self._pointers) | (storages != self._storages))
        self._pointers[moved] = _NOWHERE  # also if the same address comes back before they are remembered
        rows: list[int] = moved.tolist()
        return rows

    def seen_hints(self, rows: npt.NDArray[np.int64]) -> list[int]:
        """Return those rows whose version hinted at a write of somebody else when `look` was called last."""
        hinted: list[int] = rows[self._seen_versions[rows] != self._versions[rows]].tolist()
        return hinted

    def is_moved(self, row: int) -> bool:
        """Whether a parameter lies elsewhere now, or did in an earlier look."""
        parameter = self._parameters[row]
        return bool(parameter.data_ptr() != self._pointers[row] or _storage_of(parameter) != self._storages[row])

    def hints(self, rows: npt.NDArray[np.int64]) -> list[int]:
        """Return those of distinct rows whose version hints at a write of somebody else; addresses are `look`'s."""
        if len(rows) == len(self._parameters):
            rows = np.arange(len(rows))
        versions = np.fromiter(map(_get_version, self._at(rows)), np.int64, len(rows))
        found: list[int] = rows[versions != self._versions[rows]].tolist()
        return found

    def is_hinted(self, row: int) -> bool:
        """Whether version, storage or address hint at a write of somebody else."""
        return bool(self._parameters[row]._version != self._versions[row]) or self.is_moved(row)

    def _at(self, rows: npt.NDArray[np.int64]) -> Sequence[Tensor]:
        """Return the parameters of distinct rows; where these are all rows, in the order of the list."""
        if len(rows) == len(self._parameters):
            return self._parameters
        return [self._parameters[row] for row in rows.tolist()]

    def remember(self, row: int) -> None:
        """Remember a parameter as it is now."""
        parameter = self._parameters[row]
        self._versions[row] = parameter._version
        self._pointers[row] = parameter.data_ptr()
        storage = _storage_of(parameter)
        if storage != self._storages[row]:  # else it is the same: its address cannot have been used again
            self._references[row] = _weak_reference(parameter)
            self._storages[row] = storage

    def distrust(self, row: int) -> None:
        """Make the next look compare values: the master is new, so nobody knows who wrote the parameter last."""
        self._versions[row] = _DISTRUSTED

    def forget_address(self, row: int) -> None:
        """Count a parameter as moved until it is remembered again."""
        self._pointers[row] = _NOWHERE

    def bump(self, rows: npt.NDArray[np.int64]) -> None:
        """Tell autograd that the parameters of distinct rows are written by us, now or soon.

        Versions are not read anew: a write of somebody else in between must still be noticed.
        """
        torch.autograd.graph.increment_version(self._at(rows))
        self._versions[rows] += 1

    def _present(self) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64], npt.NDArray[np.int64]]:
        """Return address, storage and version of every parameter, taken together while it is in the cache."""
        pointers, storages, versions = [], [], []
        count = len(self._parameters)
        for parameter in self._parameters:
            pointers.append(parameter.data_ptr())
            try:
                storages.append(parameter.untyped_storage()._cdata)
            except RuntimeError:
                storages.append(_NO_STORAGE)
            versions.append(parameter._version)
        return (
            np.fromiter(pointers, np.uint64, count),
            np.fromiter(storages, np.uint64, count),
            np.fromiter(versions, np.int64, count),
        )
