"""The kernels round to nearest and keep denormals whatever the calling thread has set, and leave its setting alone."""

import ctypes
import itertools
import platform
from contextlib import suppress
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.float_modes import flushed_denormals, rounded_upward
from support.kernel_arrays import Job, jobs, make_segment
from support.strategies import USUAL, Magnitudes, hyperparameters, scales

from superadam.kernels import native
from superadam.kernels.hyperparameters import Coefficients
from superadam.kernels.native import Dtype, Pass


def control_register() -> int:
    """Return MXCSR without its exception flags, or FPCR, out of the `fenv_t` of glibc."""
    environment = ctypes.create_string_buffer(64)
    ctypes.CDLL("libm.so.6").fegetenv(environment)
    if platform.machine() == "x86_64":
        return int.from_bytes(environment.raw[28:32], "little") & ~0x3F
    return int.from_bytes(environment.raw[:4], "little")


SETTINGS = (flushed_denormals, rounded_upward)
LOST_WHEN_FLUSHED = [Magnitudes.TINY, Magnitudes.TINY, Magnitudes.WIDE]


def check_under_each_setting(job: Job, threads: int) -> None:
    expected = job.expected()
    usual = control_register()
    for isa, setting in itertools.product(native.available_isas(), SETTINGS):
        job.reset()
        with setting():
            before = control_register()
            job.run(isa, threads)
            after = control_register()
        assert after == before != usual
        job.check(expected, f" with {isa} and {setting.__name__}")


@pytest.mark.slow
@settings(max_examples=settings.default.max_examples // 2)
@given(data=st.data())
def test_bits_do_not_depend_on_the_callers_setting(data):
    check_under_each_setting(data.draw(st.sampled_from(Pass).flatmap(jobs)), threads=1)


def test_bits_do_not_depend_on_the_setting_with_several_threads():
    """The pool's threads inherit the setting of the thread that started them, or were started before it was made."""
    sets = [Coefficients.at_step(replace(USUAL, eps=1e-40, amsgrad=True, decoupled_weight_decay=False), 3)]
    length = 3 * 16 * native.CHUNK + 5  # enough for three threads
    segment = make_segment(1, length, Dtype.FLOAT32, Dtype.FLOAT16, kinds=LOST_WHEN_FLUSHED, norm=True)
    check_under_each_setting(Job(Pass.UPDATE, [segment], sets), threads=3)


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.__name__)
def test_the_usual_mode_is_recognized_and_restored(setting):
    usual = control_register()
    assert native.is_float_mode_usual()
    with setting():
        before = control_register()
        assert not native.is_float_mode_usual()
        with native.UsualFloatMode():
            assert control_register() == usual
            assert native.is_float_mode_usual()
        assert control_register() == before
        with suppress(KeyError), native.UsualFloatMode():
            raise KeyError
        assert control_register() == before
    with native.UsualFloatMode():
        assert control_register() == usual
    assert native.is_float_mode_usual()


@given(hyperparameters(), st.integers(1, 1000), scales())
def test_coefficients_do_not_depend_on_flushing(hyper, step, scale):
    expected = Coefficients.at_step(hyper, step, scale)
    with flushed_denormals():
        under = Coefficients.at_step(hyper, step, scale)
    assert under == expected
    assert np.signbit(under.row()).tolist() == np.signbit(expected.row()).tolist()
