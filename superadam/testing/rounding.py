"""How state in fewer bits is rounded, in torch: for references that make the same steps without superadam's kernels.

https://github.com/superadam/superadam/blob/main/docs/smaller_state.md says why.
"""

from __future__ import annotations

import torch
from torch import Tensor

from superadam.kernels.hyperparameters import turn_of
from superadam.state import compact


def round_by_thresholds(values: Tensor, step: int, bits: int, first: int = 0) -> Tensor:
    """Return fp32 values as a step stores them in fewer bits: without the lower `bits` bits, which are zero.

    What is stored of a parameter's new `exp_avg` and `exp_avg_sq` with `moments="bf16"` is this with 16 bits.
    Infinities and the sign of zero stay; NaN becomes a NaN.

    Args:
        values: one-dimensional, fp32, on the CPU: elements of a parameter in the order in which they lie in memory.
        step: number of the parameter's step that made the values, counted from 1.
        bits: how many to cut off, from 1 to 20.
        first: position of the first of them in the whole parameter; not 0 for a shard of its later rows.
    """
    patterns = values.detach().contiguous().view(torch.int32)
    phase = first % compact.BLOCK
    moved = patterns + compact.thresholds(phase + len(patterns), turn_of(step), bits)[phase:]
    return torch.where(values.isnan(), patterns | 0x400000, moved).bitwise_and_(-1 << bits).view(torch.float32)


def round_to_8_bits(values: Tensor, step: int, *, is_first: bool) -> Tensor:
    """Return fp32 values as a step stores them with `moments="8bit"`; a block with an Inf or NaN becomes NaN.

    Args:
        values: as for `round_by_thresholds`, but whole blocks of 64 elements.
        step: as for `round_by_thresholds`.
        is_first: whether they are those of `exp_avg`; else of `exp_avg_sq`.
    """
    encoding = compact.EXP_AVG if is_first else compact.EXP_AVG_SQ
    codes = torch.empty(len(values), dtype=torch.uint8, device="cpu")
    exponents = torch.empty(len(values) // compact.BLOCK, dtype=torch.uint8, device="cpu")
    encoding.encode(values.detach().contiguous(), codes, exponents, turn_of(step))
    return encoding.decode(codes, exponents)
