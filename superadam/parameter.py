"""One parameter: the model's tensor, the fp32 state behind it, and the gradient that is pending on it.

Owns the master, the moments and the phase of its transaction. It runs no kernel and knows no other parameter.

A parameter that is fp32 or fp64, dense and on the CPU is its own master. Every other one is a *working copy*: its
master lies beside the moments, on the CPU. While speculation runs, an own master lends its tensor as working copy, and
a private copy is the master.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from superadam.hyperparameters import Hyperparameters
from superadam.native import Dtype

DTYPES = {
    torch.float32: Dtype.FLOAT32,
    torch.bfloat16: Dtype.BFLOAT16,
    torch.float16: Dtype.FLOAT16,
    torch.float64: Dtype.FLOAT64,
}
"""Element types of parameters and gradients that the kernels take."""


class Phase(enum.Enum):
    """Where a parameter's transaction stands."""

    CLEAN = "clean"
    """Nothing is pending; the working copy is the rounded master."""
    SPECULATED = "speculated"
    """The working copy shows a step that waits for its verdict; the state does not know of it."""
    ACCEPTED = "accepted"
    """The verdict was good; the pending gradient is still to be folded into the state."""


@dataclass(frozen=True, slots=True, eq=False)
class Pending:
    """A gradient that is speculated on or accepted, with everything its commit will need, captured by value.

    Attributes:
        gradient: in the layout of the state, as it arrived: neither scaled nor clipped; on the CPU unless `is_kept`.
        hyper: the group's hyper-parameters at that moment.
        step: the step that this gradient makes, counted from 1.
        scale: factor on the gradient in the working copy as it was last speculated; NaN before that.
        unscale: the part of `scale` that undoes loss scaling.
        version: of `gradient`; another one later means that somebody still writes to it.
        is_kept: whether the gradient stayed on the device, where the step will be made.
    """

    gradient: Tensor
    hyper: Hyperparameters
    step: int
    scale: float
    unscale: float
    version: int
    is_kept: bool = False

    @staticmethod
    def of(gradient: Tensor, hyper: Hyperparameters, step: int, unscale: float, *, is_kept: bool = False) -> Pending:
        """Return the record of a gradient that has just arrived, and that nobody else writes to."""
        return Pending(gradient, hyper, step, math.nan, unscale, gradient._version, is_kept)

    @property
    def is_written(self) -> bool:
        """Whether the working copy shows this gradient; if not, only its norm was taken so far."""
        return not math.isnan(self.scale)

    def at_scale(self, scale: float, hyper: Hyperparameters | None = None) -> Pending:
        """Return this record as it is once the working copy shows it so."""
        return replace(self, scale=scale, hyper=self.hyper if hyper is None else hyper)

    def check_unchanged(self, name: str) -> None:
        """Raise if the gradient is no longer what arrived.

        Raises:
            RuntimeError: somebody wrote to it.
        """
        if self.gradient._version != self.version:
            raise RuntimeError(
                f"the gradient of {name} was written to after speculate() had taken it, expected it to be left alone; "
                "speculate on a copy of it, or call commit() before writing"
            )


def owned(gradient: Tensor) -> Tensor:
    """Return a gradient that may be kept: itself, or a copy where it is part of a larger buffer.

    The owner of such a buffer will fill it again.
    """
    if gradient.requires_grad:  # made with create_graph: the graph must not live as long as the gradient
        gradient = gradient.detach()
    if gradient.untyped_storage().nbytes() != gradient.nbytes or gradient.is_inference():
        with torch.inference_mode(False):  # whose tensors count no versions
            gradient = gradient.clone(memory_format=torch.preserve_format)
    return gradient


def check_parameter(parameter: Tensor, name: str) -> None:
    """Raise if the optimizer cannot hold this parameter.

    Raises:
        TypeError: not a dense real tensor of a supported dtype, or one that counts no versions.
    """
    if parameter.is_complex():
        raise TypeError(
            f"{name} is complex ({parameter.dtype}), expected a real dtype; optimize torch.view_as_real of it instead"
        )
    if parameter.layout is not torch.strided:
        raise TypeError(f"{name} has layout {parameter.layout}, expected torch.strided; convert it with to_dense()")
    if parameter.dtype not in DTYPES:
        expected = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
        raise TypeError(
            f"{name} is {parameter.dtype}, expected one of {expected}; convert it with .to() before optimizing"
        )
    if parameter.is_inference():
        raise TypeError(
            f"{name} was made in inference mode, expected a tensor that autograd tracks; clone() it outside that mode"
        )


class ParameterState:
    """The state of one parameter. Tensors are absent (None) until the first gradient arrives.

    Attributes:
        parameter: the model's tensor.
        parameter_dtype, shape: of `parameter` when it was bound.
        row: its position among all parameters of the optimizer.
        name: how errors call it.
        dtype: fp32, or fp64 for fp64 parameters; of master and moments.
        strides: layout of master and moments, and of gradients before a kernel reads them: dense, in the order of the
            parameter.
        is_own_master: whether the tensor itself holds the master.
        is_staged: whether kernels cannot write the tensor directly: on another device, or not dense.
        master: the master of a working copy.
        is_provisional, is_max_provisional: whether the state, or max_exp_avg_sq, was made for a step not accepted yet.
        private: the master of an own master while its tensor serves as working copy.
        exp_avg, exp_avg_sq, max_exp_avg_sq: moments, as in torch.optim.Adam.
        phase, pending: the transaction.
    """

    __slots__ = (
        "dtype",
        "exp_avg",
        "exp_avg_sq",
        "is_contiguous_on_cpu",
        "is_max_provisional",
        "is_own_master",
        "is_provisional",
        "is_staged",
        "master",
        "max_exp_avg_sq",
        "name",
        "parameter",
        "parameter_dtype",
        "pending",
        "phase",
        "private",
        "row",
        "shape",
        "strides",
    )

    def __init__(self, parameter: Tensor, row: int, name: str, *, is_on_host: bool | None = None) -> None:
        check_parameter(parameter, name)
        on_host = parameter.is_cpu if is_on_host is None else is_on_host
        self.parameter = parameter
        self.row = row
        self.name = name
        self.dtype = torch.float64 if parameter.dtype == torch.float64 else torch.float32
        self.parameter_dtype = parameter.dtype
        self.shape = parameter.shape
        self.strides = torch.empty_like(parameter, device="meta").stride()
        self.is_contiguous_on_cpu = on_host and parameter.is_contiguous()
        self.is_staged = not on_host or parameter.stride() != self.strides
        self.is_own_master = parameter.dtype == self.dtype and not self.is_staged
        self.master: Tensor | None = None
        self.private: Tensor | None = None
        self.exp_avg: Tensor | None = None
        self.exp_avg_sq: Tensor | None = None
        self.max_exp_avg_sq: Tensor | None = None
        self.is_provisional = self.is_max_provisional = False
        self.phase = Phase.CLEAN
        self.pending: Pending | None = None

    def empty(self, dtype: torch.dtype) -> Tensor:
        """Return an uninitialised CPU tensor in the layout of the state."""
        return torch.empty_strided(self.parameter.shape, self.strides, dtype=dtype, device="cpu")

    def host_copy(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        """Return a copy of `tensor` on the CPU in the layout of the state."""
        return self.empty(dtype).copy_(tensor.detach())

    def zeros(self) -> Tensor:
        """Return zeros in the layout of the state."""
        return torch.zeros_like(self.parameter, dtype=self.dtype, device="cpu", requires_grad=False)

    def check_gradient(self, gradient: Tensor) -> None:
        """Raise if a gradient does not fit.

        Raises:
            TypeError: sparse, or of a dtype that does not fit the state.
            ValueError: of another shape, or neither on the parameter's device nor on the CPU.
        """
        if (
            gradient.dtype is self.parameter_dtype
            and gradient.shape == self.shape
            and gradient.layout is torch.strided
            and (gradient.is_cpu or gradient.device == self.parameter.device)
        ):
            return  # the usual one, soon
        if gradient.layout is not torch.strided:
            raise TypeError(
                f"the gradient of {self.name} is sparse, expected a dense one; "
                "use torch.optim.SparseAdam for this parameter"
            )
        if gradient.dtype not in DTYPES or (gradient.dtype == torch.float64) != (self.dtype == torch.float64):
            expected = "float64" if self.dtype == torch.float64 else "float32, bfloat16 or float16"
            raise TypeError(
                f"the gradient of {self.name} is {gradient.dtype}, expected {expected}; convert it before the step"
            )
        if gradient.shape != self.parameter.shape:
            raise ValueError(
                f"the gradient of {self.name} has shape {tuple(gradient.shape)}, expected that of the parameter, "
                f"{tuple(self.parameter.shape)}; recompute it"
            )
        if gradient.device != self.parameter.device and not gradient.is_cpu:
            raise ValueError(
                f"the gradient of {self.name} is on {gradient.device}, expected the parameter's device "
                f"{self.parameter.device}; move the model before the backward pass"
            )

    def host_gradient(self, gradient: Tensor) -> Tensor:
        """Return `gradient` as kernels read it: on the CPU and in the layout of the state; itself where it already is.

        Raises:
            TypeError, ValueError: as `check_gradient`.
        """
        self.check_gradient(gradient)
        if gradient.is_cpu and gradient.stride() == self.strides and not gradient.is_neg():
            return gradient.detach() if gradient.requires_grad else gradient
        return self.host_copy(gradient, gradient.dtype)

    @property
    def has_state(self) -> bool:
        """Whether master and moments exist."""
        return self.exp_avg is not None and (self.is_own_master or self.master is not None)

    def create_state(self) -> None:
        """Make zero moments, provisional until a step is accepted, and the master, from the present value."""
        if self.exp_avg is None:
            self.exp_avg, self.exp_avg_sq = self.zeros(), self.zeros()
            self.is_provisional = True
        if not self.is_own_master and self.master is None:  # also after loading moments that came without masters
            self.master = self.host_copy(self.parameter, self.dtype)

    def create_max(self) -> None:
        """Make the largest second moment of amsgrad; provisional until a step is accepted."""
        self.max_exp_avg_sq = self.zeros()
        self.is_max_provisional = True

    def forget_provisional(self) -> None:
        """Be again as before the tensors were made for a step that was never accepted."""
        if self.is_provisional:
            self.master = self.exp_avg = self.exp_avg_sq = None
        if self.is_max_provisional:
            self.max_exp_avg_sq = None
        self.is_provisional = self.is_max_provisional = False

    def refresh_private(self) -> None:
        """Give an own master its private copy, equal to the parameter."""
        if self.private is None:
            self.private = self.empty(self.dtype)
        self.private.copy_(self.parameter.detach())

    @property
    def shows_open_step(self) -> bool:
        """Whether the parameter holds values that wait for a verdict."""
        return self.phase is Phase.SPECULATED and self.pending is not None and self.pending.is_written

    @property
    def speculation_master(self) -> Tensor:
        """The master that speculation reads and commits write."""
        master = self.private if self.is_own_master else self.master
        assert master is not None
        return master
