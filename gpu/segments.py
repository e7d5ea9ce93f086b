"""Segments: tensors whose state is kept on the GPU, checked before a pass runs over them.

Owns what each pass needs and what fits together; `adam.py` runs the passes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from superadam.hyperparameters import Coefficients
from superadam.native import Dtype, Flag, Pass

from .tensors import DTYPES, check_tensor, words


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """One tensor's state on the GPU and what a pass reads and writes; like `superadam_segment` in `cpu/cdef.h`.

    All tensors are dense, of one length and on one device, and count as their elements in the order of memory. State is
    float32 beside gradients and working copies of float32, bfloat16 or float16, or everything is float64. What a pass
    does not use may be None.

    Attributes:
        master: the parameter's value in the precision of the state.
        gradient: of the step.
        exp_avg: first moment.
        exp_avg_sq: second moment.
        max_exp_avg_sq: its maximum; used where the coefficient set, or the accepted one, has AMSGRAD.
        out: the working copy.
        accepted_gradient: the older gradient of COMMIT_AND_SPECULATE, of the dtype of `gradient`.
        coefficients: index of the coefficient set for `gradient`.
        accepted_coefficients: index of the one for `accepted_gradient`.
    """

    master: Tensor
    gradient: Tensor | None = None
    exp_avg: Tensor | None = None
    exp_avg_sq: Tensor | None = None
    max_exp_avg_sq: Tensor | None = None
    out: Tensor | None = None
    accepted_gradient: Tensor | None = None
    coefficients: int = 0
    accepted_coefficients: int = 0


@dataclass(frozen=True, slots=True)
class Variant:
    """What the code of a launch is compiled for."""

    real: Dtype
    gradient: Dtype
    out: Dtype
    flags: Flag
    accepted_flags: Flag


ROWS = ("master", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "gradient", "accepted_gradient", "out")
"""Arrays of a segment in the order in which the kernel's table has them."""

_STATE = ("exp_avg", "exp_avg_sq")
READS = {
    Pass.SPECULATE: (*_STATE, "gradient"),
    Pass.COMMIT: (*_STATE, "gradient"),
    Pass.COMMIT_AND_SPECULATE: (*_STATE, "gradient", "accepted_gradient"),
    Pass.UPDATE: (*_STATE, "gradient"),
    Pass.ROUND: (),
}
"""The passes, and what each needs beside the master."""

NEEDS_OUT = (Pass.SPECULATE, Pass.COMMIT_AND_SPECULATE, Pass.ROUND)


def checked_segment(
    which: Pass, segment: Segment, name: str, sets: Sequence[Coefficients], device: torch.device
) -> tuple[Variant, list[int]]:
    """Return a segment's variant and the entries of its column in the table, from the addresses on.

    Raises:
        ValueError, TypeError: the segment does not fit the pass.
    """
    flags = accepted_flags = Flag(0)
    if which is not Pass.ROUND:
        flags = _flags(segment.coefficients, sets, f"{name}'s coefficients")
    if which is Pass.COMMIT_AND_SPECULATE:
        accepted_flags = _flags(segment.accepted_coefficients, sets, f"{name}'s accepted_coefficients")
    used = ["master", *READS[which]]
    if Flag.AMSGRAD in flags | accepted_flags:
        used.append("max_exp_avg_sq")
    if which in NEEDS_OUT or (which is Pass.UPDATE and segment.out is not None):
        used.append("out")

    addresses = dict.fromkeys(ROWS, 0)
    dtypes = dict.fromkeys(ROWS, Dtype.NONE)
    for array in used:
        tensor: Tensor | None = getattr(segment, array)
        if tensor is None:
            raise ValueError(f"{name} lacks {array}, which {which.name} uses; give it that tensor")
        check_tensor(tensor, f"{name}'s {array}", device)
        if tensor.numel() != segment.master.numel():
            raise ValueError(
                f"{name}'s {array} has {tensor.numel()} elements, expected {segment.master.numel()} as its master; "
                "give every tensor of a segment the same length"
            )
        addresses[array], dtypes[array] = tensor.data_ptr(), DTYPES[tensor.dtype]
    for array in used:
        fits = dtypes[array] is dtypes["master"]
        if array in ("gradient", "out"):
            fits = (dtypes[array] is Dtype.FLOAT64) == (dtypes["master"] is Dtype.FLOAT64)
        elif array == "accepted_gradient":
            fits = dtypes[array] is dtypes["gradient"]
        if not fits or dtypes["master"] not in (Dtype.FLOAT32, Dtype.FLOAT64):
            present = ", ".join(f"{each} {words(getattr(segment, each).dtype)}" for each in used)
            raise TypeError(
                f"{name} has {present}; expected float32 state beside gradients and out of float32, bfloat16 or "
                "float16, or everything float64; convert what differs"
            )
    variant = Variant(dtypes["master"], dtypes["gradient"], dtypes["out"], flags, accepted_flags)
    return variant, [*addresses.values(), segment.coefficients, segment.accepted_coefficients]


def _flags(index: int, sets: Sequence[Coefficients], name: str) -> Flag:
    if not 0 <= index < len(sets):
        raise ValueError(f"{name} is {index}, expected the index of one of {len(sets)} sets; give every index an entry")
    return sets[index].flags
