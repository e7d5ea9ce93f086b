"""What an accelerator may still be copying to host memory."""

from __future__ import annotations

from typing import Any

import torch


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

    def record(self) -> AcceleratorEvent | None:
        """Return an event at the present end of the calling thread's current stream; None while nothing has used it."""
        return AcceleratorEvent(self._module, self._options) if self._module.is_initialized() else None


class AcceleratorEvent:
    """A `superadam.devices.Event`, for threads whose current device is another one, where they make no context."""

    __slots__ = ("_device", "_event", "_module")

    def __init__(self, module: Any, options: dict[str, Any]) -> None:
        self._module, self._device = module, module.current_device()
        self._event = module.Event(**options)
        self._event.record()

    def query(self) -> bool:
        """Return whether what the stream had to do has passed."""
        with self._module.device(self._device):
            return bool(self._event.query())

    def synchronize(self) -> None:
        """Block the calling thread until that has passed."""
        with self._module.device(self._device):
            self._event.synchronize()
