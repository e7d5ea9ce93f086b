"""Version counters and addresses of parameters, as they were after our last write to each.

Others mean that somebody else may have written to the parameter: a hint, not a proof. What was written is found by
comparing values, in outside_writes.py. This module knows tensors, and nothing of their state.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

_get_version = operator.attrgetter("_version")
_DISTRUSTED = -1
_NOWHERE = np.iinfo(np.uint64).max


class Fingerprints:
    """One version and one address for each of a fixed list of parameters, called by their row in it."""

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self._parameters = list(parameters)
        self._pointers, self._versions = self._present()
        self._seen_versions = self._versions.copy()

    def are_of(self, parameters: Sequence[Tensor]) -> bool:
        """Whether these very tensors were listed, in this order."""
        return len(parameters) == len(self._parameters) and all(map(operator.is_, parameters, self._parameters))

    def look(self) -> list[int]:
        """Look at every parameter; return the rows of those that lie elsewhere now."""
        pointers, self._seen_versions = self._present()
        moved: list[int] = np.flatnonzero(pointers != self._pointers).tolist()
        return moved

    def seen_hints(self, rows: npt.NDArray[np.int64]) -> list[int]:
        """Return those rows whose version hinted at a write of somebody else when `look` was called last."""
        hinted: list[int] = rows[self._seen_versions[rows] != self._versions[rows]].tolist()
        return hinted

    def is_moved(self, row: int) -> bool:
        """Whether a parameter lies elsewhere now."""
        return bool(self._parameters[row].data_ptr() != self._pointers[row])

    def hints(self, rows: npt.NDArray[np.int64]) -> list[int]:
        """Return those of distinct rows whose version hints at a write of somebody else; addresses are `look`'s."""
        if len(rows) == len(self._parameters):
            rows = np.arange(len(rows))
        versions = np.fromiter(map(_get_version, self._at(rows)), np.int64, len(rows))
        found: list[int] = rows[versions != self._versions[rows]].tolist()
        return found

    def is_hinted(self, row: int) -> bool:
        """Whether version or address hint at a write of somebody else."""
        return bool(self._parameters[row]._version != self._versions[row]) or self.is_moved(row)

    def _at(self, rows: npt.NDArray[np.int64]) -> Sequence[Tensor]:
        """Return the parameters of distinct rows; where these are all rows, in the order of the list."""
        if len(rows) == len(self._parameters):
            return self._parameters
        return [self._parameters[row] for row in rows.tolist()]

    def note(self, row: int) -> None:
        """Remember a parameter as it is now."""
        self._versions[row] = self._parameters[row]._version
        self._pointers[row] = self._parameters[row].data_ptr()

    def distrust(self, row: int) -> None:
        """Make the next look compare values: the master is new, so nobody knows who wrote the parameter last."""
        self._versions[row] = _DISTRUSTED

    def forget_address(self, row: int) -> None:
        """Count a parameter as moved until it is noted again."""
        self._pointers[row] = _NOWHERE

    def bump(self, rows: npt.NDArray[np.int64]) -> None:
        """Tell autograd that the parameters of distinct rows are written by us, now or soon.

        Versions are not read anew: a write of somebody else in between must still be noticed.
        """
        torch.autograd.graph.increment_version(self._at(rows))
        self._versions[rows] += 1

    def _present(self) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.int64]]:
        """Return address and version of every parameter, taken together while it is in the cache."""
        pointers, versions = [], []
        for parameter in self._parameters:
            pointers.append(parameter.data_ptr())
            versions.append(parameter._version)
        count = len(pointers)
        return np.fromiter(pointers, np.uint64, count), np.fromiter(versions, np.int64, count)
