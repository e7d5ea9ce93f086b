"""Where tensors lie: address, storage, version counter and layout, of many tensors in one call.

What a kernel is to touch is looked at in the same call of the optimizer: programs move memory, free it and give it
another shape, and the tensor stays the same object.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from superadam.kernels import torch_private
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


def _look_in_python(tensors: Sequence[Tensor | None], places: Places) -> None:
    for row, tensor in enumerate(tensors):
        places[row] = _place_of(tensor)


def _compare_in_python(
    tensors: Sequence[Tensor | None], known: Places, versions: npt.NDArray[np.int64], rows: npt.NDArray[np.int64]
) -> tuple[int, int]:
    places = np.empty_like(known)
    _look_in_python(tensors, places)
    versions[:] = places[:, VERSION]
    moved = np.flatnonzero((places[:, :VERSION] != known[:, :VERSION]).any(axis=1))
    rows[: len(moved)] = moved
    return len(moved), int(np.count_nonzero(versions != known[:, VERSION]))


def _gradients_in_python(
    parameters: Sequence[Tensor], layouts: npt.NDArray[np.int64], addresses: npt.NDArray[np.uint64]
) -> tuple[list[Tensor | None], int, int]:
    found = [parameter.grad for parameter in parameters]
    addresses[:] = 0  # all of them are looked at one by one
    return found, sum(gradient is not None for gradient in found), 0


_look = getattr(torch_private.looks, "look", _look_in_python)
_compare = getattr(torch_private.looks, "compare", _compare_in_python)
_gradients = getattr(torch_private.looks, "gradients", _gradients_in_python)


def has_memory(tensor: Tensor) -> bool:
    """Whether a strided tensor's storage holds its elements; it may have been freed or, on meta, never allocated."""
    if not tensor.numel():
        return True
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    needed = (tensor.storage_offset() + last + 1) * tensor.element_size()
    try:
        return not tensor.is_meta and tensor.untyped_storage().nbytes() >= needed
    except NotImplementedError:  # of a transform of torch.func, which reads another tensor
        return True


def places_of(tensors: Sequence[Tensor | None]) -> Places:
    """Return where these tensors lie now; None lies nowhere."""
    places = np.empty((len(tensors), len(_NOTHING)), np.int64)
    _look(tuple(tensors), places)
    return places


def compare(tensors: Sequence[Tensor | None], before: Places) -> tuple[list[int], npt.NDArray[np.int64], int]:
    """Return which tensors have other memory or another layout; the versions of all; and how many of those are new."""
    versions, rows = np.empty(len(tensors), np.int64), np.empty(len(tensors), np.int64)
    moved, changed = _compare(tuple(tensors), before, versions, rows)
    return rows[:moved].tolist(), versions, changed


def gradients_of(
    parameters: Sequence[Tensor], layouts: npt.NDArray[np.int64]
) -> tuple[list[Any], npt.NDArray[np.uint64], int, int]:
    """Return `.grad` of all parameters, addresses, how many gradients there are, and how many have an address.

    Those are tensors of torch's own class that lie in memory as a `LAYOUT` says; the address of all others is 0.
    """
    addresses = np.empty(len(parameters), np.uint64)
    gradients, present, plain = _gradients(tuple(parameters), layouts, addresses)
    return gradients, addresses, present, plain
