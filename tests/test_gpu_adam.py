"""Adam on the GPU: every pass leaves the bits that the CPU kernels leave, and changes not one other byte."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from gpu_arrays import DEVICE, Launches, Placed, Request, can_compile, compiled, count, needs_triton
from hypothesis import given
from hypothesis import strategies as st
from kernel_arrays import Job, differing_stored, jobs, make_segment, widen
from kernel_arrays import Placed as CpuPlaced
from kernel_arrays import Segment as CpuSegment
from strategies import Magnitudes

from superadam import gpu, native
from superadam.gpu import Segment, adam
from superadam.gpu import segments as segments_of_gpu
from superadam.hyperparameters import Coefficients, Hyperparameters
from superadam.native import Dtype, Flag, Pass

PASSES = (Pass.SPECULATE, Pass.COMMIT, Pass.COMMIT_AND_SPECULATE, Pass.UPDATE, Pass.ROUND)
EACH_PASS = pytest.mark.parametrize("which", PASSES, ids=lambda which: which.name)
HYPER = Hyperparameters(1e-3, 0.9, 0.999, 1e-8, 0.1, amsgrad=False, maximize=False, decoupled_weight_decay=True)

NO_FLAGS = Flag(0)


def placed(segment: CpuSegment, starts: Sequence[int]) -> dict[str, Placed]:
    """Return a segment's arrays as tensors on the device."""
    real = Dtype.FLOAT64 if segment.gradient_dtype is Dtype.FLOAT64 else Dtype.FLOAT32
    dtypes = {"gradient": segment.gradient_dtype, "accepted_gradient": segment.gradient_dtype, "out": segment.out_dtype}
    return {
        name: Placed(array.view.copy(), dtypes.get(name, real), starts[number % len(starts)])
        for number, (name, array) in enumerate(segment.arrays.items())
    }


def check_against_cpu(job: Job, starts: Sequence[int] = (0,)) -> None:
    """Run a job on the device and on the CPU, and compare every byte."""
    for segment in job.segments:
        for name in ("sums", "nonfinite"):  # the update takes no norm on the GPU: packing has taken it
            segment.arrays.pop(name, None)
    arrays = [placed(segment, starts) for segment in job.segments]
    segments = [
        Segment(
            **{name: one.tensor for name, one in each.items()},
            coefficients=segment.coefficients,
            accepted_coefficients=segment.accepted_coefficients,
        )
        for segment, each in zip(job.segments, arrays, strict=True)
    ]
    with np.errstate(all="ignore"):
        gpu.run(job.which, segments, job.sets)
    job.run(native.active_isa())
    for segment, each in zip(job.segments, arrays, strict=True):
        for name, one in each.items():
            expected = segment.arrays[name]
            assert one.outside_is_unchanged(), f"bytes around {name} were changed"
            if expected.is_unchanged():
                assert one.is_unchanged(), f"{name} was changed"
            dtype = segment.out_dtype if name == "out" else segment.gradient_dtype
            if "gradient" not in name and name != "out":
                dtype = Dtype.FLOAT32
            assert differing_stored(one.read(), expected.view.copy(), dtype) == 0, name


@needs_triton
@EACH_PASS
@given(data=st.data())
def test_every_pass_has_the_bits_of_the_cpu(which: Pass, data: st.DataObject) -> None:
    check_against_cpu(data.draw(jobs(which)), data.draw(st.sampled_from([(0,), (0, 1, 3)]), "starts"))


@needs_triton
@pytest.mark.parametrize("double", [False, True], ids=["fp32", "fp64"])
def test_every_configuration_in_one_call(double: bool) -> None:
    """All 32 sets of flags, on both sides of beta1 = 0.5, each on segments of its own."""
    dtype = Dtype.FLOAT64 if double else Dtype.FLOAT32
    sets, segments = [], []
    for number in range(64):
        flags, beta1 = Flag(number % 32), (0.9, 0.3)[number // 32]
        hyper = Hyperparameters(1e-2, beta1, 0.99, 1e-8, 0.1, False, False, False)
        sets.append(replace(Coefficients.at_step(hyper, 1 + number, 0.3, double=double), flags=flags))
        for kinds in ([Magnitudes.SPECIAL], [list(Magnitudes)[number % len(Magnitudes)], Magnitudes.ORDINARY]):
            segments.append(make_segment(number, 60, dtype, dtype, kinds=kinds))
            segments[-1].coefficients = number
    check_against_cpu(Job(Pass.UPDATE, segments, sets))


@needs_triton
@pytest.mark.parametrize("out", [Dtype.BFLOAT16, Dtype.FLOAT16], ids=lambda dtype: dtype.name.lower())
def test_rounding_beside_every_tie(out: Dtype) -> None:
    """All halves, what lies halfway to the next one and just beside that, and NaNs with payload in the bits cut off."""
    every = widen(np.arange(1 << 16, dtype=np.uint16), out).view(np.uint32)
    half = np.uint32(0x8000 if out is Dtype.BFLOAT16 else 0x1000)
    bits = np.concatenate([every, every | half, every | half - np.uint32(1), every | half + np.uint32(1)])
    denormal_ties = ((np.arange(1024) + 0.5) * 2.0**-24).astype(np.float32)
    values = np.concatenate([bits.view(np.float32), denormal_ties, -denormal_ties])
    segment = make_segment(0, len(values), Dtype.FLOAT32, out)
    segment.arrays["master"] = CpuPlaced(values)
    check_against_cpu(Job(Pass.ROUND, [segment]))


@needs_triton
def test_segments_alike_take_one_launch(monkeypatch: pytest.MonkeyPatch) -> None:
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
def test_deferred_commit_is_the_update() -> None:
    """Two updates = speculate, commit and speculate, commit: state and working copies alike."""
    first, second = (Coefficients.at_step(HYPER, step, 0.7) for step in (1, 2))
    segment = make_segment(3, 3000, Dtype.BFLOAT16, Dtype.BFLOAT16)
    eager, deferred = (placed(segment, (0,)) for _ in range(2))
    state = ("master", "exp_avg", "exp_avg_sq")

    def run(which: Pass, arrays: dict[str, Placed], gradient: str, accepted: str | None = None) -> bytes:
        extra = {} if accepted is None else {"accepted_gradient": arrays[accepted].tensor, "accepted_coefficients": 0}
        one = Segment(
            **{name: arrays[name].tensor for name in (*state, "out")},
            gradient=arrays[gradient].tensor,
            coefficients=0 if gradient == "gradient" else 1,
            **extra,
        )
        gpu.run(which, [one], [first, second])
        return arrays["out"].read().tobytes()

    outs = [run(Pass.UPDATE, eager, "gradient"), run(Pass.UPDATE, eager, "accepted_gradient")]
    assert run(Pass.SPECULATE, deferred, "gradient") == outs[0]
    assert all(deferred[name].is_unchanged() for name in state)
    assert run(Pass.COMMIT_AND_SPECULATE, deferred, "accepted_gradient", "gradient") == outs[1]
    run(Pass.COMMIT, deferred, "accepted_gradient")
    for name in (*state, "out"):
        assert eager[name].read().tobytes() == deferred[name].read().tobytes()


# -- what is refused ---------------------------------------------------------------------------------------------------


def tensors(**changed: object) -> Segment:
    names = ("master", "gradient", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "out", "accepted_gradient")
    return replace(Segment(**{name: torch.ones(10, device=DEVICE) for name in names}), **changed)


@needs_triton
@EACH_PASS
def test_a_missing_tensor_is_refused_and_nothing_is_written(which: Pass) -> None:
    sets = [Coefficients.at_step(replace(HYPER, amsgrad=True), 1)]
    for name in ("gradient", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "out", "accepted_gradient"):
        good, bad = tensors(), tensors(**{name: None})
        is_used = name in (*segments_of_gpu.READS[which], "out" if which in segments_of_gpu.NEEDS_OUT else "")
        if is_used or (name == "max_exp_avg_sq" and which is not Pass.ROUND):
            with pytest.raises(ValueError, match=f"segment 1 lacks {name}, which {which.name} uses"):
                gpu.run(which, [good, bad], sets)
            assert all(bool((getattr(good, each) == 1).all()) for each in ("master", "exp_avg", "out"))
        else:
            gpu.run(which, [good, bad], sets)


@needs_triton
def test_what_does_not_fit_is_refused() -> None:
    sets = [Coefficients.at_step(HYPER, 1)]
    ten, half = torch.ones(10, device=DEVICE), torch.ones(10, dtype=torch.float16, device=DEVICE)

    def refused(error: type[Exception], message: str, which: Pass = Pass.UPDATE, **changed: object) -> None:
        with pytest.raises(error, match=message):
            gpu.run(which, [tensors(**changed)], sets)

    refused(ValueError, "no pass .*NORM", Pass.NORM)
    refused(ValueError, "no pass .*WIDEN", Pass.WIDEN)
    refused(ValueError, "segment 0's gradient has 9 elements, expected 10", gradient=ten[:9])
    refused(ValueError, "segment 0's exp_avg has shape.*without gaps", exp_avg=torch.ones(20, device=DEVICE)[::2])
    refused(ValueError, "segment 0's out is on meta", out=torch.empty(10, device="meta"))
    refused(TypeError, "segment 0's gradient is int64", gradient=ten.long())
    refused(TypeError, "segment 0 has master float16", master=half)
    refused(TypeError, "exp_avg float16.*expected float32 state", exp_avg=half)
    refused(TypeError, "gradient float64", gradient=ten.double())
    refused(TypeError, "out float64", out=ten.double())
    refused(TypeError, "accepted_gradient float16", Pass.COMMIT_AND_SPECULATE, accepted_gradient=half)
    refused(ValueError, "segment 0's coefficients is 1, expected the index of one of 1 sets", coefficients=1)
    refused(ValueError, "accepted_coefficients is -1", Pass.COMMIT_AND_SPECULATE, accepted_coefficients=-1)


@needs_triton
def test_no_segments_are_allowed() -> None:
    gpu.run(Pass.UPDATE, [])
    empty = torch.empty(0, device=DEVICE)
    gpu.run(Pass.ROUND, [Segment(empty, out=empty)])


def test_without_triton_the_update_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SUPERADAM_GPU", "torch")
    with pytest.raises(RuntimeError, match=r"superadam\.gpu\.run needs Triton.*SUPERADAM_GPU=torch asks for it"):
        gpu.run(Pass.UPDATE, [tensors()], [Coefficients.at_step(HYPER, 1)])


# -- what the compiler makes of it -------------------------------------------------------------------------------------


def request(
    which: Pass,
    gradient: Dtype,
    out: Dtype,
    flags: Flag = NO_FLAGS,
    accepted: Flag = NO_FLAGS,
    real: Dtype = Dtype.FLOAT32,
) -> Request:
    constants = {
        "PASS": int(which),
        "REAL": int(real),
        "GRADIENT": int(gradient),
        "OUT": int(out),
        "FLAGS": int(flags),
        "ACCEPTED_FLAGS": int(accepted),
        "IS_ALIGNED": True,
        "BLOCK": adam.BLOCK,
    }
    return Request("adam_kernel", {"table": "*i64", "tensors": "i32", "steps": "i32", "sets": "*fp64"}, constants)


@pytest.mark.subprocess
@pytest.mark.skipif(not can_compile(), reason="this Triton cannot compile for NVIDIA's GPUs")
def test_compiled_code_rounds_once_for_each_operation(tmp_path: Path) -> None:
    every = Flag.SCALE | Flag.MAXIMIZE | Flag.DECOUPLED | Flag.L2 | Flag.AMSGRAD
    usual = Flag.SCALE | Flag.DECOUPLED
    requests = [
        request(Pass.UPDATE, Dtype.BFLOAT16, Dtype.BFLOAT16, usual),
        request(Pass.UPDATE, Dtype.FLOAT32, Dtype.NONE, every),
        request(Pass.SPECULATE, Dtype.FLOAT16, Dtype.FLOAT16),
        request(Pass.COMMIT_AND_SPECULATE, Dtype.FLOAT32, Dtype.BFLOAT16, usual, every),
        request(Pass.COMMIT, Dtype.FLOAT64, Dtype.NONE, every, real=Dtype.FLOAT64),
        request(Pass.ROUND, Dtype.NONE, Dtype.FLOAT16),
    ]
    elements = 2 * adam.BLOCK // (32 * adam.OPTIONS["num_warps"])  # of a thread, in two branches
    for one, code in zip(requests, compiled("superadam.gpu.adam", requests, str(tmp_path)), strict=True):
        steps = [Flag(one.constants["FLAGS"])] if one.constants["PASS"] != Pass.ROUND else []
        if one.constants["PASS"] == Pass.COMMIT_AND_SPECULATE:
            steps.append(Flag(one.constants["ACCEPTED_FLAGS"]))
        real = "f64" if one.constants["REAL"] == Dtype.FLOAT64 else "f32"
        products = sum(3 + (Flag.SCALE in flags) + (Flag.DECOUPLED in flags) for flags in steps)
        fmas = sum(3 + (Flag.L2 in flags) for flags in steps)  # both forms of m are computed
        assert count(code, r".*\.ftz\b.*|.*\.approx\b.*|.*\.full\b.*") == 0
        assert count(code, rf"fma\.rn\.{real}") == count(code, r"fma.*\.f(16|32|64)") == elements * fmas
        assert count(code, rf"mul(\.rn)?\.{real}") == elements * products
        assert count(code, rf"div\.rn\.{real}") == count(code, r"div.*\.f(32|64)") == elements * 2 * len(steps)
        assert count(code, rf"sqrt\.rn\.{real}") == count(code, r"sqrt.*") == elements * len(steps)
        assert count(code, r"ld\.global.*\.v[24]\.b(32|64)") > 0  # where nothing is masked, 8 or 16 bytes at once
        assert count(code, r"(ld|st)\.shared.*|bar\..*") == 0  # no element changes its thread
