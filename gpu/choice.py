"""Which implementation the functions of this folder use: Triton's compiler, its interpreter, or plain torch.

Results have the same bits; torch takes many launches and temporaries where Triton takes one launch.
"""

from __future__ import annotations

import enum
import functools
import logging
import os
from dataclasses import dataclass

import torch

from superadam.host.signals import THIS_THREAD

from . import language

VARIABLE = "SUPERADAM_GPU"
"""Environment variable that requests an implementation: "triton" or "torch"."""

_logger = logging.getLogger("superadam")
_told: set[str] = set()


class Backend(enum.Enum):
    """How kernels run."""

    TRITON = "triton"  # compiled, on a GPU
    INTERPRETER = "triton interpreter"  # on the CPU: for tests (TRITON_INTERPRET=1)
    TORCH = "torch"  # as torch operations, on any device


@dataclass(frozen=True, slots=True)
class Choice:
    """What runs, and why."""

    backend: Backend
    reason: str


def backend(device: torch.device | str) -> Choice:
    """Return which implementation serves tensors on `device`, and why.

    Logs one warning when Triton is missing on a GPU and torch was not requested.

    Raises:
        RuntimeError: Triton was requested and cannot be used there.
        ValueError: `SUPERADAM_GPU` holds an unknown name.
    """
    device = torch.device(device)
    request = os.environ.get(VARIABLE, "")
    if request not in ("", "triton", "torch"):
        raise ValueError(f"{VARIABLE} is {request!r}, expected 'triton' or 'torch'; unset it to let superadam choose")
    if request == "torch":
        return Choice(Backend.TORCH, f"{VARIABLE}=torch asks for it")
    obstacle = language.MISSING
    if obstacle is None and language.IS_INTERPRETED and device.type != "cpu":
        obstacle = f"Triton's interpreter (TRITON_INTERPRET) only reaches memory of the CPU, not {device}"
    if obstacle is None and not language.IS_INTERPRETED and device.type == "cpu":
        obstacle = "Triton's compiled kernels do not reach memory of the CPU"
    if obstacle is None and device.type != "cpu":
        obstacle = _obstacle_on(device)
    if obstacle is None:
        which = Backend.INTERPRETER if language.IS_INTERPRETED else Backend.TRITON
        return Choice(which, f"Triton {language.triton.__version__} can be used on {device.type}")
    if request == "triton":
        raise RuntimeError(f"{VARIABLE}=triton asks for Triton's kernels, but {obstacle}; mend that, or unset it")
    if device.type != "cpu" and obstacle not in _told:
        _told.add(obstacle)
        _logger.warning(
            "superadam packs and scatters with plain torch on %s, which gives the same bits in many launches, not one, "
            "and keeps no bucket there: %s; mend that, or set %s=torch to accept this silently",
            device,
            obstacle,
            VARIABLE,
        )
    return Choice(Backend.TORCH, obstacle)


@functools.cache
def _obstacle_on(device: torch.device) -> str | None:
    """Return why no kernel can be compiled and launched on a GPU; tries it once, before training depends on it."""
    with THIS_THREAD.without_handlers:
        try:
            with language.on(device):
                language.probe[(1,)]()
        except Exception as error:  # there may be no C compiler, no Python.h, no driver
            lines = str(error).strip().splitlines()
            return f"Triton cannot launch a kernel ({type(error).__name__}: {lines[0] if lines else 'no reason given'})"
    return None
