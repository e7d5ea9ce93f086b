"""Adam on the GPU: an update leaves the bits that the CPU kernels leave, and changes not one other byte."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.gpu_arrays import DEVICE, Launches, needs_triton
from support.gpu_checks import check_against_cpu, placed, resident_step
from support.kernel_arrays import FORMATS, Job, jobs, make_segment
from support.strategies import USUAL, Magnitudes

from superadam import gpu
from superadam.gpu import adam, language
from superadam.kernels.hyperparameters import Coefficients, Hyperparameters
from superadam.kernels.native import Dtype, Flag, Format, Pass
from superadam.kernels.resident_step import ResidentStep


@needs_triton
@settings(max_examples=settings.default.max_examples // 5)
@given(data=st.data())
def test_updates_have_the_bits_of_the_cpu(data):
    job = data.draw(jobs(Pass.SPECULATE), "job")  # whose segments all have an out
    check_against_cpu(job, data.draw(st.sampled_from([(0,), (0, 1, 3)]), "starts"))


@pytest.mark.slow
@needs_triton
@pytest.mark.parametrize(("double", "numbers"), [(False, range(64)), (True, range(0, 64, 3))], ids=["fp32", "fp64"])
def test_every_configuration_in_one_call(double, numbers):
    """All 64 sets of flags, each flag on the two sides of beta1 = 0.5, each set on segments of its own.

    In fp64 as many of them as hold every two flags, as kernels of both are made of the same lines.
    """
    dtype = Dtype.FLOAT64 if double else Dtype.FLOAT32
    sets, segments = [], []
    for row, number in enumerate(numbers):
        flags, beta1 = Flag(number), (0.9, 0.3)[row // 3 % 2]
        hyper = Hyperparameters(1e-2, beta1, 0.99, 1e-8, 0.1, False, False, False)
        sets.append(replace(Coefficients.at_step(hyper, 1 + number, 0.3, double=double), flags=flags))
        for kinds in ([Magnitudes.SPECIAL], [list(Magnitudes)[number % len(Magnitudes)], Magnitudes.ORDINARY]):
            stored = [form for form in FORMATS if not (flags & Flag.AMSGRAD and form & Format.MOMENTS_8BIT)]
            form = Format.PLAIN if double else stored[row // 4 % len(stored)]
            length = 64 if Format.MOMENTS_8BIT in form else 60
            segments.append(make_segment(number, length, dtype, dtype, kinds=kinds, form=form))
            segments[-1].coefficients = row
    check_against_cpu(Job(Pass.UPDATE, segments, sets))


def extremes() -> np.ndarray:
    """Return blocks of float32: around the bounds of exponents and among denormals, and one number alone in zeros."""
    rng = np.random.default_rng(0)
    edges = (rng.integers(0, 257, (256, 1)) << 23) + rng.integers(-2, 3, (256, 64)) & 0x7FFFFFFF
    edges = edges >> rng.integers(0, 4, (256, 1)) | rng.integers(0, 2, edges.shape) << 31
    alone = rng.integers(0, 2, (256, 64)) << 31
    alone[np.arange(256), rng.integers(0, 64, 256)] = rng.choice(edges.ravel(), 256)
    return np.concatenate([edges, alone]).astype(np.uint32).view(np.float32).ravel()


@needs_triton
@pytest.mark.parametrize("turn", [0, 0xFFFFFFFF, 0x9E3779B9, 0x80000000, 1])
@pytest.mark.parametrize("form", FORMATS[1:], ids=lambda form: form.name)
def test_compact_state_is_read_and_rounded_everywhere(form, turn, monkeypatch):
    """Moments of any bits, with every exponent, stay; others and masters become the gradient or its square."""
    k = replace(Coefficients.at_step(USUAL, 1), flags=Flag(0), nss=1.0, bc2s=1.0, eps=1.0, turn=turn)
    sets = [replace(k, w=w, b2=b2, c2=c2) for w, b2, c2 in ((0.0, 1.0, 0.0), (1.0, 0.0, 0.0), (1.0, 0.0, 1.0))]
    every = make_segment(0, 1 << 16, Dtype.FLOAT32, Dtype.FLOAT32, form=form)
    for name in every.arrays.keys() & {"exp_avg", "exp_avg_sq"}:
        stored = every.arrays[name].view
        stored[:] = np.arange(1 << 16).astype(stored.dtype)
        if f"{name}_exponents" in every.arrays:
            every.arrays[f"{name}_exponents"].view[:] = np.arange(1 << 10) // 4
    others = [make_segment(0, 1 << 15, Dtype.FLOAT32, Dtype.FLOAT32, form=form) for _ in range(2)]
    for number, segment in enumerate(others, 1):
        segment.coefficients = number
        for name, array in segment.arrays.items():
            array.view[:] = extremes() if name == "gradient" else 0
    if language.IS_INTERPRETED:
        monkeypatch.setattr(adam, "BLOCK", 1 << 15)  # the time of a program does not depend on its size
    check_against_cpu(Job(Pass.UPDATE, [every, *others], sets))


@needs_triton
def test_steps_alike_take_one_launch(monkeypatch):
    """Whatever their lengths, steps and learning rates; those with other flags take another."""
    launches = Launches(adam.adam_kernel)
    monkeypatch.setattr(adam, "adam_kernel", launches)
    lengths = [0, 1, 1023, 1024, 1025, 2048, 7]
    sets = [Coefficients.at_step(replace(USUAL, lr=0.1 / (1 + n)), 1 + n) for n in range(len(lengths))]
    other = [*sets[:2], Coefficients.at_step(replace(USUAL, maximize=True), 3), *sets[3:]]
    for chosen, grids in ((sets, [(1 + 1 + 1 + 2 + 2 + 1,)]), (other, [(1,), (1 + 1 + 2 + 2 + 1,)])):
        launches.grids.clear()
        segments = [make_segment(n, length, Dtype.BFLOAT16, Dtype.BFLOAT16) for n, length in enumerate(lengths)]
        for number, segment in enumerate(segments):
            segment.coefficients = number
        check_against_cpu(Job(Pass.UPDATE, segments, chosen))
        assert sorted(launches.grids) == grids


@needs_triton
@pytest.mark.parametrize("form", [Format.PLAIN, Format.MOMENTS_8BIT | Format.MASTER_24BIT], ids=["fp32", "compact"])
def test_wide_accesses_are_for_arrays_that_are_all_aligned(monkeypatch, form):
    """On a GPU another address would end the program; the interpreter takes any."""
    aligned = []
    monkeypatch.setattr(adam, "adam_kernel", {(1,): lambda *arguments, **more: aligned.append(more["IS_ALIGNED"])})
    sets = [Coefficients.at_step(replace(USUAL, amsgrad=not form), 1)]
    segment = make_segment(0, 64, Dtype.FLOAT32, Dtype.FLOAT32, form=form)
    count = len(placed(segment, (0,)))
    assert count == (9 - 1 if form else 6)
    for odd in range(-1, count):
        gpu.update([resident_step(placed(segment, [int(number == odd) for number in range(count)]), 0)], sets)
    assert aligned == [True] + [False] * count


@needs_triton
def test_no_elements_are_allowed():
    gpu.update([], [])
    gpu.update([ResidentStep(*[torch.empty(0, device=DEVICE)] * 6, 0)], [Coefficients.at_step(USUAL, 1)])
