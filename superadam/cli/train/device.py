"""The device that a run computes on: waiting for it, copying batches to it, and the peaks of memory."""

from __future__ import annotations

import resource

import torch
from torch import Tensor


def wait_for(device: torch.device) -> None:
    """Return when the device has finished its current stream's work, and what that stream waits for."""
    if device.type == "cuda":
        # Waiting for the stream itself would spin on a core that Adam needs.
        passed = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        passed.record(torch.cuda.current_stream(device))
        passed.synchronize()


def moved(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a CPU tensor on the device; the host does not wait for the copy, and may drop the tensor at once."""
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def peak_host_bytes() -> int:
    """Return the most memory that this process held at once, resident, as the operating system counted it."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts in KiB


def peak_device_bytes(device: torch.device) -> int | None:
    """Return the most memory that tensors took at once on a CUDA device; None for the CPU."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
