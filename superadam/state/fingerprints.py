"""Where each parameter lay, and its version counter, after our last write to it: hints at writes by others.

The allocator hands out an address again, often at once, so that an address alone does not identify memory. Storages are
compared as well, by the address of torch's StorageImpl. A weak reference keeps that address from being used again, but
not the memory. A storage resized to 0 and back between two looks, and gets the same address again, stays unseen.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from superadam.kernels.places import ADDRESS, LAYOUT, NOWHERE, STORAGE, VERSION, Places, compare, places_of
from superadam.kernels.torch_private import may_graphs_survive_writes, storage_reference, version_of

_DISTRUSTED = -1


def _weak_reference(tensor: Tensor, storage: int) -> Any:
    return storage_reference(tensor.untyped_storage()) if storage else None


def _versions(tensors: Sequence[Tensor]) -> npt.NDArray[np.int64]:
    return np.fromiter(map(version_of, tensors), np.int64, len(tensors))


class Fingerprints:
    """The place of each of a fixed list of parameters, which are called by their row in it.

    Where some are DTensors, `parameters` holds their parts on this rank, and `wholes` the DTensors. Writes are counted
    by the one or the other, so that a version is the sum of both.
    """

    def __init__(self, parameters: Sequence[Tensor], wholes: Sequence[Tensor] | None = None) -> None:
        self._parameters = tuple(parameters)
        self._wholes = wholes
        self._known = self._places(range(len(self._parameters)))
        # By column, or taken: numpy's index of two dimensions fails without an error where memory has run out.
        self._known_addresses, self._known_versions = self._known[:, ADDRESS], self._known[:, VERSION]
        self.layouts = self._known[:, LAYOUT]  # of each parameter where it lay
        self._seen_versions = self._known_versions.copy()
        self._may_be_hinted = True  # unless `look` finds that none is, and none is distrusted since then
        self._references = [*map(_weak_reference, self._parameters, self._known[:, STORAGE].tolist())]

    def look(self) -> list[int]:
        """Look at every parameter; return the rows that have moved or changed their layout, now or in an earlier look.

        What `remember` has seen since then is not moved.
        """
        rows, self._seen_versions, changed = compare(self._parameters, self._known)
        self._may_be_hinted = changed > 0 or self._wholes is not None
        if self._wholes is not None:
            self._seen_versions += _versions(self._wholes)
        if rows:
            self._known_addresses[rows] = NOWHERE  # even if the same address comes back before they are remembered
        return rows

    def seen_hints(self, rows: npt.NDArray[np.int64]) -> list[int]:
        """Return those rows whose version hinted at an outside write in the last `look`."""
        if not self._may_be_hinted:
            return []
        hinted: list[int] = rows[self._seen_versions[rows] != self._known_versions[rows]].tolist()
        return hinted

    def are_hinted(self, rows: Sequence[int]) -> list[bool]:
        """Return of each of these rows whether version, memory or layout hint at an outside write."""
        found: list[bool] = (self._places(rows) != self._known.take(rows, axis=0)).any(axis=1).tolist()
        return found

    def _places(self, rows: Sequence[int]) -> Places:
        places = places_of([self._parameters[row] for row in rows])
        if self._wholes is not None:
            places[:, VERSION] += _versions([self._wholes[row] for row in rows])
        return places

    def remember(self, row: int) -> None:
        """Remember a parameter as it is now."""
        place, known = self._places([row])[0], self._known[row]
        if place[STORAGE] != known[STORAGE]:  # else it is the same one, whose address cannot have been reused
            self._references[row] = _weak_reference(self._parameters[row], int(place[STORAGE]))
        known[:] = place

    def distrust(self, row: int) -> None:
        """Make the next look compare values: the master was replaced, so it is unknown who wrote the parameter last."""
        self._known_versions[row] = _DISTRUSTED
        self._may_be_hinted = True

    def prepared_bump(self, rows: npt.NDArray[np.int64]) -> Callable[[], None]:
        """Return what counts a write of ours in the versions, once; it does not fail for want of memory.

        An outside write in between is still noticed.
        """
        is_all = len(rows) == len(self._parameters)
        bumped = [*self._parameters] if is_all else [self._parameters[row] for row in rows.tolist()]
        versions = self._known_versions[rows] + 1
        if may_graphs_survive_writes():
            for parameter in bumped:
                parameter.copy_(parameter)  # a write that torch sees, and counts
            bumped = []
        if self._wholes is not None:
            bumped += [self._wholes[row] for row in rows if self._wholes[row] is not self._parameters[row]]
            versions += 1  # also where both are one tensor, as its version is added to itself

        def bump() -> None:
            torch.autograd.graph.increment_version(bumped)
            self._known_versions[rows] = versions

        return bump
