"""torch's GradScaler around plain steps: unscaling, skips, back-off, and what it leaves behind."""

from __future__ import annotations

import math
import platform
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from visible import give_gradients, parameter, parameters_of, refused, state_bits, train

from superadam import SpeculativeCPUAdam, SpeculativeCPUAdamW, StepKind


def make(cls: type = SpeculativeCPUAdamW, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    return cls([parameter(70, dtype=dtype), parameter(4, 5, dtype=dtype, seed=1)], **options)


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def _scaled(cls: type, use: str, dtype: torch.dtype) -> Iterator[Any]:
    """Yield after every step of a loop with a GradScaler in which the third loss overflows."""
    options = {"fused": True} if cls is torch.optim.AdamW else {}
    optimizer = cls([parameter(64, dtype=dtype)], lr=0.1, **options)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2, enabled=use != "disabled")
    (p,) = parameters_of(optimizer)
    for seed in range(6):
        optimizer.zero_grad()
        x = torch.randn(64, generator=torch.Generator().manual_seed(seed)).to(dtype)
        loss = (p * x).sum() * (math.inf if seed == 2 else 1.0)
        scaler.scale(loss).backward()
        if use in ("unscale_", "clip"):
            scaler.unscale_(optimizer)
        if use == "clip":
            torch.nn.utils.clip_grad_norm_([p], 0.5)
        if use == "disabled" and seed == 2:
            continue
        scaler.step(optimizer)
        scaler.update()
        yield optimizer, state_bits(optimizer, without=["master"]), scaler.get_scale()


@pytest.mark.parametrize("use", ["plain", "unscale_", "clip", "disabled"])
def test_grad_scaler(use: str) -> None:
    """Skips, backs off and grows as with torch; scales are powers of two, so the bits are those without scaling."""
    ours, theirs = (list(_scaled(cls, use, torch.float32)) for cls in (SpeculativeCPUAdamW, torch.optim.AdamW))
    assert [scale for _, _, scale in ours] == [scale for _, _, scale in theirs]
    if use != "disabled":
        assert ours[2][2] < ours[1][2] > ours[0][2]
        assert ours[2][1] == ours[1][1]
    if platform.machine() == "x86_64":  # elsewhere torch's fused kernel rounds differently from itself here
        assert [one for _, one, _ in ours] == [one for _, one, _ in theirs]
    twin = SpeculativeCPUAdamW([parameter(64)], lr=0.1)
    (p,) = parameters_of(twin)
    for index, seed in enumerate([0, 1, 2, 3, 4, 5] if use != "disabled" else [0, 1, 3, 4, 5]):
        p.grad = torch.randn(64, generator=torch.Generator().manual_seed(seed))
        if use == "clip":
            torch.nn.utils.clip_grad_norm_([p], 0.5)
        if seed != 2:
            twin.step()
        assert state_bits(twin) == ours[index][1]


def test_grad_scaler_with_limit_and_outcomes() -> None:
    optimizer = SpeculativeCPUAdam([parameter(64)], max_grad_norm=0.5)
    twin = SpeculativeCPUAdam([parameter(64)], max_grad_norm=0.5)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for seed in range(3):
        give_gradients(twin, seed)
        twin.step()
        give_gradients(optimizer, seed, 2.0**10)
        scaler.scale(torch.ones(()))  # which makes the scale
        scaler.step(optimizer)
        scaler.update()
        assert optimizer.last_outcome == twin.last_outcome
    assert state_bits(optimizer) == state_bits(twin)
    assert not {"grad_scale", "found_inf"} & set(vars(optimizer))


def test_scale_does_not_outlive_a_step_that_raised() -> None:
    optimizer = make(on_nonfinite="raise")
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    scaler.scale(parameters_of(optimizer)[0].sum() * math.inf).backward()
    before = state_bits(optimizer)
    with pytest.raises(FloatingPointError):
        scaler.step(optimizer)
    assert state_bits(optimizer) == before
    optimizer.zero_grad()
    twin = make()
    for one in (optimizer, twin):
        train(one, 1)
    assert state_bits(optimizer) == state_bits(twin)


def test_grad_scaler_beside_speculation_is_refused() -> None:
    optimizer = make()
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(parameters_of(optimizer)[0].sum()).backward()
    optimizer.speculate()
    with refused(optimizer, RuntimeError, "GradScaler.step.. cannot unscale gradients that speculate.. has taken"):
        scaler.step(optimizer)
    assert optimizer.last_outcome is None


def test_grad_scaler_after_unscaling_then_speculation() -> None:
    optimizer, twin = make(), make()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=1)
    for seed, size in enumerate([1.0, math.inf]):
        give_gradients(optimizer, seed, 2.0**10 * size)
        scaler.scale(torch.ones(()))
        scaler.unscale_(optimizer)
        optimizer.speculate()
        scaler.step(optimizer)
        scaler.update()
        assert optimizer.last_outcome is not None
        assert optimizer.last_outcome.kind is [StepKind.COMMITTED, StepKind.SKIPPED][seed]
        assert scaler.get_scale() == [2.0**11, 2.0**10][seed]
    train(twin, 0)
    assert state_bits(optimizer) == state_bits(twin)
