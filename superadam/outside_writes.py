"""Writes to parameters that were not ours: weights loaded after construction, EMA weights swapped in, an in-place edit.

Fingerprints only hint at such a write. What decides are the values: an element that
still holds the bits we last wrote keeps its fp32 master; only a differing element is adopted. So loading the same
weights again changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from superadam.parameter import ParameterState

_BITS = {
    torch.float32: torch.int32,
    torch.float64: torch.int64,
    torch.bfloat16: torch.int16,
    torch.float16: torch.int16,
}


def differing(first: Tensor, second: Tensor) -> Tensor:
    """Return where two tensors of one dtype differ in any bit; NaN equals NaN, +0 and -0 differ."""
    bits = _BITS[first.dtype]
    return (first.contiguous().view(bits) != second.contiguous().view(bits)) & ~(first.isnan() & second.isnan())


@dataclass(frozen=True, slots=True)
class OutsideWrite:
    """Elements of one parameter that somebody else wrote: where, and with what values."""

    state: ParameterState
    where: Tensor
    values: Tensor

    @staticmethod
    def found_in(state: ParameterState, written_by_us: Tensor) -> OutsideWrite | None:
        """Compare the parameter with what we last wrote; None when no bit differs.

        Args:
            state: the parameter.
            written_by_us: CPU tensor of the parameter's shape and dtype.
        """
        present = state.parameter.detach().cpu()
        where = differing(present, written_by_us)
        return OutsideWrite(state, where, present.clone()) if bool(where.any()) else None

    @torch.no_grad()
    def adopt(self) -> None:
        """Make the written elements the truth, in the parameter and in its master; the others are left alone."""
        state = self.state
        for target in (state.master, state.parameter):
            if target is not None:
                target[self.where.to(target.device)] = self.values.to(target.device)[self.where.to(target.device)].to(
                    target.dtype
                )


def adopt_into_clean(state: ParameterState) -> None:
    """Bring a working copy's master up to date with what was written to the copy; nothing must be pending on it."""
    if state.master is not None:
        write = OutsideWrite.found_in(state, state.master.to(state.parameter.dtype))
        if write is not None:
            write.adopt()
