"""Where tensors lie: address, storage, version counter and layout, of many tensors in one call.

What a kernel is to touch is looked at in the same call of the optimizer: programs move memory, free it and give it
another shape, and the tensor stays the same object.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

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


_look = torch_private.look_at_places or _look_in_python


def places_of(tensors: list[Tensor] | list[Tensor | None]) -> Places:
    """Return where these tensors lie now; None lies nowhere."""
    places = np.empty((len(tensors), len(_NOTHING)), np.int64)
    _look(tensors, places)
    return places


def moved(now: Places, before: Places) -> npt.NDArray[np.int64]:
    """Return the rows whose memory is another, or is seen in another layout."""
    return np.flatnonzero((now[:, :VERSION] != before[:, :VERSION]).any(axis=1))
