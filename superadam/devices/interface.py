"""What the scheduler asks of a device; it knows no Adam and no buckets.

An implementation owns its streams and its memory. Copies run in the order of their stream; nothing else is ordered but
by events.
An event is fresh for each use: waiting on one that was never recorded would silently order nothing.
"""

from __future__ import annotations

import abc
import enum
from typing import Protocol

import torch
from torch import Tensor

from superadam.worker import ThreadWorker, Work, Worker


class Stream(enum.Enum):
    """A queue of work on the device."""

    CURRENT = "current"
    """The stream that the model computes on."""
    DOWNLOAD = "download"
    """Copies of gradients to the host."""
    UPLOAD = "upload"
    """Copies of parameters to the device."""


class Event(Protocol):
    """A point in a stream that has been recorded."""

    def synchronize(self) -> None:
        """Block the calling thread, without spinning and with the GIL released, until the point has passed."""


class Device(abc.ABC):
    """Streams, events, copies and memory of the device that holds the model."""

    @abc.abstractmethod
    def is_host(self, tensor: Tensor) -> bool:
        """Whether kernels on the CPU may read and write this tensor as soon as Python can."""

    @abc.abstractmethod
    def stage(self, tensor: Tensor) -> Tensor:
        """Return a copy of a gradient in memory of our own on the device, made on the current stream."""

    @abc.abstractmethod
    def host_empty(self, like: Tensor, dtype: torch.dtype) -> Tensor:
        """Return host memory for a copy of `like`, dense in its layout, that copies can reach without detours."""

    @abc.abstractmethod
    def copy(self, destination: Tensor, source: Tensor, stream: Stream) -> None:
        """Enqueue a copy between host and device."""

    @abc.abstractmethod
    def record(self, stream: Stream) -> Event:
        """Return a fresh event at the present end of a stream."""

    @abc.abstractmethod
    def wait(self, stream: Stream, event: Event) -> None:
        """Let what is enqueued to `stream` from now on run only after `event`."""

    @abc.abstractmethod
    def keep(self, tensor: Tensor, stream: Stream) -> None:
        """Keep a tensor's memory until `stream` has passed its present end, even if the tensor is dropped before."""

    def start_worker(self, idle: Work) -> Worker:
        """Return what runs jobs beside the training thread, and `idle` while there is none, until it returns False."""
        return ThreadWorker(idle)
