"""Adam on the GPU: an update leaves the bits that the CPU kernels leave, and changes not one other byte."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.gpu_arrays import DEVICE, Launches, Placed, needs_triton
from support.kernel_arrays import STATE, Job, Segment, differing_stored, jobs, make_segment
from support.strategies import Magnitudes

from superadam import gpu
from superadam.gpu import adam
from superadam.kernels import native
from superadam.kernels.hyperparameters import Coefficients, Hyperparameters
from superadam.kernels.native import Dtype, Flag, Pass
from superadam.kernels.resident_step import ResidentStep

HYPER = Hyperparameters(1e-3, 0.9, 0.999, 1e-8, 0.1, amsgrad=False, maximize=False, decoupled_weight_decay=True)


def placed(segment: Segment, starts: Sequence[int]) -> dict[str, Placed]:
    """Return the arrays of a segment that an update uses as tensors on the device."""
    real = Dtype.FLOAT64 if segment.gradient_dtype is Dtype.FLOAT64 else Dtype.FLOAT32
    dtypes = {"gradient": segment.gradient_dtype, "out": segment.out_dtype} | dict.fromkeys(STATE, real)
    used = {name: array for name, array in segment.arrays.items() if name in dtypes}
    return {
        name: Placed(array.view.copy(), dtypes[name], starts[number % len(starts)])
        for number, (name, array) in enumerate(used.items())
    }


def resident_step(arrays: dict[str, Placed], coefficients: int) -> ResidentStep:
    master, exp_avg, exp_avg_sq = (arrays[name].tensor for name in STATE[:3])
    largest = arrays["max_exp_avg_sq"].tensor if "max_exp_avg_sq" in arrays else None
    gradient, out = arrays["gradient"].tensor, arrays["out"].tensor
    return ResidentStep(master, exp_avg, exp_avg_sq, largest, gradient, out, coefficients)


def check_against_cpu(job: Job, starts: Sequence[int] = (0,)) -> None:
    """Make the updates of a job on the device and on the CPU, and compare every byte."""
    arrays = [placed(segment, starts) for segment in job.segments]
    with np.errstate(all="ignore"):
        steps = [resident_step(each, segment.coefficients) for segment, each in zip(job.segments, arrays, strict=True)]
        gpu.update(steps, job.sets)
    replace(job, which=Pass.UPDATE).run(native.active_isa())
    for segment, each in zip(job.segments, arrays, strict=True):
        for name, one in each.items():
            expected = segment.arrays[name]
            assert one.outside_is_unchanged(), f"bytes around {name} were changed"
            if expected.is_unchanged():
                assert one.is_unchanged(), f"{name} was changed"
            dtype = {"out": segment.out_dtype, "gradient": segment.gradient_dtype}.get(name, Dtype.FLOAT32)
            assert differing_stored(one.read(), expected.view.copy(), dtype) == 0, name


@needs_triton
@settings(max_examples=settings.default.max_examples // 2)
@given(data=st.data())
def test_updates_have_the_bits_of_the_cpu(data: st.DataObject) -> None:
    job = data.draw(jobs(Pass.SPECULATE), "job")  # whose segments all have an out
    check_against_cpu(job, data.draw(st.sampled_from([(0,), (0, 1, 3)]), "starts"))


@pytest.mark.slow
@needs_triton
@pytest.mark.parametrize("double", [False, True], ids=["fp32", "fp64"])
def test_every_configuration_in_one_call(double: bool) -> None:
    """All 64 sets of flags, those of even and odd size on the two sides of beta1 = 0.5, each on segments of its own."""
    dtype = Dtype.FLOAT64 if double else Dtype.FLOAT32
    sets, segments = [], []
    for number in range(64):
        flags, beta1 = Flag(number), (0.9, 0.3)[number.bit_count() % 2]
        hyper = Hyperparameters(1e-2, beta1, 0.99, 1e-8, 0.1, False, False, False)
        sets.append(replace(Coefficients.at_step(hyper, 1 + number, 0.3, double=double), flags=flags))
        for kinds in ([Magnitudes.SPECIAL], [list(Magnitudes)[number % len(Magnitudes)], Magnitudes.ORDINARY]):
            segments.append(make_segment(number, 60, dtype, dtype, kinds=kinds))
            segments[-1].coefficients = number
    check_against_cpu(Job(Pass.UPDATE, segments, sets))


@needs_triton
def test_steps_alike_take_one_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever their lengths, steps and learning rates; those with other flags take another."""
    launches = Launches(adam.adam_kernel)
    monkeypatch.setattr(adam, "adam_kernel", launches)
    lengths = [0, 1, 1023, 1024, 1025, 2048, 7]
    segments = [make_segment(n, length, Dtype.BFLOAT16, Dtype.BFLOAT16) for n, length in enumerate(lengths)]
    sets = [Coefficients.at_step(replace(HYPER, lr=0.1 / (1 + n)), 1 + n) for n in range(len(lengths))]
    for number, segment in enumerate(segments):
        segment.coefficients = number
    check_against_cpu(Job(Pass.UPDATE, segments, sets))
    assert launches.grids == [(1 + 1 + 1 + 2 + 2 + 1,)]

    launches.grids.clear()
    sets[2] = Coefficients.at_step(replace(HYPER, maximize=True), 3)
    segments = [make_segment(n, length, Dtype.BFLOAT16, Dtype.BFLOAT16) for n, length in enumerate(lengths)]
    for number, segment in enumerate(segments):
        segment.coefficients = number
    check_against_cpu(Job(Pass.UPDATE, segments, sets))
    assert sorted(launches.grids) == [(1,), (1 + 1 + 2 + 2 + 1,)]


@needs_triton
def test_wide_accesses_are_for_arrays_that_are_all_aligned(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU another address would end the program; the interpreter takes any."""
    aligned: list[bool] = []
    monkeypatch.setattr(adam, "adam_kernel", {(1,): lambda *arguments, **more: aligned.append(more["IS_ALIGNED"])})
    sets = [Coefficients.at_step(replace(HYPER, amsgrad=True), 1)]
    for odd in range(-1, 6):
        arrays = [Placed(np.ones(8, np.float32), torch.float32, int(number == odd)).tensor for number in range(6)]
        gpu.update([ResidentStep(*arrays, 0)], sets)
    assert aligned == [True] + [False] * 6


@needs_triton
def test_no_elements_are_allowed() -> None:
    gpu.update([], [])
    gpu.update([ResidentStep(*[torch.empty(0, device=DEVICE)] * 6, 0)], [Coefficients.at_step(HYPER, 1)])


def test_without_triton_the_update_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SUPERADAM_GPU", "torch")
    with pytest.raises(RuntimeError, match=r"superadam\.gpu\.update needs Triton.*SUPERADAM_GPU=torch asks for it"):
        gpu.update([ResidentStep(*[torch.ones(10)] * 6, 0)], [Coefficients.at_step(HYPER, 1)])
