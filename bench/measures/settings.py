"""Which settings of the passes are measured."""

from __future__ import annotations

from collections.abc import Sequence

from superadam.cli.bench.passes import Setting
from superadam.kernels.native import Dtype


def out_dtype_of(gradient_dtype: Dtype) -> Dtype:
    """Return the usual working copy for such gradients: bf16, or fp16 and fp64 for gradients of their own dtype."""
    return gradient_dtype if gradient_dtype in (Dtype.FLOAT16, Dtype.FLOAT64) else Dtype.BFLOAT16


def settings(isas: Sequence[str], threads: Sequence[int], dtypes: Sequence[Dtype]) -> list[Setting]:
    """Return the first of each, and then each of them varied by itself.

    fp64 is measured with the first instruction set only: it has one set of kernels.
    """
    return [
        Setting(isa, count, dtype, out_dtype_of(dtype))
        for isa in isas
        for count in threads
        for dtype in dtypes
        if (isa != isas[0]) + (count != threads[0]) + (dtype != dtypes[0]) <= 1
        and (isa == isas[0] or dtype is not Dtype.FLOAT64)
    ]
