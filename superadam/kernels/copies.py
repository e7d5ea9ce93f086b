"""Copies that succeed also where no memory is left."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from superadam.kernels import native
from superadam.kernels.torch_private import foreach_copy_, is_short_of_memory


def copy_each(targets: Sequence[Tensor], sources: Sequence[Tensor], *, non_blocking: bool = False) -> None:
    """Copy each source into its target, of the same shape and dtype, in one call.

    For strides that differ torch allocates memory. If there is none, tensors are copied in pieces that need none. Into
    tensors that are negated lazily it copies one at a time only.
    """
    if not targets:  # torch takes no empty lists
        return
    try:
        foreach_copy_(list(targets), list(sources), non_blocking=non_blocking)
    except Exception as error:
        if not is_short_of_memory(error) and not any(target.is_neg() for target in targets):
            raise
        for target, source in zip(targets, sources, strict=True):
            copy_one(target, source, non_blocking=non_blocking)


def copy_one(target: Tensor, source: Tensor, *, non_blocking: bool) -> None:
    """Do the same for one pair."""
    try:
        target.copy_(source, non_blocking=non_blocking)
    except Exception as error:
        if not is_short_of_memory(error) or target.numel() <= 1:
            raise
        sizes, strides = target.shape, target.stride()
        outermost = max(range(target.dim()), key=lambda dim: (sizes[dim] > 1, strides[dim]))
        for index in range(sizes[outermost]):
            copy_one(target.select(outermost, index), source.select(outermost, index), non_blocking=non_blocking)


def copy_on_kernel_threads(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy each plain source into a dense target of its shape and dtype on the CPU, in one call where that can be.

    Where other threads have the cores, torch would wait in each copy until all of its threads had one.
    """
    alike: list[tuple[Tensor, Tensor]] = []
    for target, source in zip(targets, sources, strict=True):
        if source.is_cpu and source.stride() == target.stride():
            alike.append((target, source))
        else:
            target.copy_(source)
    native.copy(
        np.array([target.data_ptr() for target, _ in alike], np.uint64),
        np.array([source.data_ptr() for _, source in alike], np.uint64),
        np.array([source.nbytes for _, source in alike], np.int64),
    )


def is_plain(tensor: Tensor) -> bool:
    """Whether a tensor is what lies in its memory: strided, no subclass, nested, quantized, conjugated or negated."""
    is_ordinary = type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided
    return is_ordinary and not (tensor.is_nested or tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
