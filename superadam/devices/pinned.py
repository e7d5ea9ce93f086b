"""Host memory that a GPU copies from and to directly: pinned slabs, and what is held for copies under way.

Slabs are pinned before training, because pinning during a step stalls the device. What does not fit into them lies in
pageable memory, which is slower. torch's own pinned memory is not used: it is rounded up to powers of two.

The storage of a tensor holds a lease on its range, and the lease holds the slab. So a range is free again when no
tensor and no view over it is left, and the slab is released when nothing refers to it and its last range is free.
"""

from __future__ import annotations

import collections
import ctypes
import logging
import mmap
import threading
import weakref
from collections.abc import Hashable
from contextlib import suppress
from typing import Any, Protocol

import torch
from torch import Tensor

from superadam.devices.interface import Event
from superadam.host import forks
from superadam.host.memory import gigabytes, lockable_bytes
from superadam.host.signals import THIS_THREAD

SLAB_BYTES = 2 << 30  # drivers register huge ranges slowly, or not at all; a slab's end is too short for some buffers
PAGE_BYTES = mmap.PAGESIZE  # of which ranges have a whole number, so that the same sizes recur and gaps fit again
PORTABLE = 1  # cudaHostRegister...: pinned for every device of the process

_logger = logging.getLogger("superadam")
_left_pinned: list[mmap.mmap] = []

_Held = dict[Hashable, collections.deque[tuple[Event, Tensor]]]


class PinningError(RuntimeError):
    """Host memory could not be mapped, or not be registered with the driver."""


class Registrar(Protocol):
    """Pins memory and unpins it."""

    def register(self, address: int, size: int) -> None:
        """Pin `size` bytes from `address` on, which is slow; raises PinningError."""

    def unregister(self, address: int) -> None:
        """Undo `register`; raises PinningError."""


class CudaRegistrar:
    """Pins host memory with the driver of CUDA or HIP, in the context of `device`; `cuda` is `torch.cuda`."""

    def __init__(self, device: torch.device, cuda: Any = torch.cuda) -> None:
        self._device, self._cuda = device, cuda

    def register(self, address: int, size: int) -> None:
        reason = self._refusal("cudaHostRegister", address, size, PORTABLE)
        if reason is not None:
            limit = lockable_bytes()
            may_lock = "without limit" if limit is None else f"at most {gigabytes(limit)}"
            raise PinningError(
                f"the driver refused to pin {gigabytes(size)} of host memory ({reason}), of which this process may "
                f"lock {may_lock} (RLIMIT_MEMLOCK); run `ulimit -l unlimited` before it, or give it more memory"
            )

    def unregister(self, address: int) -> None:
        reason = self._refusal("cudaHostUnregister", address)
        if reason is not None:
            raise PinningError(f"the driver refused to unpin host memory ({reason})")

    def _refusal(self, function: str, *arguments: int) -> str | None:
        """Call the driver; return what its error means, if there is one, and clear it: torch would raise it later."""
        with self._cuda.device(self._device):
            cudart: Any = self._cuda.cudart()
            code = getattr(cudart, function)(*arguments)
            if int(code) == 0:
                return None
            with suppress(RuntimeError):
                torch.ones(1, device=self._device)  # launches a kernel, as zeros does not in every torch
            return f"{cudart.cudaGetErrorString(code)}, code {int(code)}"


class Gaps:
    """The free ranges of `size` bytes: sorted pairs of first byte and end, no two of which touch."""

    def __init__(self, size: int) -> None:
        self.ranges = [(0, size)] if size else []

    def allocate(self, size: int) -> int | None:
        """Return the first byte of the first gap of `size` bytes; None where there is none."""
        for index, (begin, end) in enumerate(self.ranges):
            if end - begin >= size:
                self.ranges[index : index + 1] = [(begin + size, end)] if end - begin > size else []
                return begin
        return None

    def free(self, begin: int, size: int) -> None:
        """Make a range free that `allocate` returned, and join it with its neighbours."""
        joined: list[tuple[int, int]] = []
        for first, end in sorted([*self.ranges, (begin, begin + size)]):
            if joined and joined[-1][1] == first:
                first = joined.pop()[0]
            joined.append((first, end))
        self.ranges = joined


class Lease(weakref.ref[Any]):
    """A reference to what keeps memory taken, whose callback is a function of C: no signal can interrupt it."""

    __slots__ = ("begin", "size")
    begin: int
    size: int


class Slab:
    """Pinned memory of `size` bytes, rounded up to whole pages, handed out in ranges; raises PinningError.

    Not thread-safe, except that ranges may be returned from any thread.
    """

    def __init__(self, size: int, registrar: Registrar) -> None:
        self.size = _in_pages(size)
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
        self._returned: collections.deque[Lease] = collections.deque()
        self._leases: dict[int, Lease] = {}  # by where they begin
        forks.finalize(self, _let_go, memory, self._address, registrar)  # a fork inherits neither mapping nor driver

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor | None:
        """Return a flat tensor of at least one element, or None where no gap is large enough."""
        size = _in_pages(numel * dtype.itemsize)
        while self._returned:
            ended = self._returned.popleft()
            del self._leases[ended.begin]
            self._gaps.free(ended.begin, ended.size)
        begin = self._gaps.allocate(size)
        if begin is None:
            return None
        lease: Any = (ctypes.c_char * size).from_address(self._address + begin)
        lease.slab = self
        reference = Lease(lease, self._returned.append)
        reference.begin, reference.size = begin, size
        self._leases[begin] = reference
        return torch.frombuffer(lease, dtype=dtype, count=numel)


def _in_pages(size: int) -> int:
    return -(-size // PAGE_BYTES) * PAGE_BYTES


def _let_go(memory: mmap.mmap, address: int, registrar: Registrar) -> None:
    """Unregister and unmap what no lease needs any more."""
    with THIS_THREAD.without_handlers:  # Ctrl-C ends nothing half-way
        try:
            registrar.unregister(address)
        except Exception:
            _left_pinned.append(memory)  # the device may still write there
            _logger.warning("superadam could not unpin %s of host memory; it stays taken", gigabytes(len(memory)))
        else:
            memory.close()


class PinnedMemory:
    """Allocates host memory, from any thread; `pageable_bytes` counts all requests that did not fit into the slabs."""

    def __init__(self, registrar: Registrar) -> None:
        self.pageable_bytes = 0
        self._registrar = registrar
        self._slabs: list[Slab] = []
        self._lock = threading.Lock()  # of the slabs and of what is held; a handler inside could wait for the worker
        self._held: _Held = {}
        forks.finalize(self, _settle, self._held)

    @property
    def size(self) -> int:
        """Bytes of all slabs, taken or free."""
        return sum(slab.size for slab in self._slabs)

    def grow(self, size: int, largest: int) -> None:
        """Pin `size` more bytes, or as many as can be, with a warning; every slab holds the `largest` buffer."""
        missing = size = max(size, largest) + size // SLAB_BYTES * largest
        attempt = min(size, max(largest, SLAB_BYTES))
        refusal: PinningError | None = None
        while missing > 0 and attempt >= max(largest, 1):
            try:
                slab = Slab(max(largest, min(attempt, missing)), self._registrar)
            except PinningError as error:
                refusal = error
                attempt //= 2
                continue
            missing -= slab.size
            with THIS_THREAD.deferred_signals, self._lock:
                self._slabs.append(slab)
        if missing > 0 and refusal is not None:
            _logger.warning(
                "superadam pinned %s of the %s of host memory that copies from and to the device pass through; %s "
                "are pageable, which takes longer and holds up the model: %s",
                *map(gigabytes, (size - missing, size, missing)),
                refusal,
            )

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return a flat tensor, pinned where the slabs have room."""
        self._drop_passed()
        if numel == 0:
            return torch.empty(0, dtype=dtype, device="cpu")
        with THIS_THREAD.deferred_signals, self._lock:
            for slab in self._slabs:
                tensor = slab.empty(numel, dtype)
                if tensor is not None:
                    return tensor
            if not self.pageable_bytes:
                _logger.warning(
                    "superadam needs %s of host memory for one copy, and none of its %s of pinned memory is free in "
                    "one such piece: such copies pass through pageable memory from now on, which takes longer and may "
                    "hold up the model; smaller buckets and more cores free pinned memory sooner",
                    *map(gigabytes, (numel * dtype.itemsize, self.size)),
                )
            self.pageable_bytes += numel * dtype.itemsize
        return torch.empty(numel, dtype=dtype, device="cpu")

    def hold_until(self, tensor: Tensor, event: Event, queue: Hashable) -> None:
        """Keep a tensor's memory until an event has passed; events of one queue pass in the order they are given."""
        with THIS_THREAD.deferred_signals, self._lock:
            self._held.setdefault(queue, collections.deque()).append((event, tensor))

    def close(self) -> None:
        """Wait for what is held and release every slab once no tensor lies in it; later tensors are pageable."""
        with THIS_THREAD.without_handlers:
            with THIS_THREAD.deferred_signals, self._lock:
                held = dict(self._held)
                self._held.clear()
                self._slabs.clear()
            _settle(held)

    def _drop_passed(self) -> None:
        passed = []  # dropped outside the lock: that may run other finalizers
        with THIS_THREAD.deferred_signals, self._lock:
            for queue in self._held.values():
                while queue and queue[0][0].query():
                    passed.append(queue.popleft())


def _settle(held: _Held) -> None:
    for queue in held.values():
        for event, _ in queue:
            event.synchronize()
    held.clear()
