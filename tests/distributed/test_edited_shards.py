"""Gradients of FSDP2's shards that are held, edited and exchanged: the bits of the run without a scheduler."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.deep import TIMES
from support.edited_gradients import ACTIONS, Run, assert_unnoticed, seen_of
from support.shards import wrap
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

NONE = -1  # of the layers is left out of a loss

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("one_rank", "one_torch_thread"),
    pytest.mark.filterwarnings("ignore"),
]

REFUSED_BY_TORCH = {"grad = pickled", "hold a deep copy"}  # of DTensors that FSDP2 has cut
OF_SHARDS: dict[str, Any] = {
    "shard: multiply": lambda run, p, g: g.to_local().mul_(0.3),
    "shard: add": lambda run, p, g: g.to_local().add_(1),
    "shard: multiply its data": lambda run, p, g: g.to_local().data.mul_(0.5),
    "shard: hold": lambda run, p, g: run.held.append(g.to_local()),
    "shard: look": lambda run, p, g: run.seen.append(seen_of(g.to_local())),
    "whole": lambda run, p, g: run.seen.append(seen_of(g.full_tensor())),
    "redistribute": lambda run, p, g: setattr(p, "grad", g.redistribute(placements=g.placements)),
    "any: multiply all shards": lambda run, p, g: torch._foreach_mul_([one.to_local() for one in run.gradients()], 0.5),
}


class Layers(nn.Module):
    def __init__(self, weights: list[Tensor]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 8, bias=False, dtype=weight.dtype) for weight in weights)
        for layer, weight in zip(self.layers, weights, strict=True):
            layer.weight.data = weight  # type: ignore[assignment]

    def forward(self, inputs: Tensor, left_out: int) -> list[Tensor]:
        return [layer(inputs) for number, layer in enumerate(self.layers) if number != left_out]


class Sharded(Run):
    """A program over three layers, each a group of FSDP2, or all one group."""

    def __init__(self, seed: int, setting: str) -> None:
        super().__init__(seed, setting)
        self.actions = {name: act for name, act in {**ACTIONS, **OF_SHARDS}.items() if name not in REFUSED_BY_TORCH}

    def model_of(self, dtype: torch.dtype) -> nn.Module:
        model = Layers([self.values(8, 64).to(dtype) for _ in range(3)])
        wrap([*self.draw.choice([[], model.layers]), model], mesh=init_device_mesh("cpu", (1,)))
        return model

    def like(self, parameter: Any) -> Any:
        return distribute_tensor(super().like(parameter), parameter.device_mesh, [Shard(0)])

    def losses(self, left_out: int) -> list[Tensor]:
        inputs = self.values(4, 64).to(self.parameters[0].dtype)
        return [(output * self.values(4, 8)).sum() for output in self.model(inputs, left_out)]


def test_programs_see_and_end_in_what_the_run_without_a_scheduler_does() -> None:
    for seed in range(60 * TIMES):
        assert_unnoticed(Sharded, seed)


def _held_after_two_backwards(run: Run) -> None:
    run.backward(NONE)
    run.backward(NONE)
    run.held.append(run.parameters[2].grad.to_local())  # type: ignore[union-attr]
    run.optimizer.step()
    run.backward(NONE)


def _of_two_parameters(run: Run) -> None:
    run.backward(NONE)
    run.parameters[0].grad = run.parameters[1].grad.detach()  # type: ignore[union-attr]
    run.backward(NONE)
    run.parameters[1].grad.to_local().data.mul_(0.5)  # type: ignore[union-attr]
    run.optimizer.step()


@pytest.mark.parametrize("program", [_held_after_two_backwards, _of_two_parameters])
def test_memory_that_is_referenced_elsewhere_stays_that_of_the_gradient(program: Callable[[Run], None]) -> None:
    for seed in range(8):
        seen = []
        for setting in ("plain", "speculate()", "host"):
            run = Sharded(seed, setting)
            with run.overlap():
                program(run)
            seen.append([*map(seen_of, [*run.parameters, *run.held, *run.gradients()])])
        assert seen[0] == seen[1] == seen[2], seed
