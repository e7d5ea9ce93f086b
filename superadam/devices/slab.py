"""A slab of pinned host memory, and the tensors allocated in it.

The storage of a tensor holds a lease on its range, and the lease holds the slab: a range is free again when no tensor
and no view over it is left, and the slab is released when it is no longer referenced and its last range is free.
"""

from __future__ import annotations

import collections
import ctypes
import logging
import mmap
import os
import weakref
from contextlib import suppress
from typing import Any, Protocol

import torch
from torch import Tensor

from superadam.devices.gaps import Gaps
from superadam.host.memory import gigabytes

PAGE_BYTES = mmap.PAGESIZE
"""Ranges are whole pages: rounded sizes recur, so that gaps fit again."""

_logger = logging.getLogger("superadam")
_left_to_parent: list[mmap.mmap] = []


class PinningError(RuntimeError):
    """Host memory could not be mapped, or not be registered with the driver."""


class Registrar(Protocol):
    """Pins memory and unpins it."""

    def register(self, address: int, size: int) -> None:
        """Pin `size` bytes from `address` on; raises `PinningError`."""

    def unregister(self, address: int) -> None:
        """Undo `register`; raises `PinningError`."""


class _Lease(weakref.ref[Any]):
    """A reference to what keeps a range taken, whose callback is a function of C: no signal can interrupt it."""

    __slots__ = ("begin", "size")
    begin: int
    size: int


class Slab:
    """Pinned memory of `size` bytes, rounded up to whole pages, handed out in ranges; raises PinningError.

    Not thread-safe, except that ranges may be returned from any thread.
    """

    def __init__(self, size: int, registrar: Registrar) -> None:
        self.size = in_pages(size)
        try:
            memory = mmap.mmap(-1, self.size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, OverflowError, ValueError) as error:
            raise PinningError(f"{gigabytes(self.size)} of host memory could not be mapped: {error}") from error
        # A forked process would get its own copy of every pinned page, at once; it has no use for them.
        for advice in (mmap.MADV_DONTFORK, mmap.MADV_HUGEPAGE):
            with suppress(OSError):  # kernels may lack huge pages
                memory.madvise(advice)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        try:
            registrar.register(self._address, self.size)
        except BaseException:
            memory.close()
            raise
        self._gaps = Gaps(self.size)
        # Leases end in any thread at any moment, also while this object is in use: they only append here.
        self._returned: collections.deque[_Lease] = collections.deque()
        self._leases: dict[int, _Lease] = {}  # by where they begin
        weakref.finalize(self, _let_go, memory, self._address, registrar, os.getpid()).atexit = False

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor | None:
        """Return a flat tensor of at least one element, or None where no gap is large enough."""
        size = in_pages(numel * dtype.itemsize)
        self._collect()
        begin = self._gaps.allocate(size)
        if begin is None:
            return None
        lease: Any = (ctypes.c_char * size).from_address(self._address + begin)
        lease.slab = self
        reference = _Lease(lease, self._returned.append)
        reference.begin, reference.size = begin, size
        self._leases[begin] = reference
        return torch.frombuffer(lease, dtype=dtype, count=numel)

    @property
    def free(self) -> list[tuple[int, int]]:
        """First byte and end of every range that is not taken."""
        self._collect()
        return self._gaps.ranges

    def _collect(self) -> None:
        while self._returned:
            ended = self._returned.popleft()
            del self._leases[ended.begin]
            self._gaps.free(ended.begin, ended.size)


def in_pages(size: int) -> int:
    """Return `size` rounded up to whole pages."""
    return -(-size // PAGE_BYTES) * PAGE_BYTES


def _let_go(memory: mmap.mmap, address: int, registrar: Registrar, process: int) -> None:
    """Unregister and unmap what no lease needs any more."""
    if os.getpid() != process:  # a fork inherited neither mapping nor driver; another mapping may be there now
        _left_to_parent.append(memory)
        return
    try:
        registrar.unregister(address)
    except Exception:
        _left_to_parent.append(memory)  # the device may still write there
        _logger.warning("superadam could not unpin %s of host memory; it stays taken", gigabytes(len(memory)))
    else:
        memory.close()
