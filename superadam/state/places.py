"""Where tensors lie: address, storage, version counter and layout, of many tensors in one call.

What a kernel is to touch is looked at in the same call of the optimizer: programs move memory, free it and give it
another shape, and the tensor stays the same object. Where each parameter lay after our last write to it is kept as its
fingerprint: another place, or another version, hints at a write by others.

The allocator hands out an address again, often at once, so that an address alone does not identify memory. Storages are
compared as well, by the address of torch's StorageImpl. A weak reference keeps that address from being used again, but
not the memory. A storage that is resized to 0 and back between two looks, to the same address, stays unseen.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from superadam.host.signals import THIS_THREAD
from superadam.kernels import torch_private
from superadam.kernels.memory import extent_of
from superadam.kernels.torch_private import may_graphs_survive_writes, storage_key, storage_reference, version_of

ADDRESS, STORAGE, BYTES, LAYOUT, VERSION = range(5)
"""Columns: of the first element (0 without memory), torch's key of the storage (0 without one), the storage's bytes, a
hash of dtype, device, shape and strides (0 without memory), and writes that were counted (-1 where none are). Those
before the last say what a kernel may touch."""

NOWHERE = np.iinfo(np.int64).min
"""An address that no memory has."""

Places = npt.NDArray[np.int64]  # one row for each tensor

_NOTHING = (0, 0, 0, 0, 0)


def _place_of(tensor: Tensor | None) -> tuple[int, ...]:
    """Return what `cpu/places.c` finds, by public names."""
    if tensor is None:
        return _NOTHING
    address, layout, key, size, version = 0, 0, 0, 0, -1
    with suppress(Exception):  # of other classes
        if not tensor.is_meta:
            address, layout = tensor.data_ptr(), hash((tensor.dtype, tensor.device, tensor.shape, tensor.stride()))
    with suppress(Exception):
        storage = tensor.untyped_storage()
        key, size = storage_key(storage), storage.nbytes()
    with suppress(RuntimeError):  # made in inference mode
        version = version_of(tensor)
    return address, key, size, layout, version


_looks = torch_private.looks  # None: public names find the same


def places_of(tensors: Sequence[Tensor | None]) -> Places:
    """Return where these tensors lie now; None lies nowhere."""
    places = np.empty((len(tensors), len(_NOTHING)), np.int64)
    if _looks is not None:
        _looks.look(tuple(tensors), places)
    else:
        with THIS_THREAD.without_handlers:
            for row, tensor in enumerate(tensors):
                places[row] = _place_of(tensor)
    return places


def address_of(tensor: Tensor) -> int:
    """Return where a tensor lies now."""
    return int(places_of([tensor])[0, ADDRESS])


def sharing(tensors: Sequence[Tensor]) -> tuple[int, int] | None:
    """Return the positions of two tensors that have memory in common; the gaps between elements are not theirs."""
    begins = places_of(tensors)[:, ADDRESS].tolist()
    ends = [begin and begin + extent_of(tensor) for begin, tensor in zip(begins, tensors, strict=True)]
    near: list[int] = []  # those before that reach as far as the next one
    for second in sorted(filter(begins.__getitem__, range(len(tensors))), key=begins.__getitem__):
        near = [first for first in near if ends[first] > begins[second]]
        for first in near:
            one, other = (_laid_out(tensors[position], begins[position]) for position in (first, second))
            if tensors[first].device == tensors[second].device and np.shares_memory(one, other):
                return first, second
        near.append(second)
    return None


def _laid_out(tensor: Tensor, address: int) -> npt.NDArray[np.void]:
    """Return an array that lies as a tensor does, whose memory nothing can read through it."""
    size, strides = tensor.element_size(), tensor.stride()
    interface = {"version": 3, "data": (address, True), "typestr": f"|V{size}", "shape": tuple(tensor.shape)}
    return np.asarray(SimpleNamespace(__array_interface__=interface | {"strides": tuple(size * s for s in strides)}))


def compare(tensors: Sequence[Tensor | None], before: Places) -> tuple[list[int], npt.NDArray[np.int64], int]:
    """Return which tensors have other memory or another layout; the versions of all; and how many of those are new."""
    if _looks is None:
        places = places_of(tensors)
        moved = np.flatnonzero((places[:, :VERSION] != before[:, :VERSION]).any(axis=1))
        versions = places[:, VERSION]
        return moved.tolist(), versions, int(np.count_nonzero(versions != before[:, VERSION]))
    versions, rows = np.empty(len(tensors), np.int64), np.empty(len(tensors), np.int64)
    count, changed = _looks.compare(tuple(tensors), before, versions, rows)
    return rows[:count].tolist(), versions, changed


def gradients_of(
    parameters: Sequence[Tensor], layouts: npt.NDArray[np.int64]
) -> tuple[list[Any], npt.NDArray[np.uint64], int, int]:
    """Return `.grad` of all parameters, addresses, how many gradients there are, and how many have an address.

    Those are tensors of torch's own class that lie in memory as a `LAYOUT` says; the address of all others is 0.
    """
    addresses = np.zeros(len(parameters), np.uint64)
    if _looks is None:  # all of them are looked at one by one
        found = [parameter.grad for parameter in parameters]
        return found, addresses, sum(gradient is not None for gradient in found), 0
    gradients, present, plain = _looks.gradients(tuple(parameters), layouts, addresses)
    return gradients, addresses, present, plain


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
