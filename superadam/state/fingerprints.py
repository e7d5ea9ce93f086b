"""Version counter, storage and address of each parameter after our last write to it: hints at writes by others.

The allocator hands out an address again, often at once, so that an address alone does not identify memory. Storages are
compared as well, by the address of torch's StorageImpl. A weak reference keeps that address from being used again, but
not the memory. A storage resized to 0 and back between two looks, and gets the same address again, stays unseen.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from superadam.kernels.torch_private import storage_key, storage_reference, version_of

_DISTRUSTED = -1
_NOWHERE = np.iinfo(np.uint64).max
_NO_STORAGE = 0


def _storage_of(tensor: Tensor) -> int:
    """Return the address of a tensor's StorageImpl; for tensors that have none, always the same number."""
    try:
        return storage_key(tensor.untyped_storage())
    except RuntimeError:
        return _NO_STORAGE


def _weak_reference(tensor: Tensor) -> Any:
    has_storage = _storage_of(tensor) != _NO_STORAGE
    return storage_reference(tensor.untyped_storage()) if has_storage else None


class Fingerprints:
    """One version, storage and address for each of a fixed list of parameters, which are called by their row in it.

    Where some are DTensors, `parameters` holds their parts on this rank, and `wholes` the DTensors. Writes are counted
    by the one or the other, so that a version is the sum of both.
    """

    def __init__(self, parameters: Sequence[Tensor], wholes: Sequence[Tensor] | None = None) -> None:
        self._parameters = list(parameters)
        self._wholes = wholes
        self._references = [_weak_reference(parameter) for parameter in self._parameters]
        self._pointers, self._storages, self._versions = self._present()
        self._seen_versions = self._versions.copy()

    def __reduce__(self) -> NoReturn:
        raise TypeError("fingerprints are of this process's memory and cannot be copied; make new ones of the copies")

    def are_of(self, parameters: Sequence[Tensor]) -> bool:
        """Whether these are the listed tensors, in this order."""
        return len(parameters) == len(self._parameters) and all(map(operator.is_, parameters, self._parameters))

    def look(self) -> list[int]:
        """Look at every parameter; return the rows that have moved, now or in an earlier look, since `remember`."""
        pointers, storages, self._seen_versions = self._present()
        moved = np.flatnonzero((pointers != self._pointers) | (storages != self._storages))
        self._pointers[moved] = _NOWHERE  # moved even if the same address comes back before they are remembered
        rows: list[int] = moved.tolist()
        return rows

    def seen_hints(self, rows: npt.NDArray[np.int64]) -> list[int]:
        """Return those rows whose version hinted at an outside write in the last `look`."""
        hinted: list[int] = rows[self._seen_versions[rows] != self._versions[rows]].tolist()
        return hinted

    def had_memory(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """Return of each of these rows whether it had memory in the last `look`, or when it was remembered since."""
        found: npt.NDArray[np.bool_] = (self._pointers[rows] != 0) & (self._storages[rows] != _NO_STORAGE)
        return found

    def is_moved(self, row: int) -> bool:
        """Whether a parameter has moved now or in an earlier look."""
        parameter = self._parameters[row]
        return bool(parameter.data_ptr() != self._pointers[row] or _storage_of(parameter) != self._storages[row])

    def hints(self) -> list[int]:
        """Return the rows whose version hints at an outside write now; addresses are left to `look`."""
        found: list[int] = np.flatnonzero(self._present_versions() != self._versions).tolist()
        return found

    def is_hinted(self, row: int) -> bool:
        """Whether version, storage or address hint at an outside write."""
        return bool(self._version(row) != self._versions[row]) or self.is_moved(row)

    def _version(self, row: int) -> int:
        version = version_of(self._parameters[row])
        return version if self._wholes is None else version + version_of(self._wholes[row])

    def remember(self, row: int) -> None:
        """Remember a parameter as it is now."""
        parameter = self._parameters[row]
        self._versions[row] = self._version(row)
        self._pointers[row] = parameter.data_ptr()
        storage = _storage_of(parameter)
        if storage != self._storages[row]:  # else it is the same one, whose address cannot have been reused
            self._references[row] = _weak_reference(parameter)
            self._storages[row] = storage

    def distrust(self, row: int) -> None:
        """Make the next look compare values: the master was replaced, so it is unknown who wrote the parameter last."""
        self._versions[row] = _DISTRUSTED

    def prepared_bump(self, rows: npt.NDArray[np.int64]) -> Callable[[], None]:
        """Return what counts a write of ours in the versions, once; it does not fail for want of memory.

        An outside write in between is still noticed.
        """
        bumped, versions = [self._parameters[row] for row in rows.tolist()], self._versions[rows] + 1
        if self._wholes is not None:
            bumped += [self._wholes[row] for row in rows if self._wholes[row] is not self._parameters[row]]
            versions += 1  # also where both are one tensor, as its version is added to itself

        def bump() -> None:
            torch.autograd.graph.increment_version(bumped)
            self._versions[rows] = versions

        return bump

    def _present(self) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64], npt.NDArray[np.int64]]:
        pointers, storages, key_of = [], [], storage_key
        count = len(self._parameters)
        for parameter in self._parameters:
            pointers.append(parameter.data_ptr())
            try:
                storages.append(key_of(parameter.untyped_storage()))
            except RuntimeError:
                storages.append(_NO_STORAGE)
        addresses = np.fromiter(pointers, np.uint64, count), np.fromiter(storages, np.uint64, count)
        return (*addresses, self._present_versions())

    def _present_versions(self) -> npt.NDArray[np.int64]:
        versions = map(version_of, self._parameters)
        if self._wholes is not None:
            versions = map(operator.add, versions, map(version_of, self._wholes))
        return np.fromiter(versions, np.int64, len(self._parameters))
