"""One GPU, by CUDA or by HIP: torch calls both `cuda`.

Everything names the device, so that calls work from threads whose current device is another one.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from superadam import gpu
from superadam.devices.flat import FlatLayout
from superadam.devices.interface import AllEvents, ChunkSums, Device, Event, Stream
from superadam.devices.pinned import CudaRegistrar, PinnedMemory
from superadam.devices.worker import Work, Worker
from superadam.host import cores
from superadam.host.local_ranks import local_rank
from superadam.host.machine import Host
from superadam.host.memory import HostMemory, HostNeeds
from superadam.host.signals import THIS_THREAD
from superadam.kernels.copies import copy_one
from superadam.kernels.hyperparameters import Coefficients
from superadam.kernels.resident_step import ResidentStep
from superadam.kernels.torch_private import is_short_of_memory

_logger = logging.getLogger("superadam")

LEFT_TO_TRAINING = 2
"""CPUs for the training process: one for the thread that launches kernels, and one for all else, as data loading."""


class CudaDevice(Device):
    """A GPU that torch addresses as `cuda`, the current one without an index; raises ValueError for another type."""

    _cuda: Any = torch.cuda  # in whose place, and in that of the kernels, a simulated accelerator may stand
    _gpu: Any = gpu

    def __init__(self, device: torch.device | str, host: Host | None = None) -> None:
        device = torch.device(device)
        if device.type != "cuda":
            raise ValueError(f"CudaDevice got {device}, expected a CUDA or HIP device; use PlainDevice for others")
        index = self._cuda.current_device() if device.index is None else device.index
        self.device = torch.device("cuda", index)
        properties = self._cuda.get_device_properties(self.device)
        if getattr(properties, "is_integrated", False):
            _logger.warning(
                "%s computes in the host's memory, where offloading saves none: take torch.optim.AdamW(fused=True), or "
                "SpeculativeCPUAdamW for its smaller state alone",
                self.device,
            )
        self.is_capturing = self._cuda.is_current_stream_capturing
        self.can_update = self._gpu.obstacle(self.device) is None
        self._host: Host = host or Host()
        self._cpus = cores.share(self._host, _pci_address(properties))
        self.pinned = PinnedMemory(CudaRegistrar(self.device, self._cuda))
        self._streams = {
            stream: self._cuda.Stream(device=self.device, priority=priority)
            for stream, priority in ((Stream.DOWNLOAD, 0), (Stream.UPLOAD, -1))  # new values are waited for
        }

    def _stream(self, stream: Stream) -> torch.cuda.Stream:
        found: torch.cuda.Stream = self._streams.get(stream) or self._cuda.current_stream(self.device)
        return found

    def mark_ready(self, parameter: Tensor) -> Event:
        """Return an event for a gradient on the host; for others the current stream, mostly free to wait for."""
        return self.record(Stream.CURRENT) if self.is_host(parameter) else self._stream(Stream.CURRENT)

    def _keep(self, tensors: Iterable[Tensor], stream: Stream) -> None:
        """Keep memory of tensors, which may belong to any stream, until this one has passed its present end."""
        used_by = self._stream(stream)
        for tensor in tensors:
            if tensor.is_neg():  # lazily: torch raises an error after it has recorded a copy
                tensor = tensor.new_empty(0).set_(tensor.untyped_storage())
            tensor.record_stream(used_by)  # does nothing where it is that stream's

    @torch.no_grad()
    def pack(
        self, gradients: Sequence[Tensor], layout: FlatLayout[Any], dtype: torch.dtype, norm: ChunkSums | None = None
    ) -> Tensor:
        """Enqueue one launch; gradients with other strides than their states are copied first."""
        for elsewhere in {gradient.device for gradient in gradients} - {self.device}:
            raise ValueError(
                f"a gradient is on {elsewhere}, expected {self.device} as the scheduler's device; pass CudaDevice for "
                "the device that the model is on"
            )
        self._keep(gradients, Stream.CURRENT)
        buffer = torch.empty(layout.numel, dtype=dtype, device=self.device)
        ordered = [
            gradient
            if _lies_as(gradient, state.strides)
            else gradient.new_empty_strided(state.shape, state.strides).copy_(gradient)
            for state, gradient in zip(layout.states, gradients, strict=True)
        ]
        sums, nonfinite = (None, None) if norm is None else (norm.sums, norm.nonfinite)
        self._gpu.pack_gradients(ordered, layout.offsets, buffer, sums, nonfinite)
        return buffer

    def update(self, steps: Sequence[ResidentStep], sets: Sequence[Coefficients]) -> None:
        self._keep((step.gradient for step in steps), Stream.CURRENT)
        self._gpu.update(steps, sets)

    def free_bytes(self) -> int:
        """Return what torch may still take of what the driver has free, and what it has reserved beyond its peak."""
        free, total = self._cuda.mem_get_info(self.device)
        reserved = self._cuda.memory_reserved(self.device)
        limit = self._cuda.get_per_process_memory_fraction(self.device) * total  # beyond which torch reserves nothing
        return max(0, int(min(free, limit - reserved) + reserved - self._cuda.max_memory_allocated(self.device)))

    @torch.no_grad()
    def scatter(self, sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
        """Enqueue one launch for each dtype, and a copy for each source on the host or with other strides."""
        alike: list[tuple[Tensor, Tensor]] = []
        others: list[tuple[Tensor, Tensor]] = []
        for source, parameter in zip(sources, targets, strict=True):
            target = parameter.data  # with a version counter of its own
            is_alike = (
                target.shape == source.shape
                and target.dtype == source.dtype
                and _lies_as(target, source.stride())
                and target.device == self.device
                and not self.is_host(source)  # on some devices, pinned memory has another address for kernels
            )
            (alike if is_alike else others).append((source, target))
        self._gpu.scatter_values([source for source, _ in alike], [target for _, target in alike])
        for source, target in others:
            copy_one(target, source, non_blocking=not self.is_host(target))

    def host_empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        return self.pinned.empty(numel, dtype)

    def empty(self, numel: int, dtype: torch.dtype, stream: Stream) -> Tensor:
        with self._cuda.device(self.device), self._cuda.stream(self._stream(stream)):
            return torch.empty(numel, dtype=dtype, device=self.device)

    @torch.no_grad()
    def copy(self, destination: Tensor, source: Tensor, stream: Stream) -> None:
        with self._cuda.device(self.device), self._cuda.stream(self._stream(stream)):
            destination.copy_(source, non_blocking=True)

    def record(self, stream: Stream) -> Event:
        """Return an event; where the driver has no memory for one, what was enqueued is done already."""
        with THIS_THREAD.without_handlers:
            try:
                event: torch.cuda.Event = self._cuda.Event(blocking=True)  # waiting for it sleeps
                event.record(self._stream(stream))
            except Exception as error:
                if not is_short_of_memory(error):
                    raise
                self._stream(stream).synchronize()
                return AllEvents()
        return event

    def wait(self, stream: Stream, event: Event) -> None:
        waiting = self._stream(stream)
        if isinstance(event, AllEvents):
            event.synchronize()
        elif not hasattr(event, "wait_event"):
            waiting.wait_event(event)  # type: ignore[arg-type]
        elif event != waiting:  # a stream, from `mark_ready`
            waiting.wait_stream(event)  # type: ignore[arg-type]

    def record_stream(self, buffer: Tensor, stream: Stream) -> None:
        if self.is_host(buffer):
            self.pinned.hold_until(buffer, self.record(stream), stream)
        else:
            self._keep([buffer], stream)

    def reserve(self, needs: HostNeeds) -> None:
        """Pin what is not pinned yet, near the device; what cannot be pinned is pageable, with a warning."""
        super().reserve(needs)
        copied = needs.pending + needs.shadows + needs.under_way
        missing = copied - self.pinned.size
        if missing <= 0:
            return
        with THIS_THREAD.without_handlers, suppress(OSError, ValueError):  # available memory is unknown
            available = HostMemory.of(self._host).available // local_rank(self._host).count
            if needs.missing + copied + 2 * needs.pending <= available:
                missing += needs.pending  # of the step before, where the CPU is slower than backward
        cores.call_near(self._cpus, lambda: self.pinned.grow(missing, needs.largest))

    def close(self) -> None:
        self.pinned.close()

    def idle_cores(self) -> int:
        return max(1, len(self._cpus) - LEFT_TO_TRAINING)  # one that is shared is better than none

    def start_worker(self, idle: Work) -> Worker:
        """Return a thread on CPUs near the device, where threads that its kernels start stay as well."""

        def settle_in(is_awaited: object) -> None:
            self._cuda.set_device(self.device)  # else it would create a context on device 0 to return to
            cores.bind_thread(self._cpus)

        worker = Worker(idle)
        worker.submit(settle_in)
        return worker


def _pci_address(properties: Any) -> str:
    """Return a device's name in sysfs, or an empty string where torch does not report it."""
    numbers: list[Any] = [getattr(properties, f"pci_{part}_id", None) for part in ("domain", "bus", "device")]
    return "" if None in numbers else "{:04x}:{:02x}:{:02x}.0".format(*numbers)


def _lies_as(tensor: Tensor, strides: tuple[int, ...]) -> bool:
    """Whether a tensor has these dense strides, and is not lazily negated."""
    if tensor.is_neg():
        return False
    own = tensor.stride()
    return own == strides or all(
        size == 1 or mine == theirs for size, mine, theirs in zip(tensor.shape, own, strides, strict=True)
    )
