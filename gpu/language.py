"""Triton, or why its kernels cannot run.

Without it, `jit` leaves functions as they are, so that modules with kernels can be imported all the same; plain torch
then packs and scatters. Results have the same bits, in many launches instead of one.
"""

from __future__ import annotations

import functools
import logging
import os
import re
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from superadam.host.signals import THIS_THREAD

VARIABLE = "SUPERADAM_GPU"
"""Environment variable that asks for plain torch where it is "torch"."""

OLDEST = (3, 6)
"""The oldest Triton that is used: before it, `div_rn` and `sqrt_rn` flush denormals on NVIDIA's GPUs."""

OLDEST_ON_HIP = (3, 7)  # before it, `sqrt_rn` makes NaN of denormals there

AS_WRITTEN = {"enable_fp_fusion": False, "sanitize_overflow": False}
"""Of launches: no contraction, and sums of integers that wrap, which TRITON_DEBUG would take for errors."""

triton: Any = None
tl: Any = None

MISSING: str | None = None
"""Why Triton cannot be used; None where it can."""

IS_INTERPRETED = False
"""Whether kernels run in Triton's interpreter, on the CPU: TRITON_INTERPRET=1 was set at import."""

_logger = logging.getLogger("superadam")
_told: set[str] = set()

try:
    import triton  # type: ignore[no-redef]
    import triton.language as tl  # type: ignore[no-redef]
except ImportError as error:
    MISSING = f"Triton cannot be imported ({error})"
else:
    needed = OLDEST_ON_HIP if torch.version.hip else OLDEST
    if tuple(int(part) for part in re.findall(r"\d+", triton.__version__)[:2]) < needed:
        MISSING = f"Triton is version {triton.__version__}, expected {'.'.join(map(str, needed))} or later"


def jit(*, fixed: tuple[str, ...] = ()) -> Callable[[Any], Any]:
    """Return the decorator of kernels and what they call; integer parameters in `fixed` get no specialized code."""
    if MISSING is not None:
        return lambda function: function
    decorator: Callable[[Any], Any] = triton.jit(do_not_specialize=list(fixed))
    return decorator


def constant(value: int) -> Any:
    """Return a module's integer as kernels may use it."""
    return value if MISSING is not None else tl.constexpr(value)


@jit()
def probe() -> None:
    """Show what `jit` returns, and that a kernel can be launched."""


if MISSING is None:
    IS_INTERPRETED = not isinstance(probe, triton.JITFunction)


def on(device: torch.device) -> AbstractContextManager[Any]:
    """Return the context in which kernels are launched on a device's current stream."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def warp_size() -> int:
    """Return how many threads of the current GPU run together: 32, or 64 on AMD's for data centers."""
    if MISSING is not None or IS_INTERPRETED:
        return 32
    return int(triton.runtime.driver.active.get_current_target().warp_size)


def at_most_registers(count: int) -> dict[str, int]:
    """Return the option of launches by which NVIDIA's assembler spills nothing before threads have so many registers.

    By itself it spills a few, to keep one more program on each multiprocessor.
    """
    if MISSING is not None or IS_INTERPRETED or triton.runtime.driver.active.get_current_target().backend != "cuda":
        return {}
    return {"maxnreg": count}


def obstacle(device: torch.device) -> str | None:
    """Return why kernels do not run on tensors of a device; None where they do.

    Logs one warning for each reason on a GPU, unless torch was asked for. Raises ValueError where `SUPERADAM_GPU` holds
    an unknown name.
    """
    request = os.environ.get(VARIABLE, "")
    if request not in ("", "torch"):
        raise ValueError(f"{VARIABLE} is {request!r}, expected 'torch'; unset it to let superadam choose")
    if request:
        return f"{VARIABLE}=torch asks for plain torch"
    reason = MISSING
    if reason is None and IS_INTERPRETED is not (device.type == "cpu"):
        which = "kernels in Triton's interpreter (TRITON_INTERPRET)" if IS_INTERPRETED else "Triton's compiled kernels"
        reason = f"{which} do not reach memory of {device}"
    if reason is None and device.type != "cpu":
        reason = _obstacle_on(device)
    if reason is not None and device.type != "cpu" and reason not in _told:
        _told.add(reason)
        _logger.warning(
            "superadam packs and scatters with plain torch on %s, which gives the same bits in many launches, not one, "
            "and keeps no bucket there: %s; mend that, or set %s=torch to accept this silently",
            device,
            reason,
            VARIABLE,
        )
    return reason


@functools.cache
def _obstacle_on(device: torch.device) -> str | None:
    """Return why no kernel can be compiled and launched on a GPU; tries it once, before training depends on it."""
    with THIS_THREAD.without_handlers:
        try:
            with on(device):
                probe[(1,)]()
        except Exception as error:  # there may be no C compiler, no Python.h, no driver
            lines = str(error).strip().splitlines()
            return f"Triton cannot launch a kernel ({type(error).__name__}: {lines[0] if lines else 'no reason given'})"
    return None
