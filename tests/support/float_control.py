"""The floating-point control register of the calling thread, for tests that set it otherwise and look at it."""

from __future__ import annotations

import contextlib
import ctypes
import platform
from collections.abc import Iterator

import torch

_libm = ctypes.CDLL("libm.so.6")
_IS_X86 = platform.machine() == "x86_64"
_TO_NEAREST = 0
_UPWARD = 0x800 if _IS_X86 else 0x400000  # FE_UPWARD of <fenv.h>


def control_register() -> int:
    """Return MXCSR without its exception flags, or FPCR, out of the `fenv_t` of glibc."""
    environment = ctypes.create_string_buffer(64)
    _libm.fegetenv(environment)
    if _IS_X86:
        return int.from_bytes(environment.raw[28:32], "little") & ~0x3F
    return int.from_bytes(environment.raw[:4], "little")


@contextlib.contextmanager
def flushed_denormals() -> Iterator[None]:
    """Treat denormals as zeros in this thread, as `torch.set_flush_denormal(True)` does."""
    assert torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(False)


@contextlib.contextmanager
def rounded_upward() -> Iterator[None]:
    """Round towards +infinity in this thread."""
    assert _libm.fesetround(_UPWARD) == 0
    try:
        yield
    finally:
        _libm.fesetround(_TO_NEAREST)
