"""The bytes that a pass over the state moves."""

from __future__ import annotations

from superadam.kernels import native
from superadam.kernels.native import Dtype, Format, Pass

SIZES = {Dtype.NONE: 0, Dtype.BFLOAT16: 2, Dtype.FLOAT16: 2, Dtype.FLOAT32: 4, Dtype.FLOAT64: 8}
"""Bytes per element."""

STATE_READERS = frozenset({Pass.SPECULATE, Pass.COMMIT, Pass.COMMIT_AND_SPECULATE, Pass.UPDATE})
STATE_WRITERS = frozenset({Pass.COMMIT, Pass.COMMIT_AND_SPECULATE, Pass.UPDATE})
OUT_WRITERS = frozenset({Pass.SPECULATE, Pass.COMMIT_AND_SPECULATE, Pass.UPDATE})


def state_bytes(gradient_dtype: Dtype, form: Format) -> float:
    """Return the bytes of master and moments for one element."""
    wide = 8 if gradient_dtype is Dtype.FLOAT64 else 4
    moment = 2 if Format.MOMENTS_BFLOAT16 in form else 1 + 1 / native.BLOCK if Format.MOMENTS_8BIT in form else wide
    return (3 if Format.MASTER_24BIT in form else wide) + 2 * moment


def bytes_per_element(which: Pass, gradient_dtype: Dtype, out_dtype: Dtype, form: Format = Format.PLAIN) -> float:
    """Return what a pass loads and stores for one element; the entries per chunk of the norm are left out."""
    total = SIZES[gradient_dtype] * (2 if which is Pass.COMMIT_AND_SPECULATE else 1)
    total += SIZES[out_dtype] if which in OUT_WRITERS else 0
    return total + state_bytes(gradient_dtype, form) * ((which in STATE_READERS) + (which in STATE_WRITERS))
