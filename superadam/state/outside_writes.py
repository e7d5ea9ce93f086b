"""Adopts outside writes to parameters: loaded weights, swapped-in EMA weights, in-place edits.

Fingerprints only hint at such a write, and so do samples (`superadam.state.samples`); the values decide. An element
that still holds the bits we last wrote keeps its fp32 master, and only a differing element is adopted, so loading the
same weights again changes nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor

from superadam.kernels import torch_private
from superadam.state.parameter import ParameterState


def differing(first: Tensor, second: Tensor) -> Tensor:
    """Return where two tensors of one dtype differ in any bit; NaN equals NaN, +0 and -0 differ."""
    bits = getattr(torch, f"int{8 * first.dtype.itemsize}")
    return (first.contiguous().view(bits) != second.contiguous().view(bits)) & ~(first.isnan() & second.isnan())


@torch.no_grad()
def adopt_outside_write(state: ParameterState) -> None:
    """Adopt in a working copy's master what was written to the copy; nothing must be pending on it."""
    if state.master is None:
        return
    present = state.local.detach().cpu()
    where = differing(present, state.master.to(present.dtype))
    if where.any():
        with torch_private.inference_mode(state.master.is_inference()):  # where alone such a master can be written to
            state.master[where] = present[where].to(state.dtype)
