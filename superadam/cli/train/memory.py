"""Memory of a run: an estimate of what it needs, and the peak of a process.

A process's figures are of all of it: model, optimizer, activations, libraries and, where one runs, the reference.
"""

from __future__ import annotations

import resource
from dataclasses import replace

import torch

from superadam.cli.train.llama import LOGITS_AT_ONCE
from superadam.cli.train.presets import BYTE_VALUES, Shape
from superadam.cli.train.settings import BYTE_MODEL, Settings
from superadam.cli.usage import UsageError
from superadam.host import memory
from superadam.host.machine import Host
from superadam.host.memory import gigabytes
from superadam.offload.needs import needs_of
from superadam.offload.placement import numel_of_buckets

_LIBRARIES = 200_000_000
"""Bytes of what the first steps load and start, as a run of a tiny model takes them."""

_LARGEST_IN_HEAP = 32 << 20
"""Bytes of the largest block that glibc does not give back when it is freed; many of them take up to twice the room."""


def needed_bytes(settings: Settings, *, is_verified: bool, processes: int = 1) -> tuple[int, int]:
    """Return about how many bytes of the host and of a CUDA device a run adds at its peak to what is taken already.

    What autograd keeps is counted as the models are written, the largest tensors only. Of several processes, these are
    the bytes of each.
    """
    width, heads = settings.width, settings.heads
    as_decoder = (width, settings.layers, heads, heads, width // heads, 8 * width // 3)  # two matrices of 4, not three
    shape = settings.shape or Shape(BYTE_MODEL, BYTE_VALUES, *as_decoder, tied=False)
    is_on_host = torch.device(settings.device).type == "cpu"
    size = 2 if settings.dtype == "bf16" else 4
    computed = 4 if is_on_host else size
    tokens, matrix = settings.batch * settings.seq // processes, shape.vocabulary * shape.width
    stream = computed * tokens * shape.width
    block = computed * tokens * (6 * shape.width + 5 * shape.heads * shape.head_width + 4 * shape.feed_forward)
    logits = 3 * 4 * min(tokens * shape.vocabulary, LOGITS_AT_ONCE)
    at_once = max(block + computed * matrix, logits) * (2 if is_on_host and stream < _LARGEST_IN_HEAP else 1)
    at_loss = shape.layers * (stream if settings.checkpointing else block) + at_once
    if computed != size:  # weights are converted
        at_loss += 4 * (matrix if settings.checkpointing else shape.parameters)
    share, gathered, kept = shape.parameters, 0, size
    if processes > 1:  # shards in fp32, and two groups of whole weights and their gradients, in fp32, too
        share, kept = -(-shape.parameters // processes), 4
        gathered = 2 * (size + 4) * max(matrix, (shape.parameters - matrix) // shape.layers)
    model = torch.empty(share, dtype=torch.bfloat16 if kept == 2 else torch.float32, device="meta")
    parameters, needs = kept * share, needs_of(model, is_on_host=is_on_host)
    numel = numel_of_buckets(shape.parameters) if isinstance(settings.bucket_numel, str) else settings.bucket_numel
    needs = replace(needs, largest=kept * (matrix // processes + numel) if settings.overlap else 0)
    host = _LIBRARIES + needs.state + (16 * (share + matrix // processes) if is_verified else 0)
    if is_on_host:
        shadows = needs.shadows if settings.overlap else 0
        return host + gathered + parameters + max(at_loss, block + needs.gradients + shadows), 0
    gradients = parameters  # as large
    return host + needs.pending + needs.under_way, gathered + parameters + max(at_loss, block + gradients)


def require_memory(device: torch.device, needed: int, subject: str, remedy: str, *, present: int = 0) -> None:
    """Check that this many bytes of a CUDA device, or for the CPU of the host, can be taken; `present` are already.

    Raises:
        UsageError: they cannot; where they only seem to be too many for the host, there is a warning.
    """
    if device.type == "cpu":
        try:
            memory.require_memory(Host(), needed, subject, remedy, missing=needed - present)
        except MemoryError as error:
            raise UsageError(str(error)) from error
        return
    available, _ = torch.cuda.mem_get_info(device)
    if needed > available:
        words = f"about {gigabytes(needed)} of {device} memory, but {gigabytes(available)} are available"
        raise UsageError(f"{subject} needs {words}; {remedy}")


def peak_host_bytes() -> int:
    """Return the most memory that this process held at once, resident, as the operating system counted it."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts in KiB


def peak_device_bytes(device: torch.device) -> int | None:
    """Return the most memory that tensors took at once on a CUDA device; None for the CPU."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
