"""A simulated asynchronous device in host memory, which behaves as badly as a real device may.

A schedule that lacks a wait computes wrong values here, which plain host execution would hide:

- Copies happen late, in any order that streams and events allow, drawn from a seed.
- Waiting on an event that was not recorded orders nothing.
- Dropped memory is filled with NaN at once, or when the stream that it was recorded for has passed.

The model computes on the current stream, at once; only what the scheduler enqueues there is late, and what `late`
returns. The model may have several streams, one of which is the current one (`switch`).
"""

from __future__ import annotations

import collections
import math
import random
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from superadam.devices.flat import FlatLayout
from superadam.devices.interface import ChunkSums, Device, Event, Stream
from superadam.devices.worker import Job, Work, Worker
from superadam.host.signals import deferred_signals
from superadam.kernels.hyperparameters import Coefficients
from superadam.kernels.memory import has_memory
from superadam.kernels.resident_step import ResidentStep
from superadam.kernels.torch_private import storage_key
from superadam.testing import stand_in

_Queue = Stream | int
"""A stream of the device, or another one of the model, by its number."""


class SimulatedEvent:
    """A point in a simulated stream."""

    def __init__(self, device: SimulatedDevice, *, is_recorded: bool = False) -> None:
        self._device, self.is_recorded = device, is_recorded
        self.has_passed = False

    def query(self) -> bool:
        return self.has_passed

    def synchronize(self) -> None:
        """Run the device until the point has passed; return at once if it was never recorded."""
        self._device.run_until(self)


@dataclass(slots=True)
class Operation:
    """Something enqueued to a stream: runs once the events in `after` have passed, then lets `event` pass."""

    run: Callable[[], None]
    after: tuple[SimulatedEvent, ...] = ()
    event: SimulatedEvent | None = None


@dataclass(slots=True)
class Block:
    """Allocated memory, and the points that must pass before it may be reused."""

    storage: torch.UntypedStorage
    kept_for: list[tuple[_Queue, SimulatedEvent]] = field(default_factory=list)


def _poison(storage: torch.UntypedStorage) -> None:
    torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage).fill_(0xFF)


def _alias(tensor: Tensor) -> Tensor:
    """Return a tensor over the same storage whose lifetime and version counter are its own."""
    return torch.empty(0, dtype=tensor.dtype, device="cpu").set_(
        tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride()
    )


class SimulatedDevice(Device):
    """Streams that run when the seed says so; the same seed gives the same run.

    `eagerness` is the chance that one more operation runs whenever the device is used; 0 leaves everything to waits.
    """

    can_update = True

    def __init__(self, seed: int, eagerness: float = 0.3) -> None:
        self._random = random.Random(seed)
        self._lock = threading.RLock()  # backwards may run in several threads
        self._eagerness = eagerness
        self._streams: dict[_Queue, collections.deque[Operation]] = {stream: collections.deque() for stream in Stream}
        self._current: _Queue = Stream.CURRENT
        self._late: dict[_Queue, SimulatedEvent] = {}  # the last of what each stream fills late
        self._host_blocks: set[int] = set()
        self._blocks: dict[int, Block] = {}

    def switch(self, number: int) -> None:
        """Make another one of the model's streams the current one; 0 is the one at the beginning."""
        with self._lock:  # another thread may look which stream has something to do
            self._current = number or Stream.CURRENT
            self._streams.setdefault(self._current, collections.deque())

    def late(self, values: Tensor, *, on_host: bool = False) -> Tensor:
        """Return a dense tensor that the current stream fills with these values late; until then it holds NaN.

        So are gradients when hooks see them, and where `on_host`, those that are being copied to host memory.
        """
        memory = np.full(max(values.nbytes, 1), 0xFF, np.uint8)
        held = memory.view()  # while the storage of the tensor lives
        tensor, target = (_over(one, values) for one in (held, memory))
        source = values.detach().clone()
        if on_host:
            key = storage_key(tensor.untyped_storage())
            self._host_blocks.add(key)
            weakref.finalize(held, self._host_blocks.discard, key)
        filled = self._late[self._current] = SimulatedEvent(self, is_recorded=True)
        self._enqueue(Stream.CURRENT, Operation(lambda: _copy([target], [source]), event=filled))
        return tensor

    def mark_ready(self, parameter: Tensor) -> Event | None:
        """Return an event where the current stream still has to fill something; gradients are there otherwise."""
        filled = self._late.get(self._current)
        return None if filled is None or filled.has_passed else super().mark_ready(parameter)

    def finish(self) -> None:
        """Run everything that was enqueued."""
        while self._run_one():
            pass

    def _runnable(self) -> list[_Queue]:
        return [
            stream
            for stream, operations in self._streams.items()
            if operations and all(event.has_passed for event in operations[0].after)
        ]

    def _run_one(self) -> bool:
        with deferred_signals(), self._lock:  # signals do not interrupt a device
            streams = self._runnable()
            if not streams:
                return False
            operation = self._streams[self._random.choice(streams)].popleft()
            operation.run()
            if operation.event is not None:
                operation.event.has_passed = True
        return True

    def progress(self) -> None:
        """Run operations for as long as the seed says."""
        while self._random.random() < self._eagerness and self._run_one():
            pass

    def run_until(self, event: SimulatedEvent) -> None:
        """Run operations until the event has passed."""
        with self._lock:
            while event.is_recorded and not event.has_passed:
                if not self._run_one():
                    raise RuntimeError("the simulated device is stuck: streams wait for one another in a circle")

    def _queue(self, stream: Stream) -> _Queue:
        return self._current if stream is Stream.CURRENT else stream

    def _enqueue(self, stream: Stream, operation: Operation) -> None:
        with deferred_signals(), self._lock:
            self._streams[self._queue(stream)].append(operation)

    def is_host(self, tensor: Tensor) -> bool:
        return storage_key(tensor.untyped_storage()) in self._host_blocks

    def pack(
        self, gradients: Sequence[Tensor], layout: FlatLayout[Any], dtype: torch.dtype, norm: ChunkSums | None = None
    ) -> Tensor:
        self.progress()
        if any(storage_key(gradient.untyped_storage()) in self._blocks for gradient in gradients):
            self.record(Stream.CURRENT).synchronize()  # which fills what was packed before
        packed = self._allocate(layout.numel, dtype)
        targets = layout.views(_alias(packed))
        sources = [gradient.detach().clone() for gradient in gradients]  # the caching allocator keeps them that long
        self._enqueue(Stream.CURRENT, Operation(lambda: _copy(targets, sources)))
        if norm is not None:
            sums, nonfinite = _alias(norm.sums), _alias(norm.nonfinite)
            self._enqueue(Stream.CURRENT, Operation(lambda: _take_norm(targets, sums, nonfinite)))
        return packed

    def update(self, steps: Sequence[ResidentStep], sets: Sequence[Coefficients]) -> None:
        self.record(Stream.CURRENT).synchronize()
        stand_in.update(steps, sets)

    def scatter(self, sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
        self.record(Stream.CURRENT).synchronize()
        _copy([target.data for target in targets], sources)

    def put(self, buffer: Tensor, index: Tensor, values: Tensor) -> None:
        self.record(Stream.CURRENT).synchronize()
        if all(map(has_memory, (buffer, index, values))):
            super().put(buffer, index, values)

    def host_empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        tensor = self._allocate(numel, dtype)
        key = storage_key(tensor.untyped_storage())
        self._host_blocks.add(key)
        weakref.finalize(tensor, self._host_blocks.discard, key)
        return tensor

    def empty(self, numel: int, dtype: torch.dtype, stream: Stream) -> Tensor:
        return self._allocate(numel, dtype)

    def copy(self, destination: Tensor, source: Tensor, stream: Stream) -> None:
        target, origin = _alias(destination), _alias(source)
        self._enqueue(stream, Operation(lambda: _copy([target], [origin])))
        self.progress()

    def record(self, stream: Stream) -> SimulatedEvent:
        event = SimulatedEvent(self, is_recorded=True)
        self._enqueue(stream, Operation(lambda: None, event=event))
        self.progress()
        return event

    def wait(self, stream: Stream, event: SimulatedEvent) -> None:  # type: ignore[override]
        """Order a stream behind an event; the current stream, which runs at once, waits at once."""
        if not event.is_recorded:
            return
        if stream is Stream.CURRENT:
            self.run_until(event)
        else:
            self._enqueue(stream, Operation(lambda: None, (event,)))

    def record_stream(self, buffer: Tensor, stream: Stream) -> None:
        kept_for = self._blocks[storage_key(buffer.untyped_storage())].kept_for
        kept_for.append((self._queue(stream), self.record(stream)))

    def start_worker(self, idle: Work) -> SeededWorker:
        return SeededWorker(self._random, idle)

    def _allocate(self, numel: int, dtype: torch.dtype) -> Tensor:
        tensor = _alias(torch.empty(max(numel, 1), dtype=dtype, device="cpu")[:numel])  # empty memory has an address
        storage = tensor.untyped_storage()
        _poison(storage)
        key = storage_key(storage)  # of the storage that the block owns: an address would change when others resize it
        self._blocks[key] = Block(_alias(tensor).untyped_storage())
        weakref.finalize(tensor, self._free, key)
        _let_views_keep(tensor)
        return tensor

    def _free(self, key: int) -> None:
        block = self._blocks.pop(key)
        events = tuple(event for _, event in block.kept_for)
        if all(event.has_passed for event in events):
            _poison(block.storage)
        else:
            self._streams[block.kept_for[-1][0]].append(Operation(lambda: _poison(block.storage), events))


def _over(memory: np.ndarray[Any, Any], like: Tensor) -> Tensor:
    """Return a tensor over memory, with the shape, strides and dtype of another one, whose storage is its own."""
    storage = torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()
    return torch.empty(0, dtype=like.dtype, device="cpu").set_(storage, 0, like.shape, like.stride())


def _let_views_keep(buffer: Tensor) -> None:
    """Let views of a buffer keep it alive, also those made in a dispatch mode, where torch records no base."""
    owner = weakref.ref(buffer)

    def as_strided(*layout: Any) -> Tensor:
        tensor = owner()
        assert tensor is not None
        view = Tensor.as_strided(tensor, *layout)
        view.base_of_view = tensor  # type: ignore[attr-defined]
        return view

    buffer.as_strided = as_strided  # type: ignore[assignment, method-assign]


def _copy(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy; memory that others freed by resizing its storage is not touched, and reads as NaN."""
    with torch.no_grad():
        for target, source in zip(targets, sources, strict=True):
            if not has_memory(target):
                continue
            if has_memory(source):
                target.copy_(source)
            else:
                target.fill_(math.nan if target.is_floating_point() else 0)


def _take_norm(gradients: Sequence[Tensor], sums: Tensor, nonfinite: Tensor) -> None:
    if not all(map(has_memory, (*gradients, sums, nonfinite))):
        return
    stand_in.take_norm(gradients, ChunkSums(sums, nonfinite))


class SeededWorker(Worker):
    """A worker without a thread: its jobs run inside the training thread's calls, as late as the seed says."""

    def __init__(self, choices: random.Random, idle: Work) -> None:
        super().__init__(idle)
        self._random = choices
        self._jobs: collections.deque[Job] = collections.deque()

    @property
    def is_idle(self) -> bool:
        return not self._jobs

    def submit(self, job: Job) -> None:
        """Add a job, unless an earlier one has failed, and perhaps run some."""
        if self._error is not None:
            return
        self._jobs.append(job)
        while self._jobs and self._random.random() < 0.5:
            self._run_one()

    def drain(self) -> None:
        self.close()
        self._raise_error()

    def wake(self) -> None:
        while self._random.random() < 0.5 and self._idle():
            pass

    def close(self) -> None:
        while self._jobs:
            self._run_one()

    def _run_one(self) -> None:
        try:
            self._jobs.popleft()(lambda: self._random.random() < 0.5)
        except Exception as error:
            self._error = error
            self._jobs.clear()
