"""Every instruction set has the bits of the oracle, in every pass, dtype, length and alignment."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.compact import BLOCK
from support.kernel_arrays import FORMATS, Job, Placed, coefficient_table, jobs, make_segment, variants
from support.strategies import USUAL, Magnitudes

from superadam.kernels import native
from superadam.kernels.hyperparameters import Coefficients
from superadam.kernels.native import Dtype, Format, Pass


@pytest.mark.slow
@pytest.mark.parametrize("which", Pass, ids=lambda which: which.name)
@settings(max_examples=settings.default.max_examples // 2)
@given(data=st.data())
def test_bits_of_the_oracle(which, data):
    data.draw(jobs(which)).check_everywhere()


VARIANTS = [
    (which, form, amsgrad)
    for which, form, amsgrad in itertools.product(Pass, FORMATS, [False, True])
    if not form or not (which is Pass.NORM or (amsgrad and Format.MOMENTS_8BIT in form))
]


@pytest.mark.parametrize(
    ("which", "form", "amsgrad"),
    VARIANTS,
    ids=lambda value: str(value) if isinstance(value, bool) else value.name or "FLOAT32",
)
def test_every_variant_has_the_bits_of_the_oracle(which, form, amsgrad):
    """Nothing left to chance: each combination of dtypes, with and without the norm, all magnitudes at once."""
    hyper = replace(USUAL, amsgrad=amsgrad, decoupled_weight_decay=not amsgrad)
    norms = [True] if which is Pass.NORM else [False, True]
    for (gradient_dtype, out_dtype), norm in itertools.product(variants(which), norms):
        double = gradient_dtype is Dtype.FLOAT64
        if double and form:
            continue
        rounds = {8: amsgrad, 7: not amsgrad}
        sets = [Coefficients.at_step(hyper, step, 0.37, rounds=rounds[step], double=double) for step in rounds]
        length = native.CHUNK + (2 * BLOCK if Format.MOMENTS_8BIT in form else 77)
        kinds = [Magnitudes.WIDE]
        segment = make_segment(7, length, gradient_dtype, out_dtype, kinds=kinds, norm=norm, sprinkle=norm, form=form)
        segment.accepted_coefficients = 1
        Job(which, [segment], sets).check_everywhere()


@pytest.mark.parametrize("dtype", [Dtype.FLOAT32, Dtype.FLOAT64], ids=lambda dtype: dtype.name)
def test_of_equal_moments_the_greatest_is_the_older_one(dtype):
    """The sign of a zero tells them apart."""
    hyper = replace(USUAL, weight_decay=0.0, amsgrad=True)
    segment = make_segment(1, 77, dtype, Dtype.NONE)
    for name, value in (("gradient", 0.0), ("exp_avg_sq", 0.0), ("max_exp_avg_sq", -0.0)):
        segment.arrays[name] = Placed(np.full_like(segment.arrays[name].view, value))
    Job(Pass.COMMIT, [segment], [Coefficients.at_step(hyper, 2, double=dtype is Dtype.FLOAT64)]).check_everywhere()
    assert np.signbit(segment.arrays["max_exp_avg_sq"].view).all()


@pytest.mark.parametrize("which", [Pass.SPECULATE, Pass.COMMIT_AND_SPECULATE, Pass.UPDATE])
@pytest.mark.parametrize("out_dtype", [Dtype.FLOAT32, Dtype.BFLOAT16, Dtype.FLOAT16], ids=lambda dtype: dtype.name)
def test_stores_past_the_caches_have_the_same_bits(which, out_dtype):
    """From 4 Mi elements on, an aligned `out` is written past the caches; one that is not aligned is not."""
    sets = [Coefficients.at_step(USUAL, 3)]
    job = Job(which, [make_segment(i, 9001, Dtype.BFLOAT16, out_dtype, offsets=[4 * i]) for i in range(2)], sets)
    # The rest of the 4 Mi elements: one segment again and again, whose values are of no interest.
    filler = Job(which, [make_segment(2, 1 << 16, Dtype.BFLOAT16, out_dtype)])
    expected = job.expected()
    table = np.concatenate([job.table(), np.repeat(filler.table(), 64)])
    for isa in native.available_isas():
        job.reset()
        native.run(which, table, coefficient_table(sets), isa=isa, threads=1)
        job.check(expected, f" with {isa}")


def test_empty_jobs_do_nothing(isa):
    for which in Pass:
        native.run(which, np.zeros(0, native.SEGMENT), isa=isa)
        nulls = np.zeros(5, native.SEGMENT)
        nulls["gradient_dtype"] = nulls["out_dtype"] = Dtype.FLOAT32
        native.run(which, nulls, np.zeros(1, native.COEFFICIENTS), isa=isa)
