"""What an accelerator may still be copying to host memory."""

from __future__ import annotations

from typing import Any

import torch

from superadam.devices.interface import Event


class Accelerator:
    """The accelerator that may make gradients of parameters in host memory, as FSDP2 does with `CPUOffloadPolicy`.

    Args:
        module: torch's module of it, such as `torch.cuda`.
        options: of its events.
    """

    def __init__(self, module: Any, **options: Any) -> None:
        self._module, self._options = module, options

    @staticmethod
    def of_torch() -> Accelerator | None:
        """Return the one that torch was built for; None where it was built for the CPU alone."""
        kind = torch.accelerator.current_accelerator()
        if kind is None:
            return None
        options = {"blocking": True} if kind.type == "cuda" else {}  # waiting for it sleeps
        return Accelerator(torch.get_device_module(kind), **options)

    def record(self) -> Event | None:
        """Return an event at the present end of the calling thread's current stream; None while nothing has used it."""
        if not self._module.is_initialized():
            return None
        event: Any = self._module.Event(**self._options)
        event.record()
        recorded: Event = event
        return recorded
