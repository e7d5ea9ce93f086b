"""Checks the tensors that kernels take, before their addresses are taken.

A kernel sees addresses and lengths: a tensor counts as its elements in the order of memory.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from superadam.kernels.dtypes import DTYPES


def is_pinned(tensor: Tensor) -> bool:
    """Whether the tensor is in pinned host memory, which kernels reach as well."""
    return tensor.is_cpu and tensor.is_pinned()


def words(dtype: torch.dtype | None) -> str:
    """Return how errors write a dtype."""
    return "none" if dtype is None else str(dtype).removeprefix("torch.")


def is_dense(tensor: Tensor) -> bool:
    """Whether the elements lie in memory without gaps, each once, in any order of dimensions."""
    if tensor.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


def check_tensor(tensor: Tensor, name: str, device: torch.device, *, may_be_pinned: bool = False) -> None:
    """Raise unless kernels on `device` may walk over the tensor's memory; `name` is for errors.

    Raises:
        TypeError: its dtype is not one of `DTYPES`, or it is sparse.
        ValueError: it is not dense or out of reach.
    """
    if tensor.dtype not in DTYPES or tensor.layout is not torch.strided:
        expected = ", ".join(map(words, DTYPES))
        raise TypeError(
            f"{name} is {words(tensor.dtype)} of layout {tensor.layout}, expected a strided tensor of {expected}; "
            "convert it first"
        )
    if tensor.device != device and not (may_be_pinned and is_pinned(tensor)):
        expected = f"{device} or pinned memory of the host" if may_be_pinned else str(device)
        raise ValueError(f"{name} is on {tensor.device}, expected {expected}; move it there, or make a list per device")
    if not is_dense(tensor):
        raise ValueError(
            f"{name} has shape {tuple(tensor.shape)} and strides {tensor.stride()}, expected its elements to lie in "
            "memory without gaps; call contiguous() on it"
        )


def check_flat(tensor: Tensor, name: str, dtype: torch.dtype | None, numel: int, device: torch.device) -> None:
    """Raise unless `tensor` is a 1-D buffer of at least `numel` elements that kernels on `device` reach.

    Pinned host memory will do. `name` is for errors; a `dtype` of None stands for any of `DTYPES`.

    Raises:
        TypeError: another dtype.
        ValueError: another shape, too short, or out of reach.
    """
    if tensor.dtype != dtype and not (dtype is None and tensor.dtype in DTYPES):
        expected = ", ".join(map(words, DTYPES)) if dtype is None else words(dtype)
        raise TypeError(f"{name} is {words(tensor.dtype)}, expected {expected}; allocate it so")
    if tensor.dim() != 1 or tensor.numel() < numel or not tensor.is_contiguous():
        raise ValueError(
            f"{name} has shape {tuple(tensor.shape)} and strides {tensor.stride()}, expected one contiguous dimension "
            f"of at least {numel} elements; allocate it so"
        )
    if tensor.device != device and not is_pinned(tensor):
        raise ValueError(
            f"{name} is on {tensor.device}, expected {device} or pinned memory of the host; allocate it there"
        )


def checked_offsets(
    offsets: Sequence[int], lengths: npt.NDArray[np.int64], numel: int, name: str
) -> npt.NDArray[np.int64]:
    """Return where tensors of these lengths begin in the buffer `name` of `numel` elements, as an array.

    Raises ValueError where offsets are missing, or a tensor is outside the buffer or overlaps another.
    """
    array = np.asarray(offsets, np.int64)
    if array.shape != lengths.shape:
        raise ValueError(f"there are {array.size} offsets for {lengths.size} tensors; give one for each tensor")
    if np.any(array < 0) or np.any(array + lengths > numel):
        raise ValueError(
            f"a tensor would lie outside {name} of {numel} elements; expected every offset, plus the elements of its "
            "tensor, to lie within"
        )
    order = np.argsort(array[lengths > 0], kind="stable")
    begins, ends = array[lengths > 0][order], (array + lengths)[lengths > 0][order]
    if np.any(begins[1:] < ends[:-1]):
        raise ValueError(f"two tensors would overlap in {name}; give offsets that leave each tensor its own elements")
    return array


def lengths_of(tensors: Sequence[Tensor]) -> npt.NDArray[np.int64]:
    """Return the elements of each tensor."""
    return np.fromiter((tensor.numel() for tensor in tensors), np.int64, len(tensors))


def addresses_of(tensors: Sequence[Tensor]) -> npt.NDArray[np.int64]:
    """Return the address of each tensor."""
    return np.fromiter((tensor.data_ptr() for tensor in tensors), np.int64, len(tensors))


def checked_addresses(tensors: Sequence[Tensor], name: str) -> npt.NDArray[np.int64]:
    """Return the address of each tensor; raises ValueError for one with elements and no memory."""
    addresses = addresses_of(tensors)
    for position in np.flatnonzero(addresses == 0).tolist():
        if tensors[position].numel() > 0:
            raise ValueError(
                f"{name} {position} of {tensors[position].numel()} elements has no memory, expected its storage to "
                "hold them; resize the storage back before"
            )
    return addresses


def in_memory_order(tensor: Tensor) -> Tensor:
    """Return a dense tensor's elements in one dimension; the view's version counter is its own."""
    return tensor.data.as_strided((tensor.numel(),), (1,))
