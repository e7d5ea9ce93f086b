"""A simulated device in host memory: `CudaDevice` as it is, on an accelerator that behaves as badly as one may.

A schedule that lacks a wait computes wrong values here, which plain host execution would hide
(`superadam.testing.accelerator` says how). Host memory is filled with NaN when it is handed out.

A model computes at once, and only what the scheduler enqueues is late, and what `late` returns. Inside `computing()`
the model computes late as well: its tensors are those that `there` returns, and what is computed from them.
"""

from __future__ import annotations

import ctypes
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from superadam.devices.cuda import CudaDevice
from superadam.devices.flat import FlatLayout
from superadam.devices.interface import ChunkSums
from superadam.devices.worker import Job, Work, Worker
from superadam.distributed.shards import local_of
from superadam.host.signals import THIS_THREAD
from superadam.kernels.copies import copy_each
from superadam.kernels.hyperparameters import Coefficients
from superadam.kernels.resident_step import ResidentStep
from superadam.testing.accelerator import Questions, SimulatedAccelerator

PINNED_BYTES = 1 << 18
"""Memory of the host that is pinned from the beginning."""


class SimulatedDevice(CudaDevice):
    """A `CudaDevice` on a simulated accelerator; it does not report its free memory, so that runs repeat.

    Args:
        seed: decides every choice; the same seed gives the same run.
        eagerness: chance that one more operation runs whenever the device is used; 0 leaves everything to waits.
    """

    def __init__(self, seed: int, eagerness: float = 0.3) -> None:
        self._cuda = self._gpu = self.accelerator = SimulatedAccelerator(seed, eagerness)
        super().__init__("cuda:0")
        self.device = torch.device("cpu")
        self._models = [self.accelerator.first]
        self.pinned.grow(PINNED_BYTES, 0)

    def free_bytes(self) -> int | None:  # type: ignore[override]
        return None

    def is_host(self, tensor: Tensor) -> bool:
        return self.accelerator.is_host(local_of(tensor))

    @property
    def has_memory_in_use(self) -> bool:
        """Whether a tensor lies in memory of the device."""
        self.accelerator.collect()
        return any(not block.is_on_host for block in self.accelerator.blocks.values())

    # ---- the model ---------------------------------------------------------------------------------------------------

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Enqueue the model's operations, too."""
        self.accelerator.is_late = True
        with self.accelerator.dispatching(allocates=False), Questions(self.accelerator):
            yield

    def there(self, tensor: Tensor) -> Tensor:
        """Return a copy of a tensor of the host on the device."""
        return self.accelerator.there(tensor.detach())

    def switch(self, number: int) -> None:
        """Make another one of the model's streams the current one; 0 is the one at the beginning."""
        while number >= len(self._models):
            self._models.append(self.accelerator.Stream())
        self.accelerator.set_stream(self._models[number])

    def late(self, values: Tensor, *, on_host: bool = False) -> Tensor:
        """Return a dense tensor that the current stream fills with these values late; until then it holds NaN.

        So are gradients when hooks see them, and where `on_host`, those that are being copied to host memory.
        """
        tensor = self.accelerator.allocate(values, is_on_host=on_host)
        target, source = self.accelerator.alias(tensor), values.detach().clone()
        self.accelerator.current_stream().enqueue(lambda: copy_each([target], [source]))
        return tensor

    def finish(self) -> None:
        """Run everything that was enqueued."""
        self.accelerator.finish()

    # ---- as CudaDevice, whose operations are enqueued ----------------------------------------------------------------

    def pack(
        self, gradients: Sequence[Tensor], layout: FlatLayout[Any], dtype: torch.dtype, norm: ChunkSums | None = None
    ) -> Tensor:
        if not self.accelerator.is_late:  # the model may write to them at once
            if any(map(self.accelerator.block_of, gradients)):
                self._settle()
            gradients = [gradient.detach().clone() for gradient in gradients]
        with self.accelerator.dispatching(allocates=True):
            return super().pack(gradients, layout, dtype, norm)

    def update(self, steps: Sequence[ResidentStep], sets: Sequence[Coefficients]) -> None:
        super().update(steps, sets)
        self._settle()

    def scatter(self, sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
        with self.accelerator.dispatching(allocates=False):
            super().scatter(sources, targets)
        self._settle()

    def put(self, buffer: Tensor, index: Tensor, values: Tensor) -> None:
        with self.accelerator.dispatching(allocates=False):
            super().put(buffer, index, values)
        self._settle()

    def host_empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        for slab in self.pinned._slabs:  # what is free holds NaN, as if another program of the host had used it
            returned = [(lease.begin, lease.begin + lease.size) for lease in list(slab._returned)]  # others return more
            for begin, end in (*slab._gaps.ranges, *returned):
                ctypes.memset(slab._address + begin, 0xFF, end - begin)
        tensor = super().host_empty(numel, dtype)
        return tensor if self.accelerator.is_pinned(tensor) else self.accelerator.allocate(tensor, is_on_host=True)

    def _keep(self, tensors: Iterable[Tensor], stream: Any) -> None:
        used_by: Any = self._stream(stream)
        for block in map(self.accelerator.block_of, tensors):
            if block is not None and block.stream is not used_by:
                block.used_by.append(used_by)

    def _settle(self) -> None:
        """Let a model that computes at once find what was enqueued to its stream."""
        if not self.accelerator.is_late:
            self.accelerator.current_stream().synchronize()

    def start_worker(self, idle: Work) -> Worker:
        return SeededWorker(self.accelerator.random, idle)


class SeededWorker(Worker):
    """A worker without a thread: its jobs run inside the training thread's calls, as late as the seed says."""

    def __init__(self, choices: random.Random, idle: Work) -> None:
        super().__init__(idle)
        self._random = choices

    def _start(self) -> None: ...

    def is_awaited(self) -> bool:
        return self._random.random() < 0.5

    def submit(self, job: Job) -> None:
        """Add a job, and perhaps run some."""
        super().submit(job)
        while not self.is_idle and self._random.random() < 0.5:
            self._calls.get()()

    def _wait(self) -> None:
        while not self.is_idle:
            self._calls.get()()

    def wake(self) -> None:
        while self._random.random() < 0.5 and self._run(self._idle):
            pass

    def close(self) -> None:
        self._wait()

    def _run(self, work: Callable[[], object]) -> bool:
        with THIS_THREAD.deferred_signals:  # no handler runs in a worker's thread
            return super()._run(work)
