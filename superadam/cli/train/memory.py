"""Memory of a run: an estimate of what it needs, and the peak of a process.

A process's figures are of all of it: model, optimizer, activations, libraries and, where one runs, the reference.
"""

from __future__ import annotations

import resource

import torch

from superadam.cli.train.llama import LOGITS_AT_ONCE
from superadam.cli.train.presets import BYTE_VALUES, Shape
from superadam.cli.train.settings import BYTE_MODEL, Settings
from superadam.cli.usage import UsageError
from superadam.host.machine import Host
from superadam.host.memory import HostMemory

_LIBRARIES = 200_000_000
"""Bytes of what the first steps load and start, as a run of a tiny model takes them."""

_LARGEST_IN_HEAP = 32 << 20
"""Bytes of the largest block that glibc does not give back when it is freed; many of them take up to twice the room."""


def needed_bytes(settings: Settings, *, is_verified: bool) -> tuple[int, int]:
    """Return about how many bytes of the host and of a CUDA device a run adds at its peak to what is taken already.

    What autograd keeps is counted as the models are written, the largest tensors only.
    """
    width, heads = settings.width, settings.heads
    as_decoder = (width, settings.layers, heads, heads, width // heads, 8 * width // 3)  # two matrices of 4, not three
    shape = settings.shape or Shape(BYTE_MODEL, BYTE_VALUES, *as_decoder, tied=False)
    is_on_host = torch.device(settings.device).type == "cpu"
    size = 2 if settings.dtype == "bf16" else 4
    computed = 4 if is_on_host else size
    tokens, matrix = settings.batch * settings.seq, shape.vocabulary * shape.width
    stream = computed * tokens * shape.width
    block = computed * tokens * (6 * shape.width + 5 * shape.heads * shape.head_width + 4 * shape.feed_forward)
    logits = 3 * 4 * min(tokens * shape.vocabulary, LOGITS_AT_ONCE)
    at_once = max(block + computed * matrix, logits) * (2 if is_on_host and stream < _LARGEST_IN_HEAP else 1)
    at_loss = shape.layers * (stream if settings.checkpointing else block) + at_once
    if computed != size:  # weights are converted
        at_loss += 4 * (matrix if settings.checkpointing else shape.parameters)
    gradients = size * shape.parameters
    copies = 0 if is_on_host and size == 4 else gradients  # of the masters, as large as gradients and shadows
    host = _LIBRARIES + 12 * shape.parameters + (16 * (shape.parameters + matrix) if is_verified else 0)
    if is_on_host:
        return host + copies + max(at_loss, block + gradients + (copies if settings.overlap else 0)), 0
    return host + gradients, copies + max(at_loss, block + gradients)


def require_memory(device: torch.device, needed: int, subject: str, remedy: str) -> None:
    """Check that this many bytes of a CUDA device, or for the CPU of the host, can be taken.

    Raises:
        UsageError: they cannot.
    """
    try:
        available = HostMemory.of(Host()).available if device.type == "cpu" else torch.cuda.mem_get_info(device)[0]
    except (OSError, ValueError):
        return  # unknown
    if needed > available:
        place = "host" if device.type == "cpu" else device
        words = f"about {needed / 1e9:,.1f} GB of {place} memory, but {available / 1e9:,.1f} GB are available"
        raise UsageError(f"{subject} needs {words}; {remedy}")


def peak_host_bytes() -> int:
    """Return the most memory that this process held at once, resident, as the operating system counted it."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts in KiB


def peak_device_bytes(device: torch.device) -> int | None:
    """Return the most memory that tensors took at once on a CUDA device; None for the CPU."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
