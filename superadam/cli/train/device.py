"""The device that a run computes on: waiting for it, so that what is timed has happened, and copying batches to it."""

from __future__ import annotations

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
