"""Floating-point modes of the calling thread that kernels do not have."""

import ctypes
import platform
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_libm = ctypes.CDLL("libm.so.6")
_UPWARD = 0x800 if platform.machine() == "x86_64" else 0x400000  # FE_UPWARD of <fenv.h>


@contextmanager
def flushed_denormals() -> Iterator[None]:
    """Treat denormals as zeros in this thread, as `torch.set_flush_denormal(True)` does."""
    assert torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(False)


@contextmanager
def rounded_upward() -> Iterator[None]:
    """Round towards +infinity in this thread."""
    assert _libm.fesetround(_UPWARD) == 0
    try:
        yield
    finally:
        _libm.fesetround(0)  # FE_TONEAREST
