"""Optimizers and schedulers that share parameters: each makes the steps that it makes alone."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import pytest
import torch
from support.overlap import ImmediateDevice, adam, eager, loss_of, mlp
from support.visible import shown, state_bits

from superadam import SpeculativeCPUAdam
from superadam.devices import Device
from superadam.testing import SimulatedDevice


def trained(dtype: torch.dtype, devices: list[Device], *, is_alternating: bool) -> tuple[list[Any], int]:
    """Return what is visible after steps of two optimizers, and how many buckets were taken."""
    model = mlp(dtype)
    optimizers = [adam(model), SpeculativeCPUAdam(list(model.parameters())[2:], lr=0.02, max_grad_norm=5.0)]
    own = ["master"] if dtype == torch.float32 else []  # which has masters on the simulated device only
    seen: list[Any] = []
    with ExitStack() as stack:
        schedulers = [
            stack.enter_context(eager(optimizer, model, device=device))
            for optimizer, device in zip(optimizers, devices, strict=False)
        ]
        for seed in range(12):
            loss_of(model, seed).backward()
            for optimizer in optimizers[seed % 2 :][:1] if is_alternating else optimizers:
                optimizer.step()
            model.zero_grad()
            seen.append([state_bits(one, without=own) for one in optimizers] if seed % 4 == 3 else shown(optimizers[0]))
    return seen, sum(scheduler.statistics.buckets for scheduler in schedulers)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("is_alternating", [False, True])
@pytest.mark.parametrize("device", [ImmediateDevice, lambda: SimulatedDevice(3)], ids=["host", "simulated"])
def test_two_optimizers_with_schedulers_over_the_same_parameters(dtype, is_alternating, device):
    plain, _ = trained(dtype, [], is_alternating=is_alternating)
    overlapped, taken = trained(dtype, [device(), device()], is_alternating=is_alternating)
    assert overlapped == plain
    assert taken > 0
