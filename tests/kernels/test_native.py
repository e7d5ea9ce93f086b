"""kernels.native: bad tables raise and change nothing; instruction sets and threads are chosen as documented."""

import logging
import math
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from support import formula
from support.float_modes import flushed_denormals, rounded_upward
from support.kernel_arrays import READS_STATE, Job, coefficient_table, make_segment
from support.strategies import USUAL

import superadam
from superadam._kernels import ffi, lib
from superadam.kernels import native
from superadam.kernels.hyperparameters import Coefficients
from superadam.kernels.native import Dtype, Format, Pass
from superadam.state.table import GradientNorm
from superadam.step.outcome import StepKind, judge

pytestmark = pytest.mark.usefixtures("fresh_native")

HYPER = replace(USUAL, amsgrad=True)
READ = {"gradient", "master", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"}
USED = {  # arrays that each pass must have
    Pass.NORM: {"gradient", "sums", "nonfinite"},
    Pass.SPECULATE: READ | {"out"},
    Pass.COMMIT: READ,
    Pass.UPDATE: READ | {"out"},
    Pass.COMMIT_AND_SPECULATE: READ | {"accepted_gradient", "out"},
}
EACH_PASS = pytest.mark.parametrize("which", Pass, ids=lambda which: which.name)


def make_job(which: Pass) -> Job:
    segments = [make_segment(i, 100, Dtype.BFLOAT16, Dtype.BFLOAT16, norm=True) for i in range(3)]
    return Job(which, segments, [Coefficients.at_step(HYPER, 3)])


def check_refused(job: Job, table: np.ndarray, message: str, **options: object) -> None:
    which = options.pop("which", job.which)
    with pytest.raises(ValueError, match=message):
        native.run(which, table, coefficient_table(job.sets), **{"threads": 1, **options})
    job.check([{}] * len(job.segments))  # nothing at all was written, also not for the good segments before


def bad_segments() -> Iterator[tuple[Pass, dict[str, int], str]]:
    """Yield a pass, what is put into a segment of its table, and what is said of it."""
    dtypes = "dtypes that this pass does not take"
    for which in Pass:
        yield from ((which, {name: 0}, "lacks an array") for name in sorted(USED[which] | {"sums", "nonfinite"}))
        yield from ((which, {"gradient_dtype": dtype}, dtypes) for dtype in (-1, 0, 5, 1 << 30))
        yield from ((which, {"length": length}, "negative length") for length in (-1, -4096, np.iinfo(np.int64).min))
        for gradient, out in ((1, 4), (2, 4), (4, 1), (4, 2), (4, 3), (1, 5), (1, -1)) if "out" in USED[which] else ():
            yield which, {"gradient_dtype": gradient, "out_dtype": out}, dtypes
    yield Pass.NORM, {"sums": 0, "nonfinite": 0}, "lacks an array"
    for which in (Pass.SPECULATE, Pass.COMMIT_AND_SPECULATE):
        yield which, {"out_dtype": Dtype.NONE}, dtypes
    outside = "coefficient set outside the table"
    for index in (-1, 1, np.iinfo(np.int32).max):
        yield from ((which, {"coefficients": index}, outside) for which in READS_STATE)
        yield Pass.COMMIT_AND_SPECULATE, {"accepted_coefficients": index}, outside


@pytest.mark.parametrize(("which", "change", "message"), [*bad_segments()], ids=str)
def test_a_segment_that_the_pass_cannot_take_is_refused(which, change, message):
    job = make_job(which)
    table = job.table()
    for name, value in change.items():
        table[name][2] = value
    check_refused(job, table, message)


@pytest.mark.parametrize(("length", "amsgrad"), [(65, False), (64, True)])
def test_8bit_moments_of_part_of_a_block_or_with_maxima_are_refused(length, amsgrad):
    """Such a block has no exponent, and no maximum is stored."""
    segments = [make_segment(0, 128, Dtype.FLOAT32, Dtype.FLOAT32, form=Format.MOMENTS_8BIT)]
    job = Job(Pass.UPDATE, segments, [Coefficients.at_step(replace(HYPER, amsgrad=amsgrad), 1)])
    table = job.table()
    table["length"], table["max_exp_avg_sq"] = length, table["exp_avg"]
    check_refused(job, table, "in a format that this pass" if amsgrad else "8-bit moments of part of a block")


@pytest.mark.parametrize("name", ["coefficients", "accepted_coefficients"])
def test_maxima_are_needed_where_either_of_two_steps_has_amsgrad(name):
    job = make_job(Pass.COMMIT_AND_SPECULATE)
    job.sets.append(Coefficients.at_step(replace(HYPER, amsgrad=False), 3))
    table = job.table()
    table["coefficients"] = table["accepted_coefficients"] = 1
    table[name][2] = 0
    table["max_exp_avg_sq"] = 0
    check_refused(job, table, "lacks an array")


@EACH_PASS
def test_an_array_that_the_pass_does_not_use_may_be_missing(which):
    job = make_job(which)
    for segment in job.segments:
        segment.arrays = {name: placed for name, placed in segment.arrays.items() if name in USED[which]}
    expected = job.expected()
    job.run("scalar")
    job.check(expected)


@pytest.mark.parametrize("which", [-1, len(Pass), 1 << 30])
def test_an_unknown_pass_is_refused(which):
    job = make_job(Pass.UPDATE)
    check_refused(job, job.table(), "no such pass", which=which)


@EACH_PASS
def test_an_unknown_isa_is_refused(which):
    job = make_job(which)
    check_refused(job, job.table(), "available_isas", isa="mmx")


@pytest.mark.parametrize("row", [-1, lib.superadam_isa_count(), 1 << 30])
def test_rows_that_do_not_exist_are_no_instruction_sets(row):
    assert lib.superadam_isa_name(row) == ffi.NULL
    assert lib.superadam_isa_status(row) == lib.SUPERADAM_NOT_COMPILED


@pytest.mark.parametrize("spoil", [lambda table: table.view(np.uint64), lambda table: table[::2]])
def test_a_table_of_another_layout_is_refused(spoil):
    job = make_job(Pass.UPDATE)
    check_refused(job, spoil(job.table()), "SEGMENT|contiguous")


# -- instruction sets --------------------------------------------------------------------------------------------------


def test_the_best_isa_is_the_default_and_scalar_the_last():
    assert superadam.active_isa() == superadam.available_isas()[0]
    assert superadam.available_isas()[-1] == "scalar"
    assert native.known_isas()["scalar"] == "runnable"


def test_the_environment_forces_an_isa(isa, monkeypatch, caplog):
    monkeypatch.setenv("SUPERADAM_ISA", isa)
    assert superadam.active_isa() == isa
    assert not caplog.records  # also where it is scalar, as that was asked for


@pytest.mark.parametrize("status", [None, "not compiled", "not supported"])
def test_an_isa_that_cannot_run_raises(status, monkeypatch):
    known = {"mmx": status, "scalar": "runnable"} if status else {"scalar": "runnable"}
    monkeypatch.setattr(native, "known_isas", lambda: known)
    monkeypatch.setenv("SUPERADAM_ISA", "mmx")
    reason = status or "not an instruction set of this architecture"
    with pytest.raises(ValueError, match=f"SUPERADAM_ISA 'mmx' is {reason}; available here: scalar"):
        superadam.active_isa()


def test_scalar_by_surprise_is_said_once(monkeypatch, caplog):
    monkeypatch.setattr(native, "known_isas", lambda: {"avx2": "not supported", "scalar": "runnable"})
    assert superadam.active_isa() == superadam.active_isa() == "scalar"
    ((name, level, message),) = caplog.record_tuples
    assert (name, level) == ("superadam", logging.WARNING)
    assert "scalar kernels" in message
    assert "avx2 is not supported" in message


# -- threads -----------------------------------------------------------------------------------------------------------


def test_the_default_is_a_thread_for_each_cpu():
    assert native.get_num_threads() == len(os.sched_getaffinity(0))
    native.set_num_threads(5)
    assert native.get_num_threads() == 5


def test_the_environment_sets_the_number_of_threads(monkeypatch):
    monkeypatch.setenv("SUPERADAM_THREADS", "3")
    assert native.get_num_threads() == 3


@pytest.mark.parametrize("text", ["0", "-1", "two", "1.5", "", "2147483648"])
def test_a_bad_number_of_threads_in_the_environment_raises(text, monkeypatch):
    monkeypatch.setenv("SUPERADAM_THREADS", text)
    for use in (native.get_num_threads, lambda: superadam.SpeculativeCPUAdam([torch.zeros(1, requires_grad=True)])):
        with pytest.raises(ValueError, match=f"SUPERADAM_THREADS is '{text}'; expected a positive integer"):
            use()


@pytest.mark.parametrize("count", [0, -1, 1.0, True, "2", None, 1 << 31])
def test_a_bad_number_of_threads_raises(count):
    before = native.get_num_threads()
    with pytest.raises(ValueError, match="expected an integer of at least 1"):
        native.set_num_threads(count)
    assert native.get_num_threads() == before


# -- sums --------------------------------------------------------------------------------------------------------------

MODES = (nullcontext, flushed_denormals, rounded_upward)


@given(st.lists(st.floats()), st.sampled_from(MODES))
@example([1e100, 1.0, -1e100], nullcontext)  # a sum that compensates is 1
@example([5e-324, 3e-310, 1e-320], flushed_denormals)
@example([1.0, 2.0**-60], rounded_upward)
def test_ordered_sum_adds_in_order_whatever_the_floating_point_mode(values, mode):
    expected = formula.ordered_sum(np.array(values))
    with mode():
        ours = native.ordered_sum(np.array(values))
    assert np.array_equal([ours], [expected], equal_nan=True)


# -- a step in one call ------------------------------------------------------------------------------------------------


class Update:
    """A job over own masters in fp32, with arrays for its norm."""

    def __init__(self, lengths: list[int], bad: Sequence[float] = ()) -> None:
        chunks = [native.chunk_count(length) for length in lengths]
        segments = [make_segment(number, length, Dtype.FLOAT32) for number, length in enumerate(lengths)]
        segments[0].arrays["gradient"].view[: len(bad)] = bad
        self.arrays = [array.view for segment in segments for array in segment.arrays.values()]
        self.sums, self.nonfinite = np.zeros(sum(chunks)), np.full(sum(chunks) + 1, BEYOND)[:-1]
        self.table = np.full((len(lengths) + 1) * native.SEGMENT.itemsize, BEYOND, np.uint8).view(native.SEGMENT)
        self.segments = self.table[:-1]
        self.segments[:], self.nonfinite[:] = Job(Pass.UPDATE, segments).table(), 0
        self.segments["coefficients"] = np.arange(len(lengths)) % 2
        for name in ("sums", "nonfinite"):
            self.segments[name] = getattr(self, name).ctypes.data + 8 * np.cumsum([0, *chunks[:-1]])

    def state(self) -> list[bytes]:
        return [array.tobytes() for array in self.arrays]


BEYOND = 77  # stands after the last row of a table, which is neither read nor written
GROUPS = (HYPER, replace(HYPER, lr=1e-2))


@given(
    lengths=st.lists(st.integers(1, 9000), min_size=1, max_size=4),
    limit=st.sampled_from([math.inf, 0.0, 1e-3, 1.0, 1e3]),
    bad=st.lists(st.sampled_from([math.inf, -math.inf, math.nan, 3e38]), max_size=1),
    mode=st.sampled_from(MODES),
    isa=st.sampled_from(superadam.available_isas()),
)
@example(lengths=[5000, 9000], limit=0.0, bad=[], mode=nullcontext, isa="scalar")
@example(lengths=[5000, 9000], limit=math.inf, bad=[math.nan], mode=nullcontext, isa="scalar")
@example(lengths=[5000, 9000], limit=1.0, bad=[], mode=rounded_upward, isa="scalar")
@example(lengths=[5000, 9000], limit=150.0, bad=[], mode=nullcontext, isa="scalar")  # a little above the norm
def test_a_step_in_one_call_has_the_bits_of_its_passes(lengths, limit, bad, mode, isa):
    """Whatever the floating-point mode, which it leaves as it was."""
    ours, expected = Update(lengths, bad), Update(lengths, bad)
    table = coefficient_table([Coefficients.at_step(hyper, 3) for hyper in (*GROUPS, HYPER)])
    beyond = table[-1].tobytes()
    with mode(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "_active", isa)
        patch.setattr(native, "_num_threads", 1)  # fewer than groups
        is_usual, begin = native.is_float_mode_usual(), time.monotonic()
        verdict = native.step(ours.segments, table[:-1], ours.sums, ours.nonfinite, limit)
        elapsed = time.monotonic() - begin
        assert native.is_float_mode_usual() is is_usual
    native.run(Pass.NORM, expected.segments)
    outcome = judge(GradientNorm(expected.sums, expected.nonfinite), limit)
    if outcome.kind is not StepKind.SKIPPED:
        assert not ours.segments["sums"].any()  # nor does the update take the norm again
        expected.segments["sums"] = expected.segments["nonfinite"] = 0
        scaled = [Coefficients.at_step(hyper, 3, outcome.clip_coefficient) for hyper in GROUPS]
        native.run(Pass.UPDATE, expected.segments, coefficient_table(scaled))
    assert np.array_equal(verdict.norm, outcome.grad_norm, equal_nan=True)
    assert verdict.nonfinite == outcome.nonfinite
    assert outcome.kind is StepKind.SKIPPED or verdict.clip == outcome.clip_coefficient
    assert 0 < verdict.seconds < elapsed
    assert table[-1].tobytes() == beyond
    assert ours.table[-1].tobytes() == bytes([BEYOND]) * native.SEGMENT.itemsize
    assert ours.state() == expected.state()


@pytest.mark.parametrize("name", ["gradient", "sums", "master", "exp_avg"])
def test_a_step_that_lacks_an_array_changes_no_state(name):
    job = Update([100, 5000])
    before = job.state()
    job.segments[name][1] = 0
    with pytest.raises(ValueError, match="lacks an array"):
        native.step(job.segments, coefficient_table([Coefficients.at_step(HYPER, 3)] * 2), job.sums, job.nonfinite, 1.0)
    assert job.state() == before
