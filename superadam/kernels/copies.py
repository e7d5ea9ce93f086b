"""Copies that are made also where no memory is left, because what they publish can no longer be taken back."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from superadam.kernels.torch_private import foreach_copy_, is_short_of_memory


def copy_each(targets: Sequence[Tensor], sources: Sequence[Tensor], *, non_blocking: bool = False) -> None:
    """Copy each source into its target, of the same shape and dtype, in one call.

    Where the strides of both differ, torch copies between host and device through memory that it allocates. If there is
    none, the elements are copied in pieces that need none, which takes long.
    """
    if not targets:  # torch takes no empty lists
        return
    try:
        foreach_copy_(list(targets), list(sources), non_blocking=non_blocking)
    except Exception as error:
        if not is_short_of_memory(error):
            raise
        for target, source in zip(targets, sources, strict=True):
            copy_one(target, source, non_blocking)


def copy_one(target: Tensor, source: Tensor, non_blocking: bool = False) -> None:
    """Copy a source into its target, of the same shape and dtype, in pieces if need be, as `copy_each`."""
    try:
        target.copy_(source, non_blocking=non_blocking)
    except Exception as error:
        if not is_short_of_memory(error) or target.numel() <= 1:
            raise
        sizes, strides = target.shape, target.stride()
        outermost = max(range(target.dim()), key=lambda one: (sizes[one] > 1, strides[one]))
        for index in range(sizes[outermost]):
            copy_one(target.select(outermost, index), source.select(outermost, index), non_blocking)
