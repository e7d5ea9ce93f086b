"""Host memory that a GPU copies from and to directly: pinned slabs, and what is held for copies under way.

Slabs are pinned before training, because pinning during a step stalls the device. What does not fit into them lies in
pageable memory, which is slower. torch's own pinned memory is not used: it is rounded up to powers of two.
"""

from __future__ import annotations

import collections
import logging
import threading
import weakref
from collections.abc import Hashable

import torch
from torch import Tensor

from superadam.devices.interface import Event
from superadam.devices.slab import PinningError, Registrar, Slab
from superadam.host.memory import gigabytes

SLAB_BYTES = 2 << 30  # drivers register huge ranges slowly, or not at all; a slab's end is too short for some buffers

_logger = logging.getLogger("superadam")

_Held = dict[Hashable, collections.deque[tuple[Event, Tensor]]]


class PinnedMemory:
    """Allocates host memory, from any thread; `pageable_bytes` counts all requests that did not fit into the slabs."""

    def __init__(self, registrar: Registrar) -> None:
        self.pageable_bytes = 0
        self._registrar = registrar
        self._slabs: list[Slab] = []
        self._lock = threading.Lock()  # of the slabs and of what is held
        self._held: _Held = {}
        weakref.finalize(self, _settle, self._held).atexit = False

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
            with self._lock:
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
        with self._lock:
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
        with self._lock:
            self._held.setdefault(queue, collections.deque()).append((event, tensor))

    def close(self) -> None:
        """Wait for what is held and release every slab once no tensor lies in it; later tensors are pageable."""
        with self._lock:
            held = dict(self._held)
            self._held.clear()
            self._slabs.clear()
        _settle(held)

    def _drop_passed(self) -> None:
        passed = []  # dropped outside the lock: that may run other finalizers
        with self._lock:
            for queue in self._held.values():
                while queue and queue[0][0].query():
                    passed.append(queue.popleft())


def _settle(held: _Held) -> None:
    for queue in held.values():
        for event, _ in queue:
            event.synchronize()
    held.clear()
