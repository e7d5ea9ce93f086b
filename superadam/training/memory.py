"""How much memory a process has held at most.

Owns where these figures come from. They are of the whole process: model, optimizer, activations, libraries and, where
one runs, the reference.
"""

from __future__ import annotations

import resource

import torch


def peak_host_bytes() -> int:
    """Return the most memory that this process held at once, resident, as the operating system counted it."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts in KiB


def peak_device_bytes(device: torch.device) -> int | None:
    """Return the most memory that tensors took at once on a CUDA device; None for the CPU."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
