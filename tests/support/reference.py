"""The synchronous run that every speculative run must equal: one step at a time, through the oracle, in plain numpy.

It shares nothing with the optimizer but the coefficients of the formula.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from support import compact, formula
from support.kernel_arrays import narrow, widen
from torch import Tensor

from superadam import StepKind
from superadam.kernels.dtypes import DTYPES
from superadam.kernels.hyperparameters import Coefficients, Hyperparameters
from superadam.kernels.native import Format

Array = npt.NDArray[Any]


def differing(first: Array, second: Array) -> Array:
    """Return which floats differ in any bit; NaN equals NaN whatever its payload, +0 and -0 differ."""
    integers = f"i{first.dtype.itemsize}"
    return (first.view(integers) != second.view(integers)) & ~(np.isnan(first) & np.isnan(second))


def same_bits(first: Array, second: Array) -> bool:
    """Whether two float arrays are of one shape and dtype, and do not differ in any bit."""
    return first.shape == second.shape and first.dtype == second.dtype and not differing(first, second).any()


def flat(tensor: Tensor, like: Tensor) -> Array:
    """Return a tensor as 1-D fp32 (fp64) array, in the order in which `like` would lie densely in memory."""
    wide = torch.float64 if tensor.dtype == torch.float64 else torch.float32
    dense = torch.empty_like(like, dtype=wide).copy_(tensor.detach())
    return dense.as_strided((dense.numel(),), (1,)).numpy().copy()


def rounded(values: Array, dtype: torch.dtype) -> Array:
    return widen(narrow(values, DTYPES[dtype]), DTYPES[dtype])


@dataclass
class Parameter:
    """One parameter's state, flat.

    Attributes:
        written: what the model computes with, where that was not adopted yet.
        former: the master before the first write that was adopted since its last step; None without any.
    """

    p: Array
    dtype: torch.dtype
    m: Array = field(init=False)
    v: Array = field(init=False)
    vmax: Array = field(init=False)
    written: Array | None = None
    former: Array | None = None
    step: int = 0
    form: Format = Format.PLAIN

    def __post_init__(self) -> None:
        self.m, self.v, self.vmax = (np.zeros_like(self.p) for _ in range(3))

    @property
    def shown(self) -> Array:
        return rounded(self.p, self.dtype) if self.written is None else self.written

    def write(self, where: Array, values: Array) -> None:
        """Write to the model's parameter from outside; what is undone before it is adopted was never written."""
        self.written = np.where(where, rounded(values.astype(self.p.dtype), self.dtype), self.shown)

    def adopt(self) -> None:
        """Take over the elements of the model's parameter that are not the rounded master, as it was before writes."""
        if self.written is not None:
            self.former = self.p if self.former is None else self.former
            changed = differing(rounded(self.former, self.dtype), self.written)
            self.p, self.written = np.where(changed, self.written, self.former), None


def form_of(tensor: Tensor, moments: str, master: str) -> Format:
    """Return how the state of a parameter is stored, for which not every argument of the optimizer holds."""
    if tensor.dtype == torch.float64:
        return Format.PLAIN
    has_blocks = tensor.ndim > 1 and tensor.shape[-1] % 64 == 0 and torch.empty_like(tensor).is_contiguous()
    form = Format.MASTER_24BIT if master == "24bit" and tensor.dtype != torch.float32 else Format.PLAIN
    if moments == "8bit" and has_blocks:
        return form | Format.MOMENTS_8BIT
    return form if moments == "fp32" else form | Format.MOMENTS_BFLOAT16


class Synchronous:
    """Adam over a few parameters, one synchronous step at a time."""

    def __init__(self, tensors: Sequence[Tensor], moments: str = "fp32", master: str = "fp32") -> None:
        self.parameters = [
            Parameter(flat(tensor, tensor), tensor.dtype, form=form_of(tensor, moments, master)) for tensor in tensors
        ]

    def norm_of(self, gradients: Mapping[int, Array]) -> tuple[float, bool]:
        sums = [formula.chunk_sums(gradients[i]) for i in sorted(gradients)]
        norm = math.sqrt(formula.ordered_sum(np.concatenate([np.zeros(0), *sums])))
        return norm, all(np.isfinite(gradient).all() for gradient in gradients.values())

    def step(
        self, gradients: Mapping[int, Array], hyper: Sequence[Hyperparameters], max_norm: float | None
    ) -> tuple[StepKind, float]:
        """Make one step with flat gradients by position; return its kind and norm."""
        for i in gradients:
            self.parameters[i].adopt()
            self.parameters[i].former = None
        norm, is_finite = self.norm_of(gradients)
        if not is_finite:
            return StepKind.SKIPPED, norm
        unlimited = max_norm is None or math.isinf(max_norm)
        clip = 1.0 if unlimited else float(np.float32(min(1.0, max_norm / (norm + 1e-6))))
        for i, gradient in gradients.items():
            one = self.parameters[i]
            one.step += 1
            k = Coefficients.at_step(hyper[i], one.step, clip, double=one.p.dtype == np.float64)
            stepped = formula.adam_formula(k, gradient, one.m, one.v, one.vmax, one.p)
            state = dict(zip(("master", *compact.MOMENTS), stepped, strict=True))
            if Format.MOMENTS_8BIT in one.form:
                del state["max_exp_avg_sq"]
            values = compact.decode(compact.encode(state, k.turn, one.form), one.form)
            one.p, one.m, one.v, one.vmax = *(values[name] for name in state), *[one.vmax][: 4 - len(state)]
        return (StepKind.COMMITTED if clip == 1.0 else StepKind.CLIPPED), norm
