"""Copies are made also where torch finds no memory for them, and other errors are raised."""

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from superadam.kernels import native
from superadam.kernels.copies import copy_each, copy_on_kernel_threads
from superadam.kernels.torch_private import is_short_of_memory


class Full(TorchDispatchMode):
    """Refuses copies for which torch would need memory between host and device: of elements that lie differently."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.aten._foreach_copy_.default:
            raise self.error
        if function is torch.ops.aten.copy_.default and not all(one.is_contiguous() for one in args[:2]):
            raise self.error
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "error", [MemoryError(), torch.OutOfMemoryError("planted"), RuntimeError("CUDA error: out of memory")], ids=repr
)
def test_copies_without_memory_arrive(error):
    targets = [
        torch.zeros(5, 6)[:, ::2],
        torch.zeros(4, 3).t(),
        torch.zeros(2, 3, 4, 2)[..., 0],
        torch.zeros(7),
        torch.zeros(()),
        torch.zeros(0, 2),
        torch.zeros(3, 1, 2)[..., 0],
    ]
    sources = [torch.randn(one.shape) for one in targets]
    with Full(error):
        copy_each(targets, [one.clone() for one in sources])
    assert all(map(torch.equal, targets, sources))


def test_other_errors_of_copies_are_raised():
    with Full(RuntimeError("another")), pytest.raises(RuntimeError, match="another"):
        copy_each([torch.zeros(3)], [torch.ones(3)])


def test_errors_of_torchs_host_memory_are_told_by_their_words():
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 60, dtype=torch.uint8)
    assert not isinstance(caught.value, MemoryError)
    assert is_short_of_memory(caught.value)
    assert is_short_of_memory(RuntimeError("Triton Error [HIP]:  Code: 2, Messsage: out of memory"))
    assert not is_short_of_memory(RuntimeError("a word about memory"))
    assert not is_short_of_memory(ValueError("CUDA error: out of memory"))


def test_each_byte_is_copied_on_kernel_threads(monkeypatch):
    """Of tensors that threads share, end within a thread's portion or lie otherwise, and not one after them."""
    monkeypatch.setattr(native, "_num_threads", 2)
    lengths = [0, 5, *(n * (1 << 18) + more for n in (1, 3) for more in (-1, 0, 1))]
    sources = [torch.arange(n).to(torch.int8).view(-1, 1) for n in lengths]
    sources.append(torch.arange(12).view(3, 4).t())
    memory = [torch.full((one.numel() + 1,), -1, dtype=one.dtype) for one in sources]
    targets = [one[:-1].view(source.shape) for one, source in zip(memory, sources, strict=True)]
    copy_on_kernel_threads(targets, [one.clone() for one in sources])
    assert all(map(torch.equal, targets, sources))
    assert all(one[-1] == -1 for one in memory)
