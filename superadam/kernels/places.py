"""Where tensors lie: address, storage, version counter and layout, of many tensors in one call.

What a kernel is to touch is looked at in the same call of the optimizer: programs move memory, free it and give it
another shape, and the tensor stays the same object.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from superadam.host.signals import THIS_THREAD
from superadam.kernels import torch_private
from superadam.kernels.memory import extent_of
from superadam.kernels.torch_private import storage_key, version_of

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
