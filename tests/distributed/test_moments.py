"""Moments in bf16 of sharded parameters: with a scheduler, through checkpoints, and on other numbers of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support import ranks
from support.overlap import ThreadDevice
from support.ranks import on_ranks
from support.shards import assert_same, local, parts_of
from torch import nn
from torch.distributed.checkpoint import load as load_distributed
from torch.distributed.checkpoint import save as save_distributed
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.fsdp import fully_shard

from superadam import OffloadScheduler, SpeculativeCPUAdamW
from superadam.integrations.distributed_checkpoint import load, save
from superadam.testing import SimulatedDevice, round_by_thresholds

pytestmark = pytest.mark.slow

SHAPES = [(5, 9), (9, 3)]
"""Of layers whose shards begin at all kinds of positions."""


def sharded(shapes: list[tuple[int, int]], seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> nn.Sequential:
    torch.manual_seed(seed)
    model = nn.Sequential(*[nn.Linear(inner, outer, bias=False) for inner, outer in shapes]).to(dtype)
    for module in (*model, model):
        fully_shard(module)
    return model


def make(shapes: list[tuple[int, int]], seed: int = 0) -> tuple[nn.Sequential, SpeculativeCPUAdamW]:
    model = sharded(shapes, seed)
    return model, SpeculativeCPUAdamW(model.parameters(), lr=0.01, moments="bf16")


def train(model: nn.Sequential, optimizer: Any, steps: range) -> None:
    """Train with the same inputs on all ranks, whose mean gradient is that of each: their numbers are powers of two."""
    first: Any = model[0]
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        model(torch.randn(4, first.in_features, generator=generator).bfloat16()).float().square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def whole(model: nn.Sequential, optimizer: SpeculativeCPUAdamW) -> list[Any]:
    """Return all elements of parameters, masters and moments, as values that compare to the last bit."""
    tensors = [*model.parameters(), *(one for p in model.parameters() for one in optimizer.state[p].values())]
    found = [one.full_tensor() if hasattr(one, "full_tensor") else one for one in tensors]
    return [(str(one.dtype), one.detach().contiguous().reshape(-1).view(torch.uint8).tolist()) for one in found]


@pytest.mark.parametrize("where", ["host", "simulated", "kept"])
@on_ranks(2)
def test_training_with_a_scheduler(rank: int, where: str) -> None:
    models = [sharded([(7, 5), (5, 2000), (2000, 3)]) for _ in range(2)]
    plain, ours = (SpeculativeCPUAdamW(model.parameters(), lr=0.01, moments="bf16") for model in models)
    train(models[0], plain, range(8))
    device = ThreadDevice() if where == "host" else SimulatedDevice(1, 0.5)
    kept = 2 if where == "kept" else 0
    with OffloadScheduler(ours, models[1], device=device, num_threads=1, bucket_numel=8, gpu_buckets=kept) as scheduler:
        train(models[1], ours, range(8))
        assert scheduler.statistics.resident_buckets > 0 if kept else ours.statistics.accepted > 0
    assert all(local(ours.state[p]["exp_avg"]).dtype == torch.bfloat16 for p in models[1].parameters())
    assert_same(parts_of(models[1], ours), parts_of(models[0], plain))


@on_ranks(2)
def test_thresholds_are_those_of_positions_in_the_whole_parameter(rank: int) -> None:
    models = [sharded(SHAPES) for _ in range(2)]
    plain, ours = (
        SpeculativeCPUAdamW(model.parameters(), moments=moments)
        for model, moments in zip(models, ("fp32", "bf16"), strict=True)
    )
    for model, optimizer in zip(models, (plain, ours), strict=True):
        train(model, optimizer, range(1))
    for one, two in zip(models[0].parameters(), models[1].parameters(), strict=True):
        for key in ("exp_avg", "exp_avg_sq"):
            whole_one: Any = plain.state[one][key]
            unrounded, stored = local(whole_one), local(ours.state[two][key])
            first = rank * -(-whole_one.shape[0] // 2) * whole_one.shape[1]
            assert torch.equal(stored.float().flatten(), round_by_thresholds(unrounded.flatten(), 1, 16, first))


@on_ranks(2)
def test_torch_distributed_checkpoint(rank: int, tmp_path: Path) -> None:
    model, optimizer = make(SHAPES)
    train(model, optimizer, range(3))
    content = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}
    save_distributed(content, checkpoint_id=tmp_path)
    other, loaded = make(SHAPES, seed=1)
    template = {"model": other.state_dict(), "optimizer": get_optimizer_state_dict(other, loaded)}
    load_distributed(template, checkpoint_id=tmp_path)
    other.load_state_dict(template["model"])
    set_optimizer_state_dict(other, loaded, template["optimizer"])
    train(model, optimizer, range(3, 5))
    train(other, loaded, range(3, 5))
    assert whole(other, loaded) == whole(model, optimizer)


def from_start(rank: int, *, folder: str) -> list[Any]:
    """Save after three steps, and return what training for six makes."""
    model, optimizer = make(SHAPES)
    train(model, optimizer, range(3))
    save(folder, model, optimizer)
    train(model, optimizer, range(3, 6))
    return whole(model, optimizer)


def resumed(rank: int, *, folder: str) -> list[Any]:
    """Return what training for three more steps makes of what is loaded."""
    model, optimizer = make(SHAPES, seed=1)
    load(folder, model, optimizer)
    train(model, optimizer, range(3, 6))
    return whole(model, optimizer)


def test_other_numbers_of_ranks_go_on_with_the_same_bits(tmp_path: Path) -> None:
    never_stopped = ranks.run(from_start, 2, folder=str(tmp_path))[0]
    for size in (4, 1, 2):
        assert ranks.run(resumed, size, folder=str(tmp_path))[0] == never_stopped
