"""`superadam.GradScaler`: torch's scaler, whose verdict is the optimizer's."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from overlap import adam, eager, loss_of, mlp
from torch import nn
from visible import shown

from superadam import GradScaler, SpeculativeCPUAdam

pytestmark = pytest.mark.timeout(20)  # a hang fails with the stack of every thread


def pair(**options: Any) -> tuple[nn.Module, SpeculativeCPUAdam, GradScaler]:
    model = mlp()
    return model, adam(model), GradScaler("cpu", **{"init_scale": 8.0, "growth_interval": 2, **options})


def step(
    model: nn.Module, optimizer: SpeculativeCPUAdam, scaler: torch.amp.GradScaler, seed: int, factor: float = 1.0
) -> None:
    optimizer.zero_grad()
    scaler.scale(loss_of(model, seed) * factor).backward()
    scaler.step(optimizer)
    scaler.update()


def test_scale_grows_after_good_steps_and_backs_off_after_bad_ones() -> None:
    model, optimizer, scaler = pair()
    with eager(optimizer, model, grad_scaler=scaler):
        scales = []
        for seed in range(6):
            step(model, optimizer, scaler, seed, math.nan if seed == 3 else 1.0)
            scales.append(scaler.get_scale())
    assert scales == [8.0, 16.0, 16.0, 8.0, 8.0, 16.0]
    assert optimizer.statistics.skipped == 1


@pytest.mark.parametrize("scheduled", [False, True])
def test_the_same_steps_as_with_the_scaler_of_torch(scheduled: bool) -> None:
    """Also beside an optimizer without a scheduler, where gradients stay in `.grad`."""
    model, optimizer, scaler = pair()
    twin_model, twin, _ = pair()
    torch_scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
    scheduler = eager(optimizer, model, grad_scaler=scaler) if scheduled else None
    for seed in range(5):
        step(model, optimizer, scaler, seed, math.inf if seed == 2 else 1.0)
        step(twin_model, twin, torch_scaler, seed, math.inf if seed == 2 else 1.0)
        assert scaler.state_dict() == torch_scaler.state_dict()
        assert shown(optimizer) == shown(twin)
        assert optimizer.last_outcome is not None
        assert optimizer.last_outcome == twin.last_outcome or seed == 2  # Inf - Inf
    if scheduler is not None:
        scheduler.close()


def test_other_optimizers_are_served_as_by_torch() -> None:
    model, twin = mlp(), mlp()
    scaler = GradScaler("cpu", init_scale=8.0)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler.scale(loss_of(model, 0)).backward()
    scaler.unscale_(sgd)
    loss_of(twin, 0).backward()
    for parameter, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(parameter.grad, other.grad)  # type: ignore[arg-type]
    scaler.step(sgd)
    scaler.update()
    with torch.no_grad():
        for other in twin.parameters():
            other -= 0.1 * other.grad
    assert all(torch.allclose(p, q) for p, q in zip(model.parameters(), twin.parameters(), strict=True))


def test_disabled_scaler_does_nothing() -> None:
    model, optimizer, _ = pair()
    twin_model, twin, _ = pair()
    scaler = GradScaler("cpu", enabled=False)
    assert scaler.inverse_scale == 1.0
    with eager(optimizer, model, grad_scaler=scaler):
        for seed in range(3):
            step(model, optimizer, scaler, seed)
            twin.zero_grad()
            loss_of(twin_model, seed).backward()
            twin.step()
    assert shown(optimizer) == shown(twin)


@pytest.mark.parametrize("scheduled", [False, True])
def test_stepping_twice_before_update_is_refused(scheduled: bool) -> None:
    model, optimizer, scaler = pair()
    scheduler = eager(optimizer, model, grad_scaler=scaler) if scheduled else None
    scaler.scale(loss_of(model, 0)).backward()
    scaler.step(optimizer)
    before = shown(optimizer)
    if scheduled:
        scaler.scale(loss_of(model, 1)).backward()
    with pytest.raises(RuntimeError, match=r"since the last update\(\)"):
        scaler.step(optimizer)
    optimizer.zero_grad()
    assert shown(optimizer) == before
    if scheduler is not None:
        scheduler.close()


def test_update_without_a_step_is_refused() -> None:
    model, optimizer, scaler = pair()
    scaler.scale(loss_of(model, 0))
    with pytest.raises(AssertionError):
        scaler.update()
    assert optimizer.statistics.steps == 0


def test_step_passes_on_what_the_optimizer_returns() -> None:
    model, optimizer, scaler = pair()
    with eager(optimizer, model, grad_scaler=scaler):
        scaler.scale(loss_of(model, 0)).backward()
        assert scaler.step(optimizer, lambda: 3.5) == 3.5


def test_checkpoint_goes_to_and_from_the_scaler_of_torch() -> None:
    model, optimizer, scaler = pair()
    with eager(optimizer, model, grad_scaler=scaler):
        for seed in range(3):
            step(model, optimizer, scaler, seed)
    other = torch.amp.GradScaler("cpu")
    other.load_state_dict(scaler.state_dict())
    assert other.get_scale() == scaler.get_scale() == 16.0
    fresh = GradScaler("cpu")
    fresh.load_state_dict(other.state_dict())
    assert fresh.inverse_scale == 1 / 16


def test_scale_is_not_read_amid_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU that would wait for everything that backward has enqueued so far."""
    model, optimizer, scaler = pair()
    reads: list[int] = []
    get_scale = GradScaler.get_scale
    with eager(optimizer, model, grad_scaler=scaler, cores=1):
        step(model, optimizer, scaler, 0)
        monkeypatch.setattr(GradScaler, "get_scale", lambda self: [reads.append(1), get_scale(self)][1])
        scaler.scale(loss_of(model, 1)).backward()
        scaler.step(optimizer)
        assert not reads
        scaler.update()
        assert reads


def test_loaded_scale_is_undone() -> None:
    model, optimizer, scaler = pair()
    twin_model = mlp()
    twin = adam(twin_model)
    with eager(optimizer, model, grad_scaler=scaler):
        step(model, optimizer, scaler, 0)
        scaler.load_state_dict(scaler.state_dict() | {"scale": 2.0})
        step(model, optimizer, scaler, 1)
    for seed in range(2):
        twin.zero_grad()
        loss_of(twin_model, seed).backward()
        twin.step()
    assert shown(optimizer) == shown(twin)
