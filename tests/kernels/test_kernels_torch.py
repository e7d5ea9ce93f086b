"""The kernels have the bits of torch: its fused Adam on x86-64, m and v of its default Adam, and its casts.

Lengths are multiples of 64, because torch's fused kernel rounds the scalar tail of an array otherwise than its vectors,
and torch runs on one thread, because each of its threads has such a tail.
"""

import math
import platform
from dataclasses import asdict, replace
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from support.kernel_arrays import Job, Placed, Segment, differing, make_segment, narrow, widen
from support.strategies import Magnitudes, hyperparameters, random_array

from superadam.kernels import native
from superadam.kernels.hyperparameters import Coefficients, Hyperparameters
from superadam.kernels.native import Dtype, Flag, Pass

STEPS = 3

pytestmark = pytest.mark.usefixtures("one_torch_thread")


class TorchAdam:
    """torch's Adam or AdamW with the same hyper-parameters on one parameter."""

    def __init__(self, hyper: Hyperparameters, p: np.ndarray, **options: Any) -> None:
        self.parameter = torch.nn.Parameter(torch.from_numpy(p.copy()))
        options |= asdict(hyper)
        options["betas"], _ = (options.pop("beta1"), options.pop("beta2")), options.pop("lr_sign")
        kind = torch.optim.AdamW if options.pop("decoupled_weight_decay") else torch.optim.Adam
        self._optimizer = kind([self.parameter], **options | {"lr": 1.0})
        self._optimizer.param_groups[0]["lr"] = hyper.lr  # which the constructor refuses below 0

    def step(self, gradient: np.ndarray) -> None:
        self.parameter.grad = torch.from_numpy(gradient.copy())
        self._optimizer.step()

    def arrays(self) -> dict[str, np.ndarray]:
        """Return master and moments under the kernels' names."""
        moments = {name.removesuffix("s"): one.numpy() for name, one in self._optimizer.state[self.parameter].items()}
        del moments["step"]
        return moments | {"master": self.parameter.detach().numpy()}


def make_states(length: int, kind: Magnitudes, seed: int, dtype: Dtype) -> tuple[Segment, list[np.ndarray]]:
    """Return a segment at step 0, and a gradient for each step."""
    segment = make_segment(seed, length, dtype)
    for name in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"):
        segment.arrays[name].view[:] = 0
    rng = np.random.default_rng(seed + 1)
    real = np.float64 if dtype is Dtype.FLOAT64 else np.float32
    return segment, [random_array(rng, length, kind, real) for _ in range(STEPS)]


def update(segment: Segment, gradient: np.ndarray, hyper: Hyperparameters, step: int, isa: str) -> None:
    segment.arrays["gradient"] = Placed(gradient)
    double = segment.gradient_dtype is Dtype.FLOAT64
    Job(Pass.UPDATE, [segment], [Coefficients.at_step(hyper, step, double=double)]).run(isa)


def has_scalars_of_torch_fused(hyper: Hyperparameters, dtype: Dtype) -> bool:
    """Return whether torch's fused kernel comes to the same scalars in the steps of these tests.

    Its compiler contracts `1 - lr * weight_decay` into one rounding, which its own default does not do; and it takes
    the C library's `pow`, which is not always correctly rounded. Both show in a last bit for rare values, most in fp64.
    """
    double = dtype is Dtype.FLOAT64
    real = np.float64 if double else np.float32
    decay = Fraction(1) - Fraction(hyper.lr) * Fraction(hyper.weight_decay)
    for step in range(1, STEPS + 1):
        k = Coefficients.at_step(hyper, step, double=double)
        theirs = (
            decay.numerator / decay.denominator,
            -(hyper.lr / (1.0 - hyper.beta1**step)),
            math.sqrt(1.0 - hyper.beta2**step),
        )
        if (k.decay, k.nss, k.bc2s) != tuple(float(real(each)) for each in theirs):
            return False
    return True


DRAWN = given(
    isa=st.sampled_from(native.available_isas()),
    hyper=hyperparameters(largest=1e6),  # torch's default raises where a scalar overflows fp32
    length=st.integers(0, 40).map(lambda blocks: 64 * blocks),
    kind=st.sampled_from([Magnitudes.ORDINARY, Magnitudes.TINY, Magnitudes.HUGE, Magnitudes.WIDE]),
    seed=st.integers(0, 2**32 - 2),
)

if platform.machine() == "x86_64":  # elsewhere torch's fused kernel rounds differently from itself here

    @pytest.mark.parametrize("dtype", [Dtype.FLOAT32, Dtype.FLOAT64], ids=lambda dtype: dtype.name)
    @DRAWN
    def test_bits_of_torch_fused(dtype, isa, hyper, length, kind, seed):
        assume(has_scalars_of_torch_fused(hyper, dtype))
        segment, gradients = make_states(length, kind, seed, dtype)
        reference = TorchAdam(hyper, segment.arrays["master"].view, fused=True)
        for step, gradient in enumerate(gradients, 1):
            update(segment, gradient, hyper, step, isa)
            reference.step(gradient)
            for name, theirs in reference.arrays().items():
                assert differing(segment.arrays[name].view, theirs) == 0, f"{name} at step {step}"


@pytest.mark.parametrize("dtype", [Dtype.FLOAT32, Dtype.FLOAT64], ids=lambda dtype: dtype.name)
@DRAWN
def test_moments_of_torch_default(dtype, isa, hyper, length, kind, seed):
    """Its square root is not correctly rounded, so p may differ in a last bit, which L2 would carry into m and v."""
    segment, gradients = make_states(length, kind, seed, dtype)
    reference = TorchAdam(hyper, segment.arrays["master"].view, foreach=False)
    for step, gradient in enumerate(gradients, 1):
        with torch.no_grad():
            reference.parameter.copy_(torch.from_numpy(segment.arrays["master"].view.copy()))
        update(segment, gradient, hyper, step, isa)
        reference.step(gradient)
        for name in ("exp_avg", "exp_avg_sq"):
            assert differing(segment.arrays[name].view, reference.arrays()[name]) == 0, f"{name} at step {step}"


# -- casts -------------------------------------------------------------------------------------------------------------

HALVES = {Dtype.BFLOAT16: torch.bfloat16, Dtype.FLOAT16: torch.float16}
EACH_HALF = pytest.mark.parametrize("dtype", HALVES, ids=lambda dtype: dtype.name)


def run_from_zero_moments(which: Pass, segment: Segment, isa: str, **scalars: float) -> None:
    """Run a pass with these scalars; the others leave the gradient as it is and the parameter, -0 too, where it is."""
    for name in ("exp_avg", "exp_avg_sq"):
        segment.arrays[name].view[:] = 0
    k = Coefficients(s=1, decay=1, wd=0, w=0.25, b2=1, c2=0, nss=-0.0, bc2s=1, eps=1, flags=Flag(0))
    Job(which, [segment], [replace(k, **scalars)]).run(isa)


@EACH_HALF
def test_widening_of_all_patterns(isa, dtype):
    patterns = np.arange(1 << 16, dtype=np.uint16)
    theirs = torch.from_numpy(patterns.copy()).view(HALVES[dtype]).float().numpy()
    assert differing(widen(patterns, dtype), theirs) == 0  # the oracle's
    segment = make_segment(0, len(patterns), dtype)
    segment.arrays["gradient"].view[:] = patterns
    run_from_zero_moments(Pass.COMMIT, segment, isa, w=1.0)  # m = fma(0, g, g), which is g, but NaN where g is Inf
    assert differing(segment.arrays["exp_avg"].view, np.where(np.isinf(theirs), np.float32(np.nan), theirs)) == 0
    run_from_zero_moments(Pass.COMMIT, segment, isa, w=0.25)  # m = fma(0.25, g, 0), exact, but +0 where g is -0
    with np.errstate(invalid="ignore"):
        assert differing(segment.arrays["exp_avg"].view, np.float32(0.25) * theirs + np.float32(0)) == 0


@EACH_HALF
def test_narrowing_at_every_boundary(isa, dtype):
    """Each value of the half type, each tie between neighbours, what lies next to both, and NaNs full of ones."""
    values = widen(np.arange(1 << 16, dtype=np.uint16), dtype)
    finite = np.unique(values[np.isfinite(values)])
    ties = ((finite[1:].astype(np.float64) + finite[:-1]) / 2).astype(np.float32)  # exact: one bit more than a half
    # Halfway between the largest finite value and the next power of two, from where on a value becomes Inf.
    overflow = np.array([0x7F7F8000], np.uint32).view(np.float32) if dtype is Dtype.BFLOAT16 else np.float32([65520])
    full = np.array([0x7FFFFFFF, 0xFFFFFFFF], np.uint32).view(np.float32)
    points = np.concatenate([values, ties, overflow, -overflow, full])
    with np.errstate(all="ignore"):
        around = [points, np.nextafter(points, np.float32(np.inf)), np.nextafter(points, np.float32(-np.inf))]
    values = np.concatenate(around)
    segment = make_segment(0, len(values), Dtype.FLOAT32, dtype)
    segment.arrays["master"].view[:] = values
    segment.arrays["gradient"].view[:] = 0
    run_from_zero_moments(Pass.SPECULATE, segment, isa)  # p + -0, which is p
    theirs = torch.from_numpy(values).to(HALVES[dtype]).view(torch.uint16).numpy()
    for ours in (segment.arrays["out"].view, narrow(values, dtype)):  # the latter is the oracle's
        assert differing(widen(ours.copy(), dtype), widen(theirs, dtype)) == 0
