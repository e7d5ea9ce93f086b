"""The part of torch.cuda that `CudaDevice` uses, without a GPU: host memory plays the device, and an order is written.

Every call is checked against the signature of torch's own function. Nothing is late here: what waits for what is tested
on the simulated device, and this one only tells what was asked of torch, and on which stream.
"""

from __future__ import annotations

import enum
import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.gpu_arrays import asked_for
from torch import Tensor

from superadam.devices.cuda import CudaDevice
from superadam.host.machine import Host

Code = enum.IntEnum("Code", {"SUCCESS": 0, "MEMORY_ALLOCATION": 2})
"""What the runtime returns."""


class FakeCuda:
    """Streams by name, and what was asked of them, in order."""

    def __init__(self) -> None:
        self.log: list[tuple[object, ...]] = []
        self.registered: dict[int, int] = {}  # size by address
        self.refuses = False  # to pin
        self._local = threading.local()

    def new_stream(self, device: object, priority: int = 0) -> FakeStream:
        return FakeStream(self, "upload" if priority else "download")

    def current_stream(self, device: object) -> FakeStream:
        return getattr(self._local, "stream", None) or FakeStream(self, "current")

    @contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        assert self._local.is_current, "leaving the stream of another device would make a context on the current one"
        before, self._local.stream = self.current_stream(self), stream
        yield
        self._local.stream = before

    @contextmanager
    def device(self, device: object) -> Iterator[None]:
        self._local.is_current = True
        yield
        self._local.is_current = False

    def set_device(self, device: object) -> None:
        self.log.append(("set_device", device, threading.current_thread().name))

    def is_current_stream_capturing(self) -> bool:
        return False

    def get_device_properties(self, device: object) -> SimpleNamespace:
        return SimpleNamespace(pci_domain_id=0, pci_bus_id=0x1B, pci_device_id=0)

    def record_stream(self, tensor: Tensor, stream: FakeStream) -> None:
        if tensor.is_neg():  # whose memory torch clones, and then looks for a result in vain
            raise RuntimeError("Expected Tensor but got None")
        self.log.append(("record_stream", stream.name))

    # the runtime, of which torch has no Python code to check against

    def cudaHostRegister(self, address: int, size: int, flags: int) -> Code:  # noqa: N802
        if self.refuses:
            return Code.MEMORY_ALLOCATION
        self.registered[address] = size
        return Code.SUCCESS

    def cudaHostUnregister(self, address: int) -> Code:  # noqa: N802
        return Code.SUCCESS if self.registered.pop(address, None) else Code.MEMORY_ALLOCATION

    def cudaGetErrorString(self, code: Code) -> str:  # noqa: N802
        return code.name


@dataclass(unsafe_hash=True)
class FakeStream:
    """A stream that has a name; those of one name are one."""

    cuda: FakeCuda = field(compare=False)
    name: str | None

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        self.cuda.log.append(("synchronize", self.name))

    def wait_stream(self, other: FakeStream) -> None: ...

    def wait_event(self, event: FakeEvent) -> None:
        assert event.name is not None


class FakeEvent(FakeStream):
    """An event, which has the name of the stream that it was recorded on, once."""

    def __init__(self, cuda: FakeCuda, blocking: bool = False) -> None:
        assert blocking
        super().__init__(cuda, None)

    def record(self, stream: FakeStream) -> None:
        assert self.name is None
        self.name = stream.name
        self.cuda.log.append(("record", stream.name))


class FakeDevice(CudaDevice):
    """A `CudaDevice` whose own memory is the host's, too: only what was pinned counts as the host's."""

    def __init__(self, cuda: FakeCuda, host: Host | None = None) -> None:
        super().__init__("cuda:0", host)
        self._fake = cuda
        self.device = torch.device("cpu")

    def is_host(self, tensor: Tensor) -> bool:
        address = tensor.untyped_storage().data_ptr()
        return any(begin <= address < begin + size for begin, size in self._fake.registered.items())


def _checked(real: Callable[..., Any], fake: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        inspect.signature(real).bind(*args, **kwargs)  # raises where torch would
        return fake(*args, **kwargs)

    return call


@contextmanager
def fake_cuda() -> Iterator[FakeCuda]:
    """Put a `FakeCuda` in the place of torch.cuda; its kernels are plain torch."""
    cuda = FakeCuda()
    same = ("current_stream", "stream", "device", "set_device", "get_device_properties", "is_current_stream_capturing")
    fakes = {name: getattr(cuda, name) for name in same}
    fakes |= {"Stream": cuda.new_stream, "Event": partial(FakeEvent, cuda)}
    with pytest.MonkeyPatch.context() as patch, asked_for("torch"):
        for kind, real, names in (
            (FakeEvent, torch.cuda.Event, ("record", "query", "synchronize")),
            (FakeStream, torch.cuda.Stream, ("wait_event", "wait_stream")),
        ):
            for name in names:
                patch.setattr(kind, name, _checked(getattr(real, name), getattr(kind, name)))
        for name, fake in fakes.items():
            patch.setattr(torch.cuda, name, _checked(getattr(torch.cuda, name), fake))
        patch.setattr(torch.cuda, "cudart", lambda: cuda)
        patch.setattr(torch.cuda, "mem_get_info", lambda device: (0, 0))
        patch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda device: 1.0)
        for name in ("memory_reserved", "max_memory_allocated"):
            patch.setattr(torch.cuda, name, lambda device: 0)
        patch.setattr(Tensor, "record_stream", lambda tensor, stream: cuda.record_stream(tensor, stream))
        yield cuda
