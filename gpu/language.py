"""Imports Triton, or records why it cannot be used.

Without Triton, `jit` leaves functions as they are, so that modules with kernels can be imported all the same;
`choice.py` decides whether their kernels are launched.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

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
    """Show what `jit` returns."""


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
