"""Coefficients are what the design says, each rounded once; impossible hyper-parameters are refused."""

import dataclasses
import decimal
import math
from fractions import Fraction

import numpy as np
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from support.strategies import USUAL, hyperparameters, scales

from superadam.kernels.dtypes import DTYPES
from superadam.kernels.hyperparameters import Coefficients, Hyperparameters, Scale, beta_power, described
from superadam.kernels.native import Flag
from superadam.state.table import CoefficientTable


@given(st.floats(0.0, 1.0, exclude_max=True, allow_subnormal=False), st.lists(st.integers(1, 300), max_size=4))
@example(0.3752387480264956, [43])  # glibc's pow rounds it the other way
@example(0.9, [3, 4, 6, 5, 6])
@example(0.95, [13821])  # less than a double of 53 bits: rounded once as well
def test_beta_power_is_correctly_rounded_in_any_order_of_steps(beta, steps):
    beta_power.cache_clear()
    for step in steps:
        exact = Fraction(beta) ** step
        assert beta_power(beta, step) == exact.numerator / exact.denominator  # which Python rounds once


def test_what_a_program_has_set_for_its_own_decimals_stays_and_changes_nothing():
    with decimal.localcontext(decimal.Context(prec=1, Emin=-1, Emax=1, traps=[*decimal.getcontext().traps])) as context:
        assert beta_power.__wrapped__(0.8517, 3) == float(Fraction(0.8517) ** 3)
        assert not any(context.flags.values())


@given(hyperparameters(), st.integers(1, 100_000), scales(), st.booleans())
@example(USUAL, 9, 1.0, False)
def test_coefficients_are_rounded_once(hyper, step, scale, double):
    k = Coefficients.at_step(hyper, step, scale, double=double)
    bias_correction1 = 1.0 - beta_power(hyper.beta1, step)
    in_double = {
        "s": scale,
        "decay": 1.0 - hyper.lr * hyper.weight_decay,
        "wd": hyper.weight_decay,
        "w": 1.0 - hyper.beta1,
        "b2": hyper.beta2,
        "c2": 1.0 - hyper.beta2,
        "nss": -(hyper.lr / bias_correction1),
        "bc2s": math.sqrt(1.0 - beta_power(hyper.beta2, step)),
        "eps": hyper.eps,
    }
    for name, value in in_double.items():
        with np.errstate(over="ignore"):
            rounded = value if double else float(np.float32(value))
        ours = getattr(k, name)
        assert ours == rounded, name
        assert math.copysign(1.0, ours) == math.copysign(1.0, rounded), name


@given(hyperparameters(), scales(), st.booleans())
def test_flags_switch_on_what_acts(hyper, scale, rounds):
    flags = Coefficients.at_step(hyper, 1, scale, rounds=rounds).flags
    assert (Flag.SCALE in flags) == (np.float32(scale) != 1.0)
    assert (Flag.ROUND in flags) == (rounds and Flag.SCALE in flags)
    assert (Flag.MAXIMIZE in flags) == hyper.maximize
    assert (Flag.AMSGRAD in flags) == hyper.amsgrad
    assert (Flag.DECOUPLED in flags) == (hyper.weight_decay != 0 and hyper.decoupled_weight_decay)
    assert (Flag.L2 in flags) == (hyper.weight_decay != 0 and not hyper.decoupled_weight_decay)


def test_a_scale_that_rounds_to_one_is_none():
    assert Flag.SCALE not in Coefficients.at_step(USUAL, 1, 1.0 - 2.0**-30).flags
    assert Flag.SCALE in Coefficients.at_step(USUAL, 1, 1.0 - 2.0**-30, double=True).flags


def test_only_products_of_bf16_gradients_are_rounded():
    assert [dtype for dtype in DTYPES if Scale.recorded(0.3, dtype).rounds] == [torch.bfloat16]
    assert {Scale.recorded(1.0, dtype) for dtype in DTYPES} == {Scale()} == {Scale(1.0, rounds=False)}


def test_table_tells_hyperparameters_apart_that_did_not_live_together():
    """More than a cache keeps all of them, and the later ones would be where earlier ones were in memory."""
    table = CoefficientTable()
    rates = [float(rate) for rate in range(1, 3001)]
    assert [table.index(dataclasses.replace(USUAL, lr=rate), 1, Scale(), False) for rate in rates] == list(range(3000))


def test_zero_has_a_sign() -> None:
    group = dataclasses.asdict(USUAL) | {"betas": (USUAL.beta1, USUAL.beta2)}
    assert [math.copysign(1.0, Hyperparameters.of_group(group | {"lr": lr}).lr) for lr in (0.0, -0.0, 0.0)] == [
        1,
        -1,
        1,
    ]


def test_errors_show_values_of_less_than_eighty_letters() -> None:
    shown = ["a" * 23, "a" * 22, "a" * 22]
    assert described(shown) == repr(shown)
    assert len(described(shown)) == 79
    assert described(["a" * 23, "a" * 23, "a" * 22]) == "a list"
    assert described(torch.tensor([0.5], requires_grad=True)) == "tensor([0.5000])"
    for shape, device in (((2, 3), "cpu"), ((1,), "meta")):
        assert described(torch.ones(shape, device=device)) == f"torch.float32 of shape {shape}"
