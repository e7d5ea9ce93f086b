"""A training script for torch's AdamW runs with another import and constructor, to the same bits, resumed or not."""

from __future__ import annotations

import math
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.visible import bits
from torch import nn

from superadam import SpeculativeCPUAdamW

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_torch_thread")]

STEPS = 100
OVERFLOW = 30
"""The step whose loss overflows, so that GradScaler skips it."""


def script(make_optimizer: Callable[..., torch.optim.Optimizer], path: Path, first: int, last: int) -> dict[str, Any]:
    """Train from step `first`, from the checkpoint at `path` unless that is 0, to step `last`; save there; report."""
    torch.manual_seed(0 if first == 0 else 1)  # what is not loaded must not matter
    model = nn.Sequential(
        nn.Embedding(64, 64), nn.Linear(64, 128), nn.GELU(), nn.LayerNorm(128), nn.Flatten(), nn.Linear(512, 64)
    )
    decayed = [p for p in model.parameters() if p.dim() == 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    optimizer = make_optimizer(
        [{"params": decayed}, {"params": others, "weight_decay": 0.0}],
        lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=True,
    )  # fmt: skip
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=3e-3, total_steps=STEPS + 1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=20)
    parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "scaler": scaler}
    if first:
        saved = torch.load(path, weights_only=True)
        for name, part in parts.items():
            part.load_state_dict(saved[name])

    losses = []
    for step in range(first, last):
        generator = torch.Generator().manual_seed(step)
        tokens = torch.randint(0, 64, (32, 4), generator=generator)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(tokens), tokens[:, 0] * 3 % 64)
        scaler.scale(loss * (math.inf if step == OVERFLOW else 1.0)).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
        losses.append(loss.item())

    torch.save({name: part.state_dict() for name, part in parts.items()}, path)
    seen = {name: bits(value) for name, value in model.state_dict().items()}
    for index, entry in optimizer.state_dict()["state"].items():
        seen |= {f"{key} of {index}": bits(value) for key, value in entry.items()}
    last_rates = [(group["lr"], group["betas"]) for group in optimizer.param_groups]
    return {"losses": losses, "bits": seen, "rates": last_rates, "scale": scaler.get_scale()}


@pytest.fixture(scope="module")
def torch_run(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return script(torch.optim.AdamW, tmp_path_factory.mktemp("torch") / "checkpoint", 0, STEPS)


def resumed(before: Any, after: Any, path: Path) -> dict[str, Any]:
    """Stop half-way with one optimizer, and go on with the other in new objects."""
    losses = script(before, path, 0, STEPS // 2)["losses"]
    report = script(after, path, STEPS // 2, STEPS)
    return {**report, "losses": losses + report["losses"]}


def test_resuming_in_the_middle_changes_nothing(tmp_path: Path) -> None:
    whole = script(SpeculativeCPUAdamW, tmp_path / "checkpoint", 0, STEPS)
    assert resumed(SpeculativeCPUAdamW, SpeculativeCPUAdamW, tmp_path / "checkpoint") == whole
    assert sum(whole["losses"][-10:]) < 0.8 * sum(whole["losses"][:10])  # it learns
    assert whole["scale"] == 2.0**15  # grown four times, backed off once


if platform.machine() == "x86_64":  # elsewhere torch's fused kernel rounds differently from itself here

    def test_script_has_the_bits_of_torch(torch_run: dict[str, Any], tmp_path: Path) -> None:
        assert script(SpeculativeCPUAdamW, tmp_path / "checkpoint", 0, STEPS) == torch_run

    @pytest.mark.parametrize("ours_first", [False, True], ids=["torch, then ours", "ours, then torch"])
    def test_half_a_run_each(torch_run: dict[str, Any], tmp_path: Path, ours_first: bool) -> None:
        order = [SpeculativeCPUAdamW, torch.optim.AdamW][:: 1 if ours_first else -1]
        assert resumed(*order, tmp_path / "checkpoint") == torch_run
