"""A paced device, to measure a schedule without the hardware.

Streams are clocks: enqueued work returns at once and takes its time, at given rates, in the order of its stream.
Waiting sleeps, so that every core is free, as with a GPU. Values are moved and computed by the calling thread when they
are enqueued. A missing wait therefore goes unnoticed here; `SimulatedDevice` finds it.

It cannot show contention between CPU and copies for host memory, or between copies for a link, the cost of launching
kernels, limits on enqueued work, autograd's device thread, or kernels and copies that slow each other down. A rate
holds for any size, and copies have no latency.
"""

from __future__ import annotations

import ctypes
import functools
import operator
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
from torch import Tensor

from superadam.devices.flat import FlatLayout
from superadam.devices.interface import ChunkSums, Event, Stream
from superadam.devices.pinned import PinnedMemory
from superadam.devices.plain import PlainDevice
from superadam.handles import gradient_handle
from superadam.host.memory import HostNeeds
from superadam.kernels import native
from superadam.kernels.hyperparameters import Coefficients
from superadam.kernels.resident_step import ResidentStep
from superadam.state.parameter import ARRAYS
from superadam.testing import stand_in

_nbytes_of = operator.attrgetter("nbytes")

SECTOR_BYTES = 32
"""What a GPU's memory reads and writes at least."""


@dataclass(frozen=True, slots=True)
class Rates:
    """Rates of a device, in bytes per second.

    Attributes:
        download, upload: of copies to the host and from it.
        memory: of the device's kernels, reads and writes together.
    """

    download: float
    upload: float
    memory: float


H200 = Rates(55e9, 55e9, 4.8e12)
"""H200 SXM behind PCIe 5 x16.

Memory 4.8 TB/s (NVIDIA H200 data sheet); the link has 64 GB/s each way, of which `nvbandwidth` shows 55.6 (NVIDIA
developer blog, "NVIDIA NVbandwidth").
"""


class PacedEvent:
    """A point in time; `now` and `sleep` are the device's."""

    def __init__(self, passes_at: float, now: Callable[[], float], sleep: Callable[[float], object]) -> None:
        self._passes_at, self._now, self._sleep = passes_at, now, sleep

    def query(self) -> bool:
        """Return whether it has passed."""
        return self._now() >= self._passes_at

    def passed_at(self) -> float:
        """Return when it passes."""
        return self._passes_at

    def synchronize(self) -> None:
        """Sleep until it has passed."""
        while (left := self._passes_at - self._now()) > 0.0:
            self._sleep(left)


class _Ranges(dict[int, int]):
    """The host's memory: bytes by address; a `Registrar` that adds what is pinned."""

    def register(self, address: int, size: int) -> None:
        self[address] = size

    def unregister(self, address: int) -> None:
        del self[address]


_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


def _counted(
    method: Callable[Concatenate[PacedDevice, _Arguments], _Result],
) -> Callable[Concatenate[PacedDevice, _Arguments], _Result]:
    """Add the CPU time of a method, which a driver would take otherwise, to the device's `own_seconds`."""

    @functools.wraps(method)
    def counted(self: PacedDevice, /, *args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        if self._is_counting or threading.current_thread() is not threading.main_thread():
            return method(self, *args, **kwargs)
        self._is_counting, begin = True, time.thread_time()
        try:
            return method(self, *args, **kwargs)
        finally:
            self.own_seconds += time.thread_time() - begin
            self._is_counting = False

    return counted


class PacedDevice(PlainDevice):
    """CPU tensors that count as device memory, unless they lie in memory from `host_empty`.

    A GPU copies and computes without the CPU. With `constants`, so does this device where it costs no exactness: packed
    gradients are views of them, a download points the host's tensor at them, and steps on the device are computed only
    when the host copies their result. New values do not reach the parameters: empty the list, and the next step
    publishes them all. Before constants change, call `run_deferred`, and write their norms to `norms`.

    Args:
        rates: of copies and kernels.
        free_bytes: memory that `empty` takes from; None where that is unknown.
        constants: memory of gradients that do not change while work is under way.
        norms: of such gradients, as far as they are known, by address and elements; what is missing is added.
        now: clock in seconds; that of `time.perf_counter` where other threads use both.
        sleep: sleeps for the given seconds.

    Attributes:
        own_seconds: CPU time of the main thread in methods that call a driver where the device is one.
    """

    has_link = True
    can_update = True
    accelerator = None  # this device is one, with one stream

    def __init__(
        self,
        rates: Rates,
        *,
        free_bytes: int | None = None,
        constants: Sequence[Tensor] = (),
        norms: dict[tuple[int, int], ChunkSums] | None = None,
        now: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        self.rates, self.now, self.sleep = rates, now, sleep
        self._free_bytes = free_bytes
        self._allocated: dict[int, int] = {}  # bytes, by address
        self.constants = list(constants)
        self._lock = threading.Lock()
        self._ends = dict.fromkeys(Stream, 0.0)
        self._ranges = _Ranges()
        self._pinned = PinnedMemory(self._ranges)
        self.norms = {} if norms is None else norms
        self._deferred: list[Callable[[], None]] = []
        self.own_seconds = 0.0
        self._is_counting = False

    # ---- clocks ------------------------------------------------------------------------------------------------------

    def spend(self, stream: Stream, seconds: float) -> None:
        """Enqueue work of this duration, such as a layer of the model."""
        with self._lock:
            self._ends[stream] = max(self._ends[stream], self.now()) + seconds

    @_counted
    def record(self, stream: Stream) -> PacedEvent:
        """Return the end of a stream's work, or the present time if it has none."""
        with self._lock:
            return PacedEvent(max(self._ends[stream], self.now()), self.now, self.sleep)

    @_counted
    def wait(self, stream: Stream, event: Event) -> None:
        """Let a stream idle until an event has passed."""
        assert isinstance(event, PacedEvent)
        with self._lock:
            self._ends[stream] = max(self._ends[stream], event.passed_at())

    # ---- the interface -----------------------------------------------------------------------------------------------

    @_counted
    def is_host(self, tensor: Tensor) -> bool:
        """Whether the tensor lies in memory from `host_empty`."""
        address = tensor.data_ptr()
        return any(begin <= address < begin + size for begin, size in list(self._ranges.items()))

    @_counted
    def pack(
        self, gradients: Sequence[Tensor], layout: FlatLayout[Any], dtype: torch.dtype, norm: ChunkSums | None = None
    ) -> Tensor:
        """Copy the gradients, or return a view of them if they are constant and lie as the layout requires."""
        is_constant = self._are_constant(gradients, layout, dtype)
        if is_constant:
            packed = _over(gradients[0].data_ptr(), layout.numel, dtype, gradients)
        else:
            packed = super().pack(gradients, layout, dtype)
        self.spend(Stream.CURRENT, (_nbytes(gradients) + packed.nbytes) / self.rates.memory)
        if norm is not None:
            if is_constant:
                self._read_norms(gradients, norm)
            else:
                stand_in.take_norm(layout.views(packed), norm)
        return packed

    @_counted
    def update(self, steps: Sequence[ResidentStep], sets: Sequence[Coefficients]) -> None:
        """Make the steps, or defer them."""
        state = [getattr(step, name) for step in steps for name in ARRAYS]
        moved = 2 * _nbytes([tensor for tensor in state if tensor is not None])
        moved += sum(step.gradient.nbytes + step.parameter.nbytes for step in steps)
        self.spend(Stream.CURRENT, moved / self.rates.memory)
        self._deferred.append(functools.partial(stand_in.update, list(steps), list(sets)))
        if not self.constants:
            self.run_deferred()

    def run_deferred(self) -> None:
        """Compute the steps that are owed."""
        while self._deferred:
            self._deferred.pop(0)()

    def free_bytes(self) -> int | None:
        """Return what was given, without what is allocated; gradients and parameters do not count."""
        return None if self._free_bytes is None else self._free_bytes - sum(list(self._allocated.values()))

    @_counted
    def empty(self, numel: int, dtype: torch.dtype, stream: Stream) -> Tensor:
        """Return memory that counts as allocated until its last view is gone."""
        return _tracked(torch.empty(numel, dtype=dtype, device="cpu"), self._allocated)

    @_counted
    def scatter(self, sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
        """Copy; sources on the host are read over the link."""
        rates, on_host = self.rates, _nbytes([source for source in sources if self.is_host(source)])
        seconds = (2 * _nbytes(sources) - on_host) / rates.memory + on_host / rates.upload
        self.spend(Stream.CURRENT, seconds)
        if not self.constants:
            super().scatter(sources, targets)

    @_counted
    def put(self, buffer: Tensor, index: Tensor, values: Tensor) -> None:
        """Replace values; each is written in a sector of the memory of its own."""
        moved = _nbytes([index, values]) + 2 * SECTOR_BYTES * values.numel()
        self.spend(Stream.CURRENT, moved / self.rates.memory)
        if not self.constants:
            super().put(buffer, index, values)

    @_counted
    def host_empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return pinned memory as far as it was reserved, and pageable memory beyond, which copies as fast here."""
        memory = self._pinned.empty(numel, dtype)
        return memory if self.is_host(memory) else _tracked(memory, self._ranges)

    @_counted
    def copy(self, destination: Tensor, source: Tensor, stream: Stream) -> None:
        """Copy; the destination of constants becomes a tensor over them, of which views may be made afterwards."""
        rates = self.rates
        rate = {Stream.DOWNLOAD: rates.download, Stream.UPLOAD: rates.upload}.get(
            stream, min(rates.download, rates.upload)
        )
        self.spend(stream, source.nbytes / rate)
        if self._is_constant(source):
            slab = destination.new_empty(0).set_(destination)  # type: ignore[call-overload]  # stays taken
            destination.set_(_over(source.data_ptr(), source.numel(), source.dtype, [source, slab]))  # type: ignore[call-overload]
        elif not self.constants or stream is not Stream.UPLOAD or not self.is_host(source):  # state is to arrive
            if stream is Stream.CURRENT:  # of state, which may lack deferred steps
                self.run_deferred()
            super().copy(destination, source, stream)

    @_counted
    def record_stream(self, buffer: Tensor, stream: Stream) -> None:
        """Keep host memory."""
        if self.is_host(buffer):
            self._pinned.hold_until(buffer, self.record(stream), stream)

    # ---- constants ---------------------------------------------------------------------------------------------------

    def _is_constant(self, tensor: Tensor) -> bool:
        begin, size = tensor.data_ptr(), tensor.nbytes
        return any(
            constant.data_ptr() <= begin and begin + size <= constant.data_ptr() + constant.nbytes
            for constant in self.constants
        )

    def _are_constant(self, gradients: Sequence[Tensor], layout: FlatLayout[Any], dtype: torch.dtype) -> bool:
        if not gradients or not self._is_constant(gradients[0]) or not self._is_constant(gradients[-1]):
            return False
        begin, size = gradients[0].data_ptr(), dtype.itemsize
        return (
            [gradient.data_ptr() for gradient in gradients] == [begin + offset * size for offset in layout.offsets]
            and {gradient.dtype for gradient in gradients} == {dtype}
            and [gradient.stride() for gradient in gradients] == [state.strides for state in layout.states]
        )

    def _read_norms(self, gradients: Sequence[Tensor], norm: ChunkSums) -> None:
        """Write the norm of constants, which is computed once."""
        begin = 0
        for gradient in gradients:
            end = begin + native.chunk_count(gradient.numel())
            part = ChunkSums(norm.sums[begin:end], norm.nonfinite[begin:end])
            key = gradient.data_ptr(), gradient.numel()
            known = self.norms.get(key) or self._norm_of_piece(*key, gradient.element_size())
            if known is None:
                stand_in.take_norm([gradient], part)
                self.norms[key] = ChunkSums(part.sums.clone(), part.nonfinite.clone())
            else:
                part.sums.copy_(known.sums)
                part.nonfinite.copy_(known.nonfinite)
            begin = end

    def _norm_of_piece(self, address: int, numel: int, size: int) -> ChunkSums | None:
        """Return the norm of a piece of constants whose norm is known."""
        for (begin, length), known in self.norms.items():
            if begin <= address < begin + length * size:
                first = (address - begin) // (size * native.CHUNK)
                chunks = slice(first, first + native.chunk_count(numel))
                return ChunkSums(known.sums[chunks], known.nonfinite[chunks])
        return None

    # ---- memory and cores --------------------------------------------------------------------------------------------

    def reserve(self, needs: HostNeeds) -> None:
        """Map as much as `CudaDevice` pins: two steps' gradients, and two buckets in each direction."""
        super().reserve(needs)
        missing = 2 * needs.pending + needs.under_way - self._pinned.size
        if missing > 0:
            self._pinned.grow(missing, needs.largest)

    def close(self) -> None:
        """Release the reserved memory."""
        self._pinned.close()

    def idle_cores(self) -> int:
        """Return the number of CPUs of this process, none of which computes the model."""
        return super(PlainDevice, self).idle_cores()


def constant(memory: Tensor, begin: int, numel: int) -> Tensor:
    """Return a part of a flat tensor with a storage of its own, as a gradient has that a scheduler may take."""
    return _over(memory.data_ptr() + begin * memory.element_size(), numel, memory.dtype, memory)


_leases = weakref.WeakValueDictionary[int, Any]()  # by address
gradient_handle.allocators.append(_leases.__contains__)


def _over(address: int, numel: int, dtype: torch.dtype, kept: object) -> Tensor:
    """Return a flat tensor with a storage of its own over memory that `kept` keeps alive."""
    if not numel:
        return torch.empty(0, dtype=dtype, device="cpu")
    lease: Any = (ctypes.c_char * (numel * dtype.itemsize)).from_address(address)
    lease.kept, _leases[address] = kept, lease
    return torch.frombuffer(lease, dtype=dtype, count=numel)


def _tracked(memory: Tensor, sizes: dict[int, int]) -> Tensor:
    """Return a tensor over fresh memory whose bytes are in `sizes`, by address, until its last view is gone."""
    if not memory.numel():
        return memory
    address = memory.data_ptr()
    sizes[address] = memory.nbytes
    weakref.finalize(memory, sizes.pop, address).atexit = False
    return _over(address, memory.numel(), memory.dtype, memory)


def _nbytes(tensors: Sequence[Tensor]) -> int:
    return sum(map(_nbytes_of, tensors))
