"""What memory a strided tensor has; does not import the module in C, so that every other one can ask."""

from __future__ import annotations

from torch import Tensor

from superadam.host.signals import THIS_THREAD


def extent_of(tensor: Tensor) -> int:
    """Return the bytes from the first element of a strided tensor to behind its last one, gaps included."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size() if tensor.numel() else 0


def is_expanded(tensor: Tensor) -> bool:
    """Whether elements of a strided tensor share memory."""
    repeated = (size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return bool(tensor.numel()) and any(repeated)  # numpy gives empty arrays strides of 0


def has_memory(tensor: Tensor) -> bool:
    """Whether a strided tensor's storage holds its elements.

    It may have been freed, be that of a handle (`x.data = p.grad`) or, on meta, never have been allocated.
    """
    if not tensor.numel():
        return True
    needed = tensor.storage_offset() * tensor.element_size() + extent_of(tensor)
    with THIS_THREAD.without_handlers:
        try:
            storage = tensor.untyped_storage()
            storage.data_ptr()
            return not tensor.is_meta and storage.nbytes() >= needed
        except NotImplementedError:  # of a transform of torch.func, which reads another tensor
            return True
        except RuntimeError:  # of a wrapper, as a handle is one
            return False
