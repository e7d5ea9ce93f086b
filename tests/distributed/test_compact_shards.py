"""State in fewer bits on any number of ranks: the bits of one process, and a checkpoint of it as well."""

from typing import Any

import pytest
import torch
from support import ranks
from support.shards import wrap
from support.visible import content
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.tensor import distribute_tensor

from superadam import SpeculativeCPUAdamW
from superadam.integrations.distributed_checkpoint import load, save

STORAGE = [("bf16", "fp32"), ("8bit", "24bit")]


def make(size: int, moments: str, master: str) -> tuple[Any, SpeculativeCPUAdamW]:
    """Return a model of weights that have whole blocks on every rank, and of others that begin at all positions.

    On several ranks it is sharded.
    """
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(64, 128), nn.Linear(128, 64, bias=False), nn.Linear(9, 5), nn.Linear(3, 9)
    ).bfloat16()
    if size > 1:
        wrap([*model, model])
    return model, SpeculativeCPUAdamW(model.parameters(), lr=1e-2, moments=moments, master=master, max_grad_norm=1.0)


def gradient_of(parameter: Any, step: int, number: int) -> Tensor:
    whole = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(100 * step + number)).bfloat16()
    mesh = getattr(parameter, "device_mesh", None)
    return whole if mesh is None else distribute_tensor(whole, mesh, parameter.placements)


def train(model: nn.Module, optimizer: SpeculativeCPUAdamW, steps: range) -> None:
    for step in steps:
        for number, parameter in enumerate(model.parameters()):
            parameter.grad = gradient_of(parameter, step, number)
        optimizer.speculate()
        optimizer.step()


def work(rank: int, *, folder: str, seed: int, moments: str, master: str) -> dict[str, Any]:
    """Continue from a checkpoint, if there is one, and save."""
    model, optimizer = make(dist.get_world_size(), moments, master)
    if seed:
        load(folder, model, optimizer)
    train(model, optimizer, range(3 * seed, 3 * seed + 3))
    save(folder, model, optimizer)
    return content(model, optimizer)


@pytest.mark.slow
@pytest.mark.parametrize(("moments", "master"), STORAGE)
def test_has_the_bits_of_one_process_on_any_number_of_ranks(moments, master, tmp_path):
    """Two, four and one rank, one after the other; and without a checkpoint in between."""
    found = []
    for seed, size in enumerate([2, 4, 1]):
        arguments = {"folder": str(tmp_path), "seed": seed, "moments": moments, "master": master}
        results = ranks.run(work, size, **arguments)
        assert all(result == results[0] for result in results)
        found.append(results[0])
    model, optimizer = make(1, moments, master)
    for seed, saved in enumerate(found):
        train(model, optimizer, range(3 * seed, 3 * seed + 3))
        assert content(model, optimizer) == saved
