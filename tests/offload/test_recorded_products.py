"""Loops that clip with torch, unscale as GradScaler does, or both: overlap changes no bit, and torch has the same bits.

Torch has no optimizer for bf16 with fp32 masters, so its loop is the usual one: the gradient as torch's functions left
it is widened, and torch's fused AdamW steps the masters.
"""

from __future__ import annotations

import math
import platform
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.optimizers import TorchWithMasters
from support.overlap import DeferredDevice, ImmediateDevice, ThreadDevice, batch
from support.visible import Bits, bits
from torch import Tensor, nn

from superadam import OffloadScheduler, SpeculativeCPUAdamW
from superadam.devices import Device
from superadam.testing import SimulatedDevice

pytestmark = pytest.mark.timeout(240)

OPTIONS: dict[str, Any] = {"lr": 0.01, "weight_decay": 0.1}
DEVICES: dict[str, Callable[[int], Device]] = {
    "immediate": lambda seed: ImmediateDevice(),
    "thread": lambda seed: ThreadDevice(),
    "deferred": lambda seed: DeferredDevice(),
    "simulated": SimulatedDevice,
}


class Net(nn.Module):
    """Every parameter has a multiple of 64 elements, as torch rounds the last ones of others differently."""

    def __init__(self, dtype: torch.dtype, *, is_mixed: bool) -> None:
        super().__init__()
        torch.default_generator.manual_seed(7)
        self.layers = nn.ModuleList([nn.Linear(16, 64), nn.Linear(64, 64), nn.Linear(64, 64)])
        self.to(dtype)
        if is_mixed:  # torch's clip coefficient is then no number of bf16
            self.layers[1].float()

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x.to(layer.weight.dtype)).tanh()
        return x.float()


@dataclass(frozen=True)
class Step:
    """One step.

    Attributes:
        limit: of torch's `clip_grad_norm_`; None where it is not called.
        foreach: its argument.
        is_unscaled: whether the loss is scaled, and unscaled before clipping.
        is_bad: whether the loss overflows.
        micro_batches: whose gradients add up.
    """

    limit: float | None
    foreach: bool | None
    is_unscaled: bool
    is_bad: bool
    micro_batches: int


STEPS = st.lists(
    st.builds(
        Step,
        limit=st.sampled_from([None, 1e-3, 0.05, 1e6]),
        foreach=st.sampled_from([None, False, True]),
        is_unscaled=st.booleans(),
        is_bad=st.sampled_from([False] * 5 + [True]),
        micro_batches=st.sampled_from([1, 1, 1, 2]),
    ),
    min_size=2,
    max_size=6,
)


def train(model: Net, optimizer: Any, steps: list[Step], init_scale: float) -> list[list[Bits]]:
    """Make these steps; return the parameters after each."""
    scaler = torch.amp.GradScaler("cpu", init_scale=init_scale, growth_factor=1.5, growth_interval=2)
    seen = []
    for number, step in enumerate(steps):
        optimizer.zero_grad()
        for micro in range(step.micro_batches):
            loss = (model(batch(10 * number + micro, torch.float32, width=16)) - 1).square().mean()
            loss = loss * (math.inf if step.is_bad and step.is_unscaled else 1.0)
            (scaler.scale(loss) if step.is_unscaled else loss).backward()
        if step.is_unscaled:
            scaler.unscale_(optimizer)
        if step.limit is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), step.limit, foreach=step.foreach)
        if step.is_unscaled:
            scaler.step(optimizer)
            scaler.update()
        else:
            optimizer.step()
        seen.append([bits(one) for one in model.parameters()])
    return seen


def ended(model: Net, optimizer: SpeculativeCPUAdamW) -> list[tuple[Bits, ...]]:
    """Return master and moments of each parameter; one that is its own master has the same bits in it."""
    state = [(optimizer.state[one], one) for one in model.parameters() if optimizer.state.get(one)]
    return [tuple(bits(e.get(key, one)) for key in ("master", "exp_avg", "exp_avg_sq")) for e, one in state]


@pytest.mark.slow
@given(
    steps=STEPS,
    is_mixed=st.booleans(),
    dtype=st.sampled_from([torch.bfloat16] * 3 + [torch.float32]),
    init_scale=st.sampled_from([2.0**10, 1000.0]),
    limit=st.sampled_from([None, None, 0.04]),
    device=st.sampled_from(sorted(DEVICES)),
    seed=st.integers(0, 2**16),
    bucket_numel=st.sampled_from([1, 3000, 10**6]),
    gpu_buckets=st.sampled_from([0, 1, 10**6]),
)
def test_overlap_changes_no_bit_of_a_loop_that_clips_or_unscales(
    steps: list[Step],
    is_mixed: bool,
    dtype: torch.dtype,
    init_scale: float,
    limit: float | None,
    device: str,
    seed: int,
    bucket_numel: int,
    gpu_buckets: int,
) -> None:
    plain, model, theirs = (Net(dtype, is_mixed=is_mixed) for _ in range(3))
    by_hand, ours = (SpeculativeCPUAdamW(one.parameters(), max_grad_norm=limit, **OPTIONS) for one in (plain, model))
    expected = train(plain, by_hand, steps, init_scale)
    options: dict[str, Any] = {"gpu_buckets": gpu_buckets} if device == "simulated" else {}
    with OffloadScheduler(ours, model, device=DEVICES[device](seed), bucket_numel=bucket_numel, **options):
        assert train(model, ours, steps, init_scale) == expected
    assert ended(model, ours) == ended(plain, by_hand)
    if limit is None and platform.machine() == "x86_64":  # elsewhere torch's fused kernel rounds differently
        torchs = TorchWithMasters(list(theirs.parameters()), **OPTIONS)
        assert train(theirs, torchs, steps, init_scale) == expected
        pairs = [(torchs.adam.state[one], one) for one in torchs.masters if torchs.adam.state[one]]
        assert [(bits(one), bits(e["exp_avg"]), bits(e["exp_avg_sq"])) for e, one in pairs] == ended(plain, by_hand)
