"""Pins host memory with the driver of CUDA or HIP."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch

from superadam.devices.slab import PinningError
from superadam.host.memory import gigabytes, lockable_bytes

PORTABLE = 1
"""cudaHostRegisterPortable: pinned for every device of the process."""


class CudaRegistrar:
    """A `Registrar` that calls the runtime that torch has loaded, in the context of `device`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def register(self, address: int, size: int) -> None:
        """Pin `size` bytes from `address` on, which is slow; raises PinningError where the driver refuses."""
        with torch.cuda.device(self._device):
            cudart = _runtime()
            code = cudart.cudaHostRegister(address, size, PORTABLE)
            if int(code) != 0:
                reason = self._reason(cudart, code)
                limit = lockable_bytes()
                may_lock = "without limit" if limit is None else f"at most {gigabytes(limit)}"
                raise PinningError(
                    f"the driver refused to pin {gigabytes(size)} of host memory ({reason}), of which this process may "
                    f"lock {may_lock} (RLIMIT_MEMLOCK); run `ulimit -l unlimited` before it, or give it more memory"
                )

    def unregister(self, address: int) -> None:
        """Undo `register`; raises PinningError where the driver refuses."""
        with torch.cuda.device(self._device):
            cudart = _runtime()
            code = cudart.cudaHostUnregister(address)
            if int(code) != 0:
                raise PinningError(f"the driver refused to unpin host memory ({self._reason(cudart, code)})")

    def _reason(self, cudart: Any, code: Any) -> str:
        """Return what an error code means, and clear the error.

        The runtime keeps a thread's last error until it is read: torch would raise it after its next kernel.
        """
        with suppress(RuntimeError):
            torch.zeros(1, device=self._device)
        return f"{cudart.cudaGetErrorString(code)}, code {int(code)}"


def _runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]
