"""The bytes that a pass over the state moves."""

from __future__ import annotations

from superadam.kernels.dtypes import DTYPES
from superadam.kernels.native import Dtype, Pass
from superadam.offload.needs import bytes_of_state
from superadam.state.storage import Storage

SIZES = {Dtype.NONE: 0} | {number: dtype.itemsize for dtype, number in DTYPES.items()}
"""Bytes per element."""

STATE_WRITERS = frozenset({Pass.COMMIT, Pass.COMMIT_AND_SPECULATE, Pass.UPDATE})
OUT_WRITERS = frozenset({Pass.SPECULATE, Pass.COMMIT_AND_SPECULATE, Pass.UPDATE})
PLAIN = Storage()


def bytes_per_element(which: Pass, gradient_dtype: Dtype, out_dtype: Dtype, storage: Storage = PLAIN) -> float:
    """Return what a pass loads and stores for one element; the entries per chunk of the norm are left out."""
    total = SIZES[gradient_dtype] * (2 if which is Pass.COMMIT_AND_SPECULATE else 1)
    total += SIZES[out_dtype] if which in OUT_WRITERS else 0
    state = 24 if gradient_dtype is Dtype.FLOAT64 else bytes_of_state(storage)
    return total + state * ((which is not Pass.NORM) + (which in STATE_WRITERS))
