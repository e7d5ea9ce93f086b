"""A schedule of torch.distributed.pipelining: two stages on two ranks have the bits of one process."""

import copy
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from support.overlap import ThreadDevice
from support.ranks import on_ranks
from support.visible import bits
from torch import Tensor, distributed, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from superadam import OffloadScheduler, SpeculativeCPUAdamW, StepKind

MICRO_BATCHES = 4
SCHEDULES: dict[str, Any] = {"GPipe": ScheduleGPipe, "1F1B": Schedule1F1B}


def batches() -> list[tuple[Tensor, Tensor]]:
    """Return one batch for each step; two have large gradients, and the last one an Inf."""
    generator = torch.Generator().manual_seed(3)
    found = [(torch.randn(8, 6, generator=generator), torch.randn(8, 6, generator=generator)) for _ in range(8)]
    found = [(one.bfloat16(), other.bfloat16()) for one, other in found]
    found[7][1][0, 0] = torch.inf
    for _, target in found[5:7]:
        target.mul_(200.0)
    return found


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def optimizer_of(named: Any, group: Any = None) -> SpeculativeCPUAdamW:
    return SpeculativeCPUAdamW(named, lr=0.01, max_grad_norm=20.0, process_group=group)


def step(optimizer: SpeculativeCPUAdamW) -> Any:
    optimizer.step()
    optimizer.zero_grad()
    return optimizer.last_outcome


@pytest.mark.covering(1)
@pytest.mark.parametrize(("overlaps", "scales"), [(False, True), (True, True), (True, False)])
@pytest.mark.parametrize("kind", SCHEDULES)
@on_ranks(2)
def test_stages_have_the_bits_of_one_process(rank, kind, overlaps, scales):
    torch.manual_seed(0)
    whole = nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)) for _ in range(2))).bfloat16()
    mine = copy.deepcopy(whole[rank])
    alone = optimizer_of(whole.named_parameters())
    ours = optimizer_of(((f"{rank}.{name}", one) for name, one in mine.named_parameters()), distributed.group.WORLD)
    stage = PipelineStage(mine, rank, 2, torch.device("cpu"))
    schedule = SCHEDULES[kind](stage, MICRO_BATCHES, loss_fn=loss_of, scale_grads=scales)
    made = OffloadScheduler(ours, mine, device=ThreadDevice(), bucket_numel=16, num_threads=1) if overlaps else None
    kinds = set()
    with made or nullcontext():
        for inputs, targets in batches():
            if rank == 0:
                schedule.step(inputs)
            else:
                schedule.step(target=targets)
            for one, target in zip(inputs.chunk(MICRO_BATCHES), targets.chunk(MICRO_BATCHES), strict=True):
                loss_of(whole(one), target).backward()
            for parameter in whole.parameters():
                parameter.grad.div_(MICRO_BATCHES if scales else 1)
            seen, expected = step(ours), step(alone)
            assert (seen.kind, seen.clip_coefficient) == (expected.kind, expected.clip_coefficient)
            assert seen.grad_norm == pytest.approx(expected.grad_norm, rel=1e-14, nan_ok=True)  # in another order
            kinds.add(seen.kind)
            for parameter, its in zip(mine.parameters(), whole[rank].parameters(), strict=True):
                assert bits(parameter) == bits(its)
                for key in ("master", "exp_avg", "exp_avg_sq"):
                    assert bits(ours.state[parameter][key]) == bits(alone.state[its][key])
    assert kinds == set(StepKind)
    assert scales or ours.statistics.accepted > 0, ours.statistics
