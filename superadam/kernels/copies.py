"""Memory of tensors: whether it is there, and copies that succeed also where none is left."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from superadam.kernels.torch_private import foreach_copy_, is_short_of_memory


def copy_each(targets: Sequence[Tensor], sources: Sequence[Tensor], *, non_blocking: bool = False) -> None:
    """Copy each source into its target, of the same shape and dtype, in one call.

    For strides that differ torch allocates memory. If there is none, tensors are copied in pieces that need none.
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
    """Do the same for one pair."""
    try:
        target.copy_(source, non_blocking=non_blocking)
    except Exception as error:
        if not is_short_of_memory(error) or target.numel() <= 1:
            raise
        sizes, strides = target.shape, target.stride()
        outermost = max(range(target.dim()), key=lambda one: (sizes[one] > 1, strides[one]))
        for index in range(sizes[outermost]):
            copy_one(target.select(outermost, index), source.select(outermost, index), non_blocking)


def has_memory(tensor: Tensor) -> bool:
    """Whether a strided tensor's storage holds its elements; it may have been freed or, on meta, never allocated."""
    if not tensor.numel():
        return True
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    needed = (tensor.storage_offset() + last + 1) * tensor.element_size()
    return not tensor.is_meta and tensor.untyped_storage().nbytes() >= needed
