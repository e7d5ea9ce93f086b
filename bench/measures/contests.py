"""Ours against torch: the same step by superadam, and by what a script with torch's AdamW does today.

Both do complete steps over the same number of elements of the same magnitude: norm, check or clip, update, and the
low-precision weights where there are any.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

import superadam
from superadam.cli.bench.arrays import ADAMW_OPTIONS, PassArrays
from superadam.cli.bench.pairs import Action, Comparison, compare
from superadam.kernels import native
from superadam.kernels.native import Dtype, Pass
from superadam.kernels.torch_private import foreach_copy_
from superadam.state.norm import GradientNorm
from superadam.step.outcome import judge

MAX_GRAD_NORM = 1e6
"""Far above the norm of every contest: the usual step is not clipped, but the norm must be known before it is made."""

SMALL_TENSORS, SMALL_NUMEL = 10_000, 1_000
"""Of the contests over many tensors: their number, and the elements of each."""


SIZES = ((1, 64), (12, 4096), (150, 65_536), (1, 1 << 20))
"""Of the contests over small models: number of tensors, and the elements of each."""


@dataclass(frozen=True, slots=True)
class Contest:
    """One comparison with torch.

    Attributes:
        name: short, for tables: what gradients and weights are.
        ours, theirs: what each side does, in words.
        tensors, numel: number of parameters, and the elements of each.
        prepare: creates the tensors and returns our action and torch's.
    """

    name: str
    ours: str
    theirs: str
    tensors: int
    numel: int
    prepare: Callable[[int, int], tuple[Action, Action]]


@dataclass(frozen=True, slots=True)
class ContestResult:
    """One row: the result of a contest, on the same number of threads for both sides."""

    contest: Contest
    threads: int
    comparison: Comparison


def _tensors(count: int, numel: int, scale: float, seed: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [(scale * torch.randn(numel, generator=generator, device="cpu")).to(dtype) for _ in range(count)]


def _torch_adamw(parameters: Sequence[Tensor]) -> torch.optim.AdamW:
    return torch.optim.AdamW(parameters, **ADAMW_OPTIONS, fused=True)


def _our_adamw(parameters: Sequence[Tensor]) -> superadam.SpeculativeCPUAdamW:
    return superadam.SpeculativeCPUAdamW(parameters, **ADAMW_OPTIONS, max_grad_norm=MAX_GRAD_NORM)


def _with_gradients(parameters: Sequence[Tensor], gradients: Sequence[Tensor]) -> Sequence[Tensor]:
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.requires_grad_(True)
        parameter.grad = gradient
    return parameters


def _torch_step(masters: Sequence[Tensor]) -> Action:
    """Return clip_grad_norm_ and the fused step over parameters that hold gradients."""
    optimizer = _torch_adamw(masters)

    def run() -> None:
        torch.nn.utils.clip_grad_norm_(masters, MAX_GRAD_NORM)
        optimizer.step()

    return run


def prepare_passes(tensors: int, numel: int) -> tuple[Action, Action]:
    """Kernels alone on one fp32 gradient with a bf16 copy, against clip_grad_norm_, the fused step and the copy."""
    if tensors != 1:
        raise ValueError(f"the kernels' contest is over one tensor, not {tensors}; see prepare_float32 for many")
    arrays = PassArrays(numel, Dtype.FLOAT32, Dtype.BFLOAT16)
    norm, update = arrays.segments(with_norm=True), arrays.segments(with_norm=False)

    def run() -> None:
        native.run(Pass.NORM, norm)
        outcome = judge(GradientNorm(arrays.sums, arrays.nonfinite), MAX_GRAD_NORM)
        if outcome.clip_coefficient != 1.0 or outcome.nonfinite:
            raise RuntimeError(f"the gradients of a benchmark were not accepted ({outcome}); report this as a bug")
        native.run(Pass.UPDATE, update, arrays.coefficients)

    masters = _with_gradients(_tensors(1, numel, 1.0, 0), _tensors(1, numel, 1e-3, 1))
    weights = [master.detach().to(torch.bfloat16) for master in masters]
    step = _torch_step(masters)

    def run_torch() -> None:
        step()
        weights[0].copy_(masters[0].detach())

    return run, run_torch


def prepare_bfloat16(tensors: int, numel: int) -> tuple[Action, Action]:
    """Our optimizer on bf16 weights and gradients, against fp32 masters: widen, clip_grad_norm_, fused step, copy."""
    ours = _with_gradients(
        _tensors(tensors, numel, 1.0, 0, torch.bfloat16), _tensors(tensors, numel, 1e-3, 1, torch.bfloat16)
    )
    arrived = _tensors(tensors, numel, 1e-3, 1, torch.bfloat16)
    gradients = [gradient.float() for gradient in arrived]
    masters = _with_gradients(_tensors(tensors, numel, 1.0, 0), gradients)
    weights = [master.detach().to(torch.bfloat16) for master in masters]
    values = [master.detach() for master in masters]
    step = _torch_step(masters)

    def run_torch() -> None:
        foreach_copy_(gradients, arrived)
        step()
        foreach_copy_(weights, values)

    return _our_adamw(ours).step, run_torch


def prepare_float32(tensors: int, numel: int) -> tuple[Action, Action]:
    """Our optimizer on fp32 parameters on the CPU, against clip_grad_norm_ and the fused step on the same."""
    ours, theirs = (
        _with_gradients(_tensors(tensors, numel, 1.0, 0), _tensors(tensors, numel, 1e-3, 1)) for _ in range(2)
    )
    return _our_adamw(ours).step, _torch_step(theirs)


def prepare_without_norm(tensors: int, numel: int) -> tuple[Action, Action]:
    """As `prepare_float32`, against the fused step alone, which neither clips nor finds Inf and NaN."""
    parameters = _with_gradients(_tensors(tensors, numel, 1.0, 0), _tensors(tensors, numel, 1e-3, 1))
    return prepare_float32(tensors, numel)[0], _torch_adamw(parameters).step


def contests(numel: int) -> list[Contest]:
    """Return the comparisons: one large tensor of `numel` elements, many small ones, and small models."""
    clip_and_step = "clip_grad_norm_ + AdamW(fused=True)"
    widen_and_copy = f"widened gradients + {clip_and_step} + bf16 copy"
    many = f"{SMALL_TENSORS} x {SMALL_NUMEL}"
    return [
        Contest(
            "f32, bf16 copy", "passes norm, verdict, update", f"{clip_and_step} + bf16 copy", 1, numel, prepare_passes
        ),
        Contest("bf16", "SpeculativeCPUAdamW.step", widen_and_copy, 1, numel, prepare_bfloat16),
        Contest("f32", "SpeculativeCPUAdamW.step", clip_and_step, 1, numel, prepare_float32),
        Contest(
            f"{many} bf16", "SpeculativeCPUAdamW.step", widen_and_copy, SMALL_TENSORS, SMALL_NUMEL, prepare_bfloat16
        ),
        Contest(f"{many} f32", "SpeculativeCPUAdamW.step", clip_and_step, SMALL_TENSORS, SMALL_NUMEL, prepare_float32),
        *(
            Contest(f"{count} x {length} f32{apart}", "SpeculativeCPUAdamW.step", theirs, count, length, prepare)
            for count, length in SIZES
            for apart, theirs, prepare in (
                ("", clip_and_step, prepare_float32),
                (", no norm", "AdamW(fused=True) alone", prepare_without_norm),
            )
        ),
    ]


def measure(chosen: Sequence[Contest], threads: int, pairs: int) -> Iterator[ContestResult]:
    """Yield one row for each contest as it is measured, over `pairs` of steps; restores thread counts."""
    before = torch.get_num_threads(), native.get_num_threads()
    torch.set_num_threads(threads)
    native.set_num_threads(threads)
    try:
        for contest in chosen:
            ours, theirs = contest.prepare(contest.tensors, contest.numel)
            yield ContestResult(contest, threads, compare(ours, theirs, pairs))
            del ours, theirs  # before the next contest makes its tensors
    finally:
        torch.set_num_threads(before[0])
        native.set_num_threads(before[1])
