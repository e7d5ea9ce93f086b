"""The interface of devices: streams, events, copies and memory, as the scheduler uses them.

A subclass of `Device` can be passed to `OffloadScheduler(device=...)`. Copies run in the order of their stream; only
events order anything else.
"""

from __future__ import annotations

import abc
import enum
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from superadam.devices.flat import FlatLayout
from superadam.devices.worker import Work, Worker
from superadam.host import cores
from superadam.host.machine import Host
from superadam.host.memory import HostNeeds
from superadam.kernels.hyperparameters import Coefficients
from superadam.kernels.resident_step import ResidentStep


@dataclass(frozen=True, slots=True, eq=False)
class ChunkSums:
    """Where the norm of gradients is written: one entry for each chunk of `native.CHUNK` elements of a gradient."""

    sums: Tensor  # of squares; fp64, with the bits of the CPU kernels
    nonfinite: Tensor  # counts of Inf and NaN; int64

    @staticmethod
    def over(buffer: Tensor) -> ChunkSums:
        """Return both as views of one fp64 buffer of two elements per chunk."""
        chunks = buffer.numel() // 2
        return ChunkSums(buffer[:chunks], buffer[chunks:].view(torch.int64))


class Stream(enum.Enum):
    """A queue of work on the device."""

    __hash__ = object.__hash__  # not a function of Python's

    CURRENT = "current"  # the stream that the calling thread's model computes on
    DOWNLOAD = "download"  # copies of gradients to the host
    UPLOAD = "upload"  # copies of new values, and of state that becomes resident, to the device


class Event(Protocol):
    """A point in a stream that has been recorded."""

    def query(self) -> bool:
        """Return whether the point has passed, at once."""

    def synchronize(self) -> None:
        """Block the calling thread, without spinning and with the GIL released, until the point has passed."""


@dataclass(frozen=True, slots=True)
class AllEvents:
    """An event that has passed once all of these have; without any, from the beginning."""

    events: tuple[Event, ...] = ()

    def query(self) -> bool:
        """Return whether all have passed."""
        return all(event.query() for event in self.events)

    def synchronize(self) -> None:
        """Block the calling thread until all have passed."""
        for event in self.events:
            event.synchronize()


class Device(abc.ABC):
    """Streams, events, copies and memory of the device that holds the model."""

    _host: Host | None = None  # that memory is reserved on; None for this machine

    device = torch.device("cpu")  # where torch puts tensors of the model

    has_link = True  # tensors are copied between the model's memory and the host's

    is_capturing: Callable[[], bool] = bool
    """Whether what is enqueued to the current stream is recorded, as for a CUDA graph: `bool()` is False."""

    is_host: Callable[[Tensor], bool] = operator.attrgetter("is_cpu")
    """Whether CPU kernels may read and write this tensor as soon as Python can."""

    def mark_ready(self, parameter: Tensor) -> Event | None:
        """Return an event after which a parameter's new gradient has its values; None if it has them already.

        The parameter's hook calls this, once the work that makes the gradient was enqueued to the current stream: a
        computation, or, where the gradient lies on the host, a copy to it. Before anything reads the gradient, the
        stream that packs it waits for the event (`wait`), or the thread that reads it on the host (`synchronize`).
        """
        return self.record(Stream.CURRENT)

    @abc.abstractmethod
    def pack(
        self, gradients: Sequence[Tensor], layout: FlatLayout[Any], dtype: torch.dtype, norm: ChunkSums | None = None
    ) -> Tensor:
        """Return gradients of one dtype, converted to `dtype`, in one new flat buffer on the device.

        Runs on the current stream, which was made to wait for the gradients. They may be dropped once it returns, and
        their memory may belong to another stream. There is one for each member of the layout, of its shape. Gaps of
        the buffer may hold anything. `norm`, passed only where `can_update`, receives the norm of each tensor in it.
        """

    can_update = False
    """Whether it makes Adam's step in its own memory, so that buckets can be resident there: a GPU needs Triton."""

    def update(self, steps: Sequence[ResidentStep], sets: Sequence[Coefficients]) -> None:
        """Enqueue steps of distinct parameters to the current stream, past version counters; they index `sets`.

        Called only where `can_update`. The result has the bits of the CPU's kernels. Gradients were packed, perhaps on
        another stream, and the host has seen that end; they may be dropped once this returns.
        """
        raise NotImplementedError

    def free_bytes(self) -> int | None:
        """Return how much of the device's memory is free and will stay so; None where that is unknown."""
        return None

    @abc.abstractmethod
    def scatter(self, sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
        """Enqueue copies of each source into its target to the current stream, past version counters.

        Sources are dense, have the shapes of their targets, and lie on the device or in memory from `host_empty`.
        Targets have any strides. This must not fail for want of memory, because the state has changed by then
        (`superadam.kernels.copies`). The caller orders it behind what fills the sources.
        """

    def put(self, buffer: Tensor, index: Tensor, values: Tensor) -> None:
        """Enqueue `buffer[index] = values` to the current stream, for flat tensors on the device.

        `index` is of integers and holds no number twice; `buffer` and `values` have one dtype.
        """
        buffer.index_copy_(0, index.long(), values)

    @abc.abstractmethod
    def host_empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return a flat buffer in host memory that the device copies from and to directly."""

    @abc.abstractmethod
    def empty(self, numel: int, dtype: torch.dtype, stream: Stream) -> Tensor:
        """Return a flat buffer on the device, for use on `stream`."""

    @abc.abstractmethod
    def copy(self, destination: Tensor, source: Tensor, stream: Stream) -> None:
        """Enqueue a copy between buffers of one shape, of the host and of the device."""

    @abc.abstractmethod
    def record(self, stream: Stream) -> Event:
        """Return a fresh event at the present end of a stream."""

    @abc.abstractmethod
    def wait(self, stream: Stream, event: Event) -> None:
        """Let what is enqueued to `stream` from now on run only after `event`."""

    @abc.abstractmethod
    def record_stream(self, buffer: Tensor, stream: Stream) -> None:
        """Keep a buffer's memory until `stream` has passed its present end, even if the buffer is dropped before."""

    def reserve(self, needs: HostNeeds) -> None:
        """Check that the host can hold a run, then allocate memory that copies go through.

        Called before anything else of a run is allocated, and again once it needs more. Raises MemoryError where the
        host can never hold it; nothing was allocated then.
        """
        needs.check(self._host or Host())

    def close(self) -> None:  # noqa: B027
        """Release what was reserved; later buffers come from memory that is not reserved."""

    def idle_cores(self) -> int:
        """Return how many CPUs of this process are idle while the model computes; ranks on one node divide its CPUs."""
        return len(cores.share(self._host or Host()))

    def start_worker(self, idle: Work) -> Worker:
        """Return what runs jobs next to the training thread, and `idle` between jobs until it returns False."""
        return Worker(idle)
