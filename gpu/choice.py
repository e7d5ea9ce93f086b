"""Which implementation the functions of this folder use: Triton's compiler, its interpreter, or plain torch.

Results have the same bits; torch takes many launches and temporaries where Triton takes one launch. Owns the choice and
the words that explain it.
"""

from __future__ import annotations

import enum
import logging
import os
from dataclasses import dataclass

import torch

from . import language

VARIABLE = "SUPERADAM_GPU"
"""Environment variable that asks for an implementation: "triton" or "torch"."""

_logger = logging.getLogger("superadam")
_requested: str | None = None
_told: set[str] = set()


class Backend(enum.Enum):
    """How kernels run."""

    TRITON = "triton"
    """Compiled, on a GPU."""
    INTERPRETER = "triton interpreter"
    """In Triton's interpreter, on the CPU: for tests (TRITON_INTERPRET=1)."""
    TORCH = "torch"
    """As torch operations, on any device."""


@dataclass(frozen=True, slots=True)
class Choice:
    """What runs, and why."""

    backend: Backend
    reason: str


def set_backend(name: str) -> None:
    """Ask for an implementation from now on, instead of `SUPERADAM_GPU`.

    Args:
        name: "triton", which raises wherever Triton cannot be used; "torch"; or "auto", which takes Triton where it
            can be used.

    Raises:
        ValueError: another name.
        RuntimeError: Triton was asked for and cannot be imported.
    """
    global _requested
    if name not in ("auto", "triton", "torch"):
        raise ValueError(f"backend {name!r} is unknown; expected 'triton', 'torch' or 'auto'")
    if name == "triton" and language.MISSING is not None:
        raise RuntimeError(_refusal("set_backend('triton')", language.MISSING))
    _requested = name


def backend(device: torch.device | str) -> Choice:
    """Return which implementation serves tensors on `device`, and why.

    Logs one warning when Triton is missed on a GPU and nobody asked for torch.

    Raises:
        RuntimeError: Triton was asked for and cannot be used there.
        ValueError: `SUPERADAM_GPU` holds an unknown name.
    """
    device = torch.device(device)
    request, source = _request()
    if request == "torch":
        return Choice(Backend.TORCH, f"{source} asks for it")
    obstacle = language.MISSING
    if obstacle is None and language.IS_INTERPRETED and device.type != "cpu":
        obstacle = f"Triton's interpreter (TRITON_INTERPRET) only reaches memory of the CPU, not {device}"
    if obstacle is None and not language.IS_INTERPRETED and device.type == "cpu":
        obstacle = "Triton's compiled kernels do not reach memory of the CPU"
    if obstacle is None:
        which = Backend.INTERPRETER if language.IS_INTERPRETED else Backend.TRITON
        return Choice(which, f"Triton {language.triton.__version__} can be used on {device.type}")
    if request == "triton":
        raise RuntimeError(_refusal(source, obstacle))
    if device.type != "cpu" and obstacle not in _told:
        _told.add(obstacle)
        _logger.warning(
            "superadam packs and scatters with plain torch on %s, which gives the same bits in many launches, not one: "
            "%s; install superadam[gpu], or set %s=torch to accept this silently",
            device,
            obstacle,
            VARIABLE,
        )
    return Choice(Backend.TORCH, obstacle)


def _request() -> tuple[str, str]:
    """Return "auto", "triton" or "torch", and what asks for it."""
    if _requested is not None:
        return _requested, f"set_backend({_requested!r})"
    text = os.environ.get(VARIABLE)
    if text and text not in ("triton", "torch"):
        raise ValueError(f"{VARIABLE} is {text!r}, expected 'triton' or 'torch'; unset it to let superadam choose")
    return text or "auto", f"{VARIABLE}={text}"


def _refusal(source: str, obstacle: str) -> str:
    return f"{source} asks for Triton's kernels, but {obstacle}; mend that, or ask for 'auto' or 'torch'"
