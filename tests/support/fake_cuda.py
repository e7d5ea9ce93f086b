"""The part of torch.cuda that `CudaDevice` uses, without a GPU: host memory plays the device, and an order is written.

Every call is checked against the signature of torch's own function. Nothing is late here: what waits for what is tested
on the simulated device, and this one only tells what was asked of torch, and on which stream.
"""

from __future__ import annotations

import enum
import functools
import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.gpu_arrays import asked_for
from torch import Tensor

from superadam.devices.cuda import CudaDevice
from superadam.host.machine import Host


class Code(enum.IntEnum):
    """What the runtime returns."""

    SUCCESS = 0
    MEMORY_ALLOCATION = 2


class FakeCuda:
    """Streams by name, and what was asked of them, in order.

    Attributes:
        log: each call as words.
        registered: size by address.
        refuses: whether the runtime refuses to pin.
    """

    def __init__(self) -> None:
        self.log: list[tuple[object, ...]] = []
        self.registered: dict[int, int] = {}
        self.refuses = False
        self._local = threading.local()
        self._streams = 0

    @property
    def now(self) -> FakeStream:
        """The current stream of the calling thread."""
        return getattr(self._local, "stream", None) or FakeStream(self, "current")

    def new_stream(self, device: object = None, priority: int = 0) -> FakeStream:
        assert device is not None
        self._streams += 1
        return FakeStream(self, ("download", "upload")[(self._streams - 1) % 2])

    def current_stream(self, device: object = None) -> FakeStream:
        assert device is not None
        return self.now

    @contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        before, self._local.stream = self.now, stream
        yield
        self._local.stream = before

    @contextmanager
    def device(self, device: object) -> Iterator[None]:
        assert device is not None
        yield

    def set_device(self, device: object) -> None:
        self.log.append(("set_device", threading.current_thread().name))

    def get_device_properties(self, device: object = None) -> SimpleNamespace:
        return SimpleNamespace(pci_domain_id=0, pci_bus_id=0x1B, pci_device_id=0)

    # the runtime, of which torch has no Python code to check against

    def cudart(self) -> FakeCuda:
        return self

    def cudaHostRegister(self, address: int, size: int, flags: int) -> Code:  # noqa: N802
        if self.refuses:
            return Code.MEMORY_ALLOCATION
        self.registered[address] = size
        return Code.SUCCESS

    def cudaHostUnregister(self, address: int) -> Code:  # noqa: N802
        return Code.SUCCESS if self.registered.pop(address, None) else Code.MEMORY_ALLOCATION

    def cudaGetErrorString(self, code: Code) -> str:  # noqa: N802
        return Code(code).name


class FakeStream:
    """A stream that has a name."""

    def __init__(self, cuda: FakeCuda, name: str) -> None:
        self.cuda, self.name = cuda, name

    def __eq__(self, other: object) -> bool:
        return isinstance(other, FakeStream) and self.name == other.name

    def __hash__(self) -> int:
        return hash(self.name)

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        self.cuda.log.append(("synchronize", self.name))

    def wait_stream(self, other: FakeStream) -> None:
        self.cuda.log.append(("wait for stream", self.name, other.name))

    def wait_event(self, event: FakeEvent) -> None:
        assert event.recorded_on is not None
        self.cuda.log.append(("wait", self.name, event.recorded_on))


class FakeEvent:
    """An event that knows where it was recorded; recorded once."""

    def __init__(self, cuda: FakeCuda, blocking: bool = False) -> None:
        assert blocking
        self.cuda = cuda
        self.recorded_on: str | None = None

    def record(self, stream: FakeStream) -> None:
        assert self.recorded_on is None
        self.recorded_on = stream.name
        self.cuda.log.append(("record", stream.name))

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        self.cuda.log.append(("synchronize", self.recorded_on))


class FakeDevice(CudaDevice):
    """A `CudaDevice` whose own memory is the host's, too: only what was pinned counts as the host's."""

    def __init__(self, cuda: FakeCuda, host: Host | None = None) -> None:
        super().__init__("cuda:0", host)
        self._fake = cuda
        self.device = torch.device("cpu")

    def is_host(self, tensor: Tensor) -> bool:
        address = tensor.untyped_storage().data_ptr()
        return any(begin <= address < begin + size for begin, size in self._fake.registered.items())


def _checked(name: str, real: Callable[..., Any], fake: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(real)

    def call(*args: Any, **kwargs: Any) -> Any:
        signature.bind(*args, **kwargs)  # raises where torch would
        return fake(*args, **kwargs)

    call.__name__ = name
    return call


@contextmanager
def fake_cuda() -> Iterator[FakeCuda]:
    """Put a `FakeCuda` in the place of torch.cuda; its kernels are plain torch."""
    cuda = FakeCuda()
    fakes = {"Stream": cuda.new_stream, "Event": functools.partial(FakeEvent, cuda)}
    same = ("current_stream", "stream", "device", "set_device", "get_device_properties")
    fakes |= {name: getattr(cuda, name) for name in same}
    kinds = {"record": FakeEvent, "query": FakeEvent, "synchronize": FakeEvent, "wait_event": FakeStream}
    with pytest.MonkeyPatch.context() as patch, asked_for("torch"):
        for name, kind in kinds.items():
            real = torch.cuda.Event if kind is FakeEvent else torch.cuda.Stream
            patch.setattr(kind, name, _checked(name, getattr(real, name), getattr(kind, name)))
        for name, fake in fakes.items():
            patch.setattr(torch.cuda, name, _checked(name, getattr(torch.cuda, name), fake))
        patch.setattr(torch.cuda, "mem_get_info", lambda device: (0, 0))
        patch.setattr(torch.cuda, "memory_reserved", lambda device: 0)
        patch.setattr(torch.cuda, "max_memory_allocated", lambda device: 0)
        patch.setattr(torch.cuda, "cudart", cuda.cudart)
        patch.setattr(Tensor, "record_stream", lambda _, stream: cuda.log.append(("record_stream", stream.name)))
        yield cuda
