"""The arrays that a pass runs over, filled, touched and aligned, as one segment for the kernels.

Pointers in the tables are valid only as long as the `PassArrays` lives.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from superadam.kernels import native
from superadam.kernels.hyperparameters import Coefficients, Hyperparameters
from superadam.kernels.native import Dtype, Format
from superadam.state.parameter import SECONDS

ALIGNMENT = 64
"""Bytes: a cache line, from where stores past the caches may start."""

ADAMW_OPTIONS: dict[str, Any] = {"lr": 1e-5, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}
"""Arguments of torch's AdamW and ours, for fine-tuning: on both sides of every comparison."""

HYPERPARAMETERS = Hyperparameters.of_group(
    ADAMW_OPTIONS | {"amsgrad": False, "maximize": False, "decoupled_weight_decay": True}
)
"""The same as kernels' scalars are made of them."""

STEP = 1000
"""The step whose coefficients the passes use: they are the same in every run."""


def _filled(values: npt.NDArray[np.float64], length: int, dtype: Dtype) -> npt.NDArray[np.uint8]:
    """Return `values`, converted and repeated up to `length`, as bytes."""
    kinds: dict[Dtype, npt.DTypeLike] = {Dtype.FLOAT16: np.float16, Dtype.FLOAT64: np.float64}
    pattern: npt.NDArray[Any] = values.astype(kinds.get(dtype, np.float32))
    return _repeated(pattern.view(np.uint16)[1::2] if dtype is Dtype.BFLOAT16 else pattern, length)


def _repeated(pattern: npt.NDArray[Any], length: int) -> npt.NDArray[np.uint8]:
    size = length * pattern.itemsize
    memory = np.empty(size + ALIGNMENT, np.uint8)
    array = memory[-memory.ctypes.data % ALIGNMENT :][:size]
    elements = array.view(pattern.dtype)
    whole = length - length % len(pattern)
    elements[:whole].reshape(-1, len(pattern))[:] = pattern
    elements[whole:] = pattern[: length - whole]
    return array


class PassArrays:
    """State, two gradients and a working copy of `numel` elements, and the segment that describes them.

    With `gradient_dtype` FLOAT64 everything is FLOAT64; `out_dtype` is that of the working copy, `format` that of the
    state; where moments have 8 bits, `numel` is a multiple of `native.BLOCK`. `by_name` has the bytes of each array
    by its name in `native.SEGMENT`. `sums` and `nonfinite` receive a norm, one entry per chunk; `coefficients` is a
    table with the one set that every pass uses.
    """

    def __init__(self, numel: int, gradient_dtype: Dtype, out_dtype: Dtype, format: Format = Format.PLAIN) -> None:
        self.numel = numel
        self.gradient_dtype = gradient_dtype
        self.out_dtype = out_dtype
        self.format = format
        double = gradient_dtype is Dtype.FLOAT64
        state = Dtype.FLOAT64 if double else Dtype.FLOAT32
        moments = Dtype.BFLOAT16 if Format.MOMENTS_BFLOAT16 in format else state
        master = Dtype.BFLOAT16 if Format.MASTER_24BIT in format else state  # the upper 16 bits
        generator = np.random.default_rng(0)
        normal = generator.standard_normal(native.CHUNK)
        self.by_name = {
            "gradient": _filled(1e-3 * normal, numel, gradient_dtype),
            "accepted_gradient": _filled(1e-3 * normal[::-1], numel, gradient_dtype),
            "master": _filled(normal, numel, master),
            "exp_avg": _filled(1e-4 * normal, numel, moments),
            "exp_avg_sq": _filled(1e-6 * np.square(normal), numel, moments),
            "out": _filled(normal, numel, out_dtype),
        }
        if Format.MOMENTS_8BIT in format:
            for name, exponent in {"exp_avg": 115, "exp_avg_sq": 107}.items():  # of numbers near 1e-3 and 1e-6
                self.by_name[name] = _repeated(generator.integers(1, 256, native.CHUNK, np.uint8), numel)
                self.by_name[SECONDS[name]] = _repeated(np.full(1, exponent, np.uint8), numel // native.BLOCK)
        if Format.MASTER_24BIT in format:
            self.by_name["master_low"] = _repeated(generator.integers(0, 256, native.CHUNK, np.uint8), numel)
        self.sums = np.zeros(native.chunk_count(numel), np.float64)
        self.nonfinite = np.zeros(native.chunk_count(numel), np.int64)
        self.coefficients = np.array(
            [Coefficients.at_step(HYPERPARAMETERS, STEP, double=double).row()], native.COEFFICIENTS
        )

    def segments(self, *, with_norm: bool) -> npt.NDArray[np.void]:
        """Return the table of one segment over these arrays."""
        table = np.zeros(1, native.SEGMENT)
        for name, array in self.by_name.items():
            table[name] = array.ctypes.data
        table["length"] = self.numel
        table["gradient_dtype"] = self.gradient_dtype
        table["out_dtype"] = self.out_dtype
        table["format"] = self.format
        if with_norm:
            table["sums"] = self.sums.ctypes.data
            table["nonfinite"] = self.nonfinite.ctypes.data
        return table
