"""Pins memory of ours with the driver of CUDA or HIP.

Owns the two calls and their errors.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch

from superadam.devices.slab import PinningError, gigabytes
from superadam.host.memory import lockable_bytes

PORTABLE = 1
"""cudaHostRegisterPortable: pinned for every device of the process."""


class CudaRegistrar:
    """A `Registrar` by way of the runtime that torch has loaded.

    Args:
        device: whose context the calls are made in.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def register(self, address: int, size: int) -> None:
        """Pin `size` bytes from `address` on, which takes long for many of them.

        Raises:
            PinningError: the driver refuses.
        """
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
        """Undo `register`.

        Raises:
            PinningError: the driver refuses.
        """
        with torch.cuda.device(self._device):
            cudart = _runtime()
            code = cudart.cudaHostUnregister(address)
            if int(code) != 0:
                raise PinningError(f"the driver refused to unpin host memory ({self._reason(cudart, code)})")

    def _reason(self, cudart: Any, code: Any) -> str:
        """Return what an error code means, and make the runtime forget the error.

        The runtime remembers the last error of a thread until somebody asks for it: torch does after its next kernel,
        and would raise it there.
        """
        with suppress(RuntimeError):
            torch.zeros(1, device=self._device)
        return f"{cudart.cudaGetErrorString(code)}, code {int(code)}"


def _runtime() -> Any:
    """Return the functions of the runtime that torch calls itself."""
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]
