"""An accelerator in host memory: streams, events and memory that behave as badly as they may, as `torch.cuda` has them.

- Streams work late, in any order that events allow, drawn from a seed.
- Waiting on an event that was not recorded orders nothing.
- Memory is filled with NaN when it is allocated. That of the device is filled again when it is dropped, in the order of
  its stream and once the streams have passed that it was recorded for.
- Only registered memory of the host is pinned: copies from and to other memory wait.
- A forked process can wait for nothing.
"""

from __future__ import annotations

import collections
import ctypes
import functools
import mmap
import os
import random
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from superadam.devices.interface import ChunkSums
from superadam.devices.pinned import Lease
from superadam.handles import gradient_handle
from superadam.host.mapped_files import madvise
from superadam.host.signals import THIS_THREAD
from superadam.kernels.copies import copy_each
from superadam.kernels.hyperparameters import Coefficients
from superadam.kernels.memory import extent_of
from superadam.kernels.nested import map_tensors, tensors_in
from superadam.kernels.resident_step import ResidentStep
from superadam.kernels.torch_private import dispatch_mode, ordinary_tensors, schema_of
from superadam.testing import stand_in

_AT_ONCE = {torch.Tag.dynamic_output_shape, torch.Tag.nondeterministic_seeded}
"""Of operations whose results depend on values, or that are not to run twice."""


@dataclass(eq=False, slots=True)
class SimulatedEvent:
    """A point in a stream."""

    accelerator: SimulatedAccelerator
    is_recorded: bool = False
    has_passed: bool = False

    def record(self, stream: SimulatedStream) -> None:
        """Let this be the present end of a stream."""
        self.is_recorded = True
        stream.enqueue(functools.partial(setattr, self, "has_passed", True))

    def query(self) -> bool:
        return self.has_passed or not self.is_recorded  # as torch.cuda says of an event that was never recorded

    def synchronize(self) -> None:
        """Run the accelerator until the point has passed; return at once if it was never recorded."""
        with THIS_THREAD.deferred_signals, self.accelerator.lock:  # a handler would wait for what is half done
            while not self.query():
                if not self.accelerator.run_one():
                    raise RuntimeError("the simulated device is stuck: streams wait for one another in a circle")


@dataclass(eq=False, slots=True)
class SimulatedStream:
    """A queue of what runs once the events before it have passed; one that `is_passing` ends with its operation."""

    accelerator: SimulatedAccelerator
    is_passing: bool = False
    operations: collections.deque[tuple[Callable[[], object], tuple[SimulatedEvent, ...]]] = field(
        default_factory=collections.deque
    )

    def enqueue(self, run: Callable[[], object], *after: SimulatedEvent) -> None:
        """Run something behind all that is here and these events; then run operations for as long as the seed says."""
        with THIS_THREAD.deferred_signals, self.accelerator.lock:
            self.accelerator.collect()
            self.operations.append((run, after))
        while self.accelerator.random.random() < self.accelerator.eagerness and self.accelerator.run_one():
            pass

    def end(self) -> SimulatedEvent:
        """Return the present end."""
        event = SimulatedEvent(self.accelerator)
        event.record(self)
        return event

    def wait_event(self, event: SimulatedEvent) -> None:
        if event.is_recorded:
            self.enqueue(bool, event)

    def wait_stream(self, other: SimulatedStream) -> None:
        self.wait_event(other.end())

    def query(self) -> bool:
        return not self.operations

    def synchronize(self) -> None:
        self.end().synchronize()


@dataclass(eq=False, slots=True)
class Block:
    """Memory of a stream, for as long as a tensor refers to its lease, and until the `ends` of streams that used it."""

    memory: np.ndarray[Any, Any]
    stream: SimulatedStream
    is_on_host: bool
    lease: Lease
    used_by: list[SimulatedStream] = field(default_factory=list)
    ends: tuple[SimulatedEvent, ...] = ()

    def fill(self) -> None:
        """Let it hold NaN from now on."""
        self.memory.fill(0xFF)
        self.stream.accelerator.filled.append(self.memory)


_accelerators = weakref.WeakSet["SimulatedAccelerator"]()
gradient_handle.allocators.append(lambda address: any(address in each.blocks for each in [*_accelerators]))


class SimulatedAccelerator:
    """The part of `torch.cuda` that `CudaDevice` uses.

    Args:
        seed, eagerness: as for `SimulatedDevice`.
    """

    def __init__(self, seed: int, eagerness: float) -> None:
        self.random, self.eagerness = random.Random(seed), eagerness
        self.lock = threading.RLock()  # backwards may run in several threads
        # The chance that streams change ranks before an operation: where it is small, a low one is late for long.
        self.shuffled = self.random.choice([1.0, 1.0, 0.02])
        self.is_late = False
        self.blocks: dict[int, Block] = {}  # by address
        self.filled: collections.deque[np.ndarray[Any, Any]] = collections.deque(maxlen=64)  # memory that was freed
        self.registered: dict[int, int] = {}  # sizes of pinned memory, by address
        self.streams: list[SimulatedStream] = []  # in the order of their ranks
        self.first = self.Stream()  # of the model
        self._freed: collections.deque[Lease] = collections.deque()  # appended to in any thread, at any moment
        self._local = threading.local()
        self._process = os.getpid()
        _accelerators.add(self)

    # ---- as torch.cuda -----------------------------------------------------------------------------------------------

    def Stream(self, device: object = None, priority: int = 0) -> SimulatedStream:  # noqa: N802
        stream = SimulatedStream(self)
        self.streams.append(stream)
        return stream

    def Event(self, blocking: bool = False) -> SimulatedEvent:  # noqa: N802
        return SimulatedEvent(self)

    def current_stream(self, device: object = None) -> SimulatedStream:
        stream: SimulatedStream = getattr(self._local, "stream", self.first)
        return stream

    def set_stream(self, stream: SimulatedStream) -> None:
        self._local.stream = stream

    @contextmanager
    def stream(self, stream: SimulatedStream) -> Iterator[None]:
        """Enqueue operations inside to a stream, with new tensors on the device."""
        before = self.current_stream()
        self.set_stream(stream)
        try:
            with self.dispatching(allocates=True):
                yield
        finally:
            self.set_stream(before)

    def is_current_stream_capturing(self) -> bool:
        return False

    def get_device_properties(self, device: object) -> SimpleNamespace:
        return SimpleNamespace()

    def device(self, device: object) -> nullcontext[None]:
        return nullcontext()

    def cudart(self) -> SimulatedAccelerator:
        return self

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:  # noqa: N802
        self.registered[address] = size
        madvise(address, size, mmap.MADV_DOFORK)  # else a child that reads there is killed
        return 0

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        self.finish()
        del self.registered[address]
        return 0

    # ---- what runs when ----------------------------------------------------------------------------------------------

    def run_one(self) -> bool:
        """Run something that may run; return whether there was anything."""
        if os.getpid() != self._process:
            raise RuntimeError("the simulated device belongs to the process that this one was forked from")
        with THIS_THREAD.deferred_signals, self.lock:  # signals do not interrupt a device
            self.collect()
            if self.random.random() < self.shuffled:
                self.random.shuffle(self.streams)
            for stream in self.streams:
                if stream.operations and all(event.has_passed for event in stream.operations[0][1]):
                    with ordinary_tensors():
                        stream.operations.popleft()[0]()
                    if stream.is_passing:
                        self.streams.remove(stream)
                    return True
        return False

    def finish(self) -> None:
        """Run everything that was enqueued."""
        while self.run_one():
            pass
        if any((memory != 0xFF).any() for memory in self.filled):
            raise RuntimeError("memory of the simulated device was written to after it was free")

    # ---- memory ------------------------------------------------------------------------------------------------------

    def allocate(self, like: Tensor, *, is_on_host: bool = False) -> Tensor:
        """Return a tensor as this one in memory of the current stream, or of the host, that holds NaN."""
        memory = np.full(max(extent_of(like), 1), 0xFF, np.uint8)
        held = memory.view()
        with THIS_THREAD.deferred_signals:  # `collect` finds each lease among the blocks
            lease = Lease(held, self._freed.append)
            lease.begin = memory.ctypes.data
            self.blocks[lease.begin] = Block(memory, self.current_stream(), is_on_host, lease)
        with ordinary_tensors():
            return _in_storage(_storage_of(held), like)

    def collect(self) -> None:
        """Fill what was dropped, each block when its stream and those that have used it have come that far."""
        for block in [self.blocks.pop(self._freed.popleft().begin) for _ in range(len(self._freed))]:
            block.ends = tuple([stream.end() for stream in dict.fromkeys(block.used_by)])
            filling = SimulatedStream(self, is_passing=True)  # nothing else waits for that
            filling.operations.append((block.fill, (block.stream.end(), *block.ends)))
            self.streams.insert(self.random.randrange(len(self.streams) + 1), filling)

    def block_of(self, tensor: Tensor) -> Block | None:
        """Return the memory of a tensor that was allocated here."""
        return self.blocks.get(tensor.untyped_storage().data_ptr())

    def is_pinned(self, tensor: Tensor) -> bool:
        address = tensor.untyped_storage().data_ptr()
        return any(begin <= address < begin + size for begin, size in self.registered.items())

    def is_host(self, tensor: Tensor) -> bool:
        """Whether a tensor lies in memory of the host; if the model computes at once, its tensors do not."""
        block = self.block_of(tensor)
        return self.is_late or self.is_pinned(tensor) if block is None else block.is_on_host

    def alias(self, tensor: Tensor) -> Tensor:
        """Return a tensor over the same memory, which does not keep that from being dropped if it is ours."""
        if tensor.is_neg():
            raise ValueError("a tensor is negated lazily, expected its values in memory; resolve_neg() it")
        block, storage = self.block_of(tensor), tensor.untyped_storage()
        with ordinary_tensors():
            if block is not None:
                storage = _storage_of(block.memory)
            elif self.is_pinned(tensor):
                storage = _storage_of((ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr()))
            return _in_storage(storage, tensor, int(tensor.storage_offset()))

    # ---- operations --------------------------------------------------------------------------------------------------

    @contextmanager
    def dispatching(self, *, allocates: bool) -> Iterator[None]:
        """Enqueue operations on the device's tensors inside; new tensors are there where it `allocates`."""
        before = getattr(self._local, "allocates", None)
        self._local.allocates = allocates
        try:
            with nullcontext() if before is not None else _Dispatch(self):
                yield
        finally:
            self._local.allocates = before

    def dispatch(self, operation: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """Enqueue an operation to the current stream where it is the device's; return what it will have computed."""
        schema = schema_of(operation)
        tensors = tensors_in((arguments, options))
        aliases = [result.alias_info for result in schema.returns]
        is_there = any(not self.is_host(tensor) for tensor in tensors) if tensors else self._local.allocates
        is_told_where = schema.name.endswith("like") and options.get("device") is not None  # which is the host
        is_there &= self._local.allocates or not is_told_where
        if not is_there or any(alias is not None and not alias.is_write for alias in aliases):  # a view
            return operation(*arguments, **options)
        stream, is_copy = self.current_stream(), schema.name.rpartition("foreach_")[2] in ("copy_", "aten::copy_")
        on_host = [tensor for tensor in tensors if tensor.dim() and self.is_host(tensor)]
        if (on_host and not is_copy) or any("Tensor" not in str(result.type) for result in schema.returns):
            stream.synchronize()  # the host computes, perhaps with a number of the device, or is told one
            return operation(*arguments, **options)
        written = [
            argument.name
            for argument in schema.arguments
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
        those = map_tensors((arguments, options), self.alias)
        if written:
            named = {**dict(zip([argument.name for argument in schema.arguments], arguments, strict=False)), **options}
            stream.enqueue(lambda: operation(*those[0], **those[1]))
            if on_host and not (named.get("non_blocking") and all(map(self.is_pinned, on_host))):
                stream.synchronize()
            results = [named[name] for name in written][: len(aliases)]
            return results[0] if len(results) == 1 else tuple(results) or None
        made = None
        if _AT_ONCE.isdisjoint(operation.tags):
            sample = map_tensors((arguments, options), _zeros_like)
            with suppress(RuntimeError):
                made = map_tensors(operation(*sample[0], **sample[1]), self.allocate)
        if made is None:
            stream.synchronize()
            return map_tensors(operation(*those[0], **those[1]), self.there)
        targets = map_tensors(made, self.alias)
        if tensors:
            stream.enqueue(lambda: copy_each(tensors_in(targets), tensors_in(operation(*those[0], **those[1]))))
        return made

    def there(self, tensor: Tensor) -> Tensor:
        """Return a copy of a tensor in memory of the device."""
        made = self.allocate(tensor)
        with ordinary_tensors():
            return made.copy_(tensor)

    # ---- kernels, as superadam.gpu -----------------------------------------------------------------------------------

    def obstacle(self, device: object) -> None:
        return None

    def pack_gradients(
        self,
        gradients: Sequence[Tensor],
        offsets: Sequence[int],
        destination: Tensor,
        sums: Tensor | None,
        nonfinite: Tensor | None,
    ) -> None:
        places = [
            destination.as_strided(gradient.shape, gradient.stride(), begin)
            for gradient, begin in zip(gradients, offsets, strict=True)
        ]
        copy_each(places, gradients, non_blocking=True)
        if sums is not None and nonfinite is not None:
            packed, norm = [*map(self.alias, places)], ChunkSums(self.alias(sums), self.alias(nonfinite))
            self.current_stream().enqueue(lambda: stand_in.take_norm(packed, norm))

    def scatter_values(self, sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
        copy_each(targets, sources, non_blocking=True)

    def update(self, steps: Sequence[ResidentStep], sets: Sequence[Coefficients]) -> None:
        names = ResidentStep.__dataclass_fields__
        those = [
            ResidentStep(**{name: map_tensors(getattr(step, name), self.alias) for name in names}) for step in steps
        ]
        self.current_stream().enqueue(lambda: stand_in.update(those, sets))


class _Dispatch(dispatch_mode()):  # type: ignore[misc]
    def __init__(self, accelerator: SimulatedAccelerator) -> None:
        super().__init__()
        self._accelerator = accelerator

    def __torch_dispatch__(self, operation: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        if any(kind.__torch_dispatch__ is not Tensor.__torch_dispatch__ for kind in types):  # it gives ordinary ones
            return NotImplemented
        return self._accelerator.dispatch(operation, arguments, options or {})


class Questions(TorchFunctionMode):
    """Answers what is asked of the device's tensors as if they were not on the CPU."""

    def __init__(self, accelerator: SimulatedAccelerator) -> None:
        super().__init__()
        self._accelerator = accelerator

    def __torch_function__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        is_asked = function in (Tensor.is_cpu.__get__, Tensor.cpu, Tensor.numpy)  # type: ignore[attr-defined]
        if is_asked and type(arguments[0]) in (Tensor, nn.Parameter) and not self._accelerator.is_host(arguments[0]):
            if function is Tensor.numpy:
                raise TypeError("a tensor of the device has no array, expected one of the host; call cpu() first")
            if function is not Tensor.cpu:
                return False
            self._accelerator.current_stream().synchronize()
            with ordinary_tensors():
                return arguments[0].clone()
        return function(*arguments, **(options or {}))


def _storage_of(memory: Any) -> torch.UntypedStorage:
    return torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()


def _in_storage(storage: torch.UntypedStorage, like: Tensor, offset: int = 0) -> Tensor:
    """Return a tensor in a storage, with shape, strides and dtype of another one."""
    return torch.empty(0, dtype=like.dtype, device="cpu").set_(storage, offset, like.shape, like.stride())


def _zeros_like(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu").zero_()
