"""torch's GradScaler around the optimizer, with speculation and without: unscaling, skips, back-off and outcomes."""

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.optimizers import make, train_alike, trained
from support.visible import are_taken, give_gradients, parameter, parameters_of, speculate, state_bits, train, visible

from superadam import SpeculativeCPUAdam, SpeculativeCPUAdamW, StepKind

DTYPES = [torch.float32, torch.bfloat16, torch.float64]  # torch itself refuses to unscale fp16 gradients
EACH_DTYPE = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))


def scaler_of(scale: float, *, growth: float = 2.0, enabled: bool = True) -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=scale, growth_factor=growth, growth_interval=2, enabled=enabled)


def _speculate(optimizer: Any, scaler: torch.amp.GradScaler, when: str, *, unscales: bool) -> None:
    """Speculate and unscale in this order, if at all."""
    if when == "before unscale_":
        optimizer.speculate()
    if unscales:
        scaler.unscale_(optimizer)
    if when == "after unscale_":
        optimizer.speculate()
    assert are_taken(optimizer) == [when != "never"] * len(are_taken(optimizer))


def _scaled(use: str, dtype: torch.dtype, *, when: str = "never", scale: float = 2.0**10) -> Iterator[Any]:
    """Yield after every step of a loop with a GradScaler in which the third loss overflows."""
    optimizer = SpeculativeCPUAdamW([parameter(64, dtype=dtype)], lr=0.1)
    scaler = scaler_of(scale, growth=2.0 if math.frexp(scale)[0] == 0.5 else 1.7, enabled=use != "disabled")
    (p,) = parameters_of(optimizer)
    for seed in range(6):
        optimizer.zero_grad()
        x = torch.randn(64, generator=torch.Generator().manual_seed(seed)).to(dtype)
        scaler.scale((p * x).sum() * (math.inf if seed == 2 else 1.0)).backward()
        _speculate(optimizer, scaler, when, unscales=use in ("unscale_", "clip"))
        if use == "clip":
            torch.nn.utils.clip_grad_norm_([p], 0.5)
        if use == "disabled" and seed == 2:
            continue
        scaler.step(optimizer)
        scaler.update()
        yield state_bits(optimizer), scaler.get_scale()


@EACH_DTYPE
@pytest.mark.parametrize("use", ["plain", "unscale_", "clip", "disabled"])
@pytest.mark.parametrize("when", ["before unscale_", "after unscale_"])
@pytest.mark.parametrize("scale", [2.0**10, 1000.0, 3e-3])
def test_speculation_changes_no_bit_of_a_scaled_loop(dtype: torch.dtype, use: str, when: str, scale: float) -> None:
    """Also where the scale is no power of two, and torch rounds the unscaled gradient."""
    assert list(_scaled(use, dtype, when=when, scale=scale)) == list(_scaled(use, dtype, scale=scale))


@EACH_DTYPE
@pytest.mark.parametrize("when", ["never", "before unscale_", "after unscale_"])
def test_limit_and_outcomes_are_those_of_unscaled_gradients(dtype: torch.dtype, when: str) -> None:
    optimizer, twin = (make(dtype, SpeculativeCPUAdam, max_grad_norm=0.5) for _ in range(2))
    scaler = scaler_of(2.0**10)
    for seed in range(4):
        give_gradients(twin, seed)
        twin.step()
        give_gradients(optimizer, seed, scaler.get_scale())
        scaler.scale(torch.ones(()))  # which makes the scale
        _speculate(optimizer, scaler, when, unscales=when == "after unscale_")
        scaler.step(optimizer)
        scaler.update()
        assert optimizer.last_outcome == twin.last_outcome
        optimizer.zero_grad()
    assert state_bits(optimizer) == state_bits(twin)
    assert not {"grad_scale", "found_inf"} & set(vars(optimizer))


@pytest.mark.parametrize("value", [math.inf, math.nan])
@pytest.mark.parametrize("on_nonfinite", ["skip", "raise"])
@pytest.mark.parametrize("when", ["never", "before unscale_", "after unscale_"])
def test_an_overflow_is_the_scalers(value: float, on_nonfinite: str, when: str) -> None:
    """It does not call the optimizer then, so nothing raises, and the outcome is still the last one."""
    optimizer = trained(make(dtype=torch.bfloat16, on_nonfinite=on_nonfinite), [1])
    before, outcome = state_bits(optimizer), optimizer.last_outcome
    scaler = scaler_of(2.0**10)
    scaler.scale(parameters_of(optimizer)[0].sum() * value).backward()
    _speculate(optimizer, scaler, when, unscales=when == "after unscale_")
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0**9
    assert state_bits(optimizer) == before
    assert optimizer.last_outcome is outcome
    optimizer.zero_grad()
    train_alike(optimizer, trained(make(dtype=torch.bfloat16), [1]), 2)


def test_an_overflow_that_unscaling_makes_is_found() -> None:
    """Of a scale so small that its inverse takes finite gradients beyond the range."""
    kinds, scales = [], []
    for speculative in (False, True):
        optimizer = make()
        give_gradients(optimizer, 1, 1e30, speculative=speculative)
        scaler = scaler_of(2.0**-40)
        scaler.scale(torch.ones(()))
        scaler.step(optimizer)
        optimizer.step()  # of the user
        scaler.update()
        kinds.append(optimizer.last_outcome.kind)
        scales.append(scaler.get_scale())
    assert kinds == [StepKind.SKIPPED] * 2
    assert scales[0] == scales[1]


def test_unscaling_is_expected_from_the_second_step_on() -> None:
    """Speculation computes with the factor of the last step, and is right until the scale changes."""

    def build() -> SpeculativeCPUAdam:  # a strided parameter: a working copy with fp32 gradients
        return SpeculativeCPUAdam([torch.nn.Parameter(torch.stack([parameter(6, 7).detach()] * 2, dim=-1)[..., 0])])

    optimizer, twin = build(), build()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=4)
    accepted = []
    for seed in range(8):
        speculate(optimizer, seed, scaler.get_scale())
        assert all(are_taken(optimizer))
        scaler.scale(torch.ones(()))
        scaler.step(optimizer)
        scaler.update()
        accepted.append(optimizer.statistics.accepted)
        optimizer.zero_grad()
        train(twin, seed)
        assert visible(optimizer) == visible(twin)
        assert optimizer.last_outcome == twin.last_outcome
    assert accepted == [0, 1, 2, 3, 3, 4, 5, 6]  # the first made the state, the fifth had another scale
    assert optimizer.statistics.respeculated == 1


def test_fp16_gradients_are_refused_as_by_torch() -> None:
    for speculative in (False, True):
        optimizer = make(dtype=torch.float16)
        scaler = scaler_of(2.0)
        give_gradients(optimizer, 1, speculative=speculative)
        before = visible(optimizer)
        scaler.scale(torch.ones(()))
        with pytest.raises(ValueError, match="Attempting to unscale FP16 gradients"):
            scaler.step(optimizer)
        assert visible(optimizer) == before
        assert are_taken(optimizer) == [speculative] * 2
