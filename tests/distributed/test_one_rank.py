"""FSDP2 on one rank, on every device there is: steps with a scheduler have the bits of steps without one."""

import math
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from support.shards import ROUNDED, assert_same, local, parts_of, wrap
from torch import Tensor, distributed, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Shard

from superadam import OffloadScheduler, SpeculativeCPUAdamW, StepKind
from superadam.distributed import shards
from superadam.handles.gradient_handle import taken_of
from superadam.integrations.reduced_gradients import take_reduced_gradients
from superadam.kernels import torch_private

pytestmark = pytest.mark.slow

DEVICES = {"cpu": "gloo", **({"cuda": "nccl"} if torch.cuda.is_available() else {})}
STEPS = 9


@pytest.fixture(params=DEVICES)
def device(request, tmp_path):
    """Return each device in turn, within a process group of this process alone."""
    name = request.param
    store = distributed.FileStore(str(tmp_path / "store"), 1)
    distributed.init_process_group(DEVICES[name], store=store, rank=0, world_size=1)
    yield name
    distributed.destroy_process_group()


def sharded(device: str, dtype: torch.dtype, *, offloads: bool = False, **policy: torch.dtype) -> Any:
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 32), nn.Linear(32, 8)).to(torch.bfloat16).to(dtype)
    options: dict[str, Any] = {"offload_policy": CPUOffloadPolicy(pin_memory=device == "cuda")} if offloads else {}
    mixed = MixedPrecisionPolicy(**{**ROUNDED, **policy})
    wrap([*model, model], mesh=init_device_mesh(device, (1,)), mp_policy=mixed, **options)
    return model


def backward(model: Any, device: str, seed: int, dtype: torch.dtype = torch.bfloat16) -> None:
    inputs = torch.randn(4, 16, generator=torch.Generator().manual_seed(seed)).to(device, dtype)
    (model(inputs) - 1).float().square().sum().backward()


def trained(
    device: str, dtype: torch.dtype, *, overlaps: bool, offloads: bool = False, is_reduced: bool = False
) -> list[Tensor]:
    """Return all values after steps that were committed, clipped and skipped."""
    model = sharded(device, dtype, offloads=offloads)
    optimizer = SpeculativeCPUAdamW(model.parameters(), lr=1e-2)
    if is_reduced:
        take_reduced_gradients(optimizer, model)
    scheduler = OffloadScheduler(optimizer, model, num_threads=1, bucket_numel=300) if overlaps else None
    kinds = set()
    for step in range(STEPS):
        backward(model, device, step)
        if step == 5:
            local(next(model.parameters()).grad).view(-1)[3] = math.nan
        optimizer.max_grad_norm = 0.5 if step % 3 == 1 else None
        if is_reduced and step % 3 == 2:
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        kinds.add(optimizer.last_outcome.kind)
    assert kinds == set(StepKind)
    if scheduler is not None:
        assert scheduler.statistics.buckets > STEPS
        scheduler.close()
    return parts_of(model, optimizer)


@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        *((dtype, {"offloads": offloads}) for dtype in (torch.float32, torch.bfloat16) for offloads in (False, True)),
        (torch.bfloat16, {"is_reduced": True}),
    ],
    ids=str,
)
def test_overlap_changes_no_bit(device, dtype, options):
    assert_same(*(trained(device, dtype, overlaps=overlaps, **options) for overlaps in (False, True)))


@pytest.mark.covering(1)
@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize(("dtype", "reduced"), [(torch.bfloat16, torch.float32), (torch.float16, torch.float64)])
def test_reduced_gradients_are_those_of_fp32_shards(device, dtype, reduced, overlaps):
    model, twin = (sharded(device, shard, param_dtype=dtype, reduce_dtype=reduced) for shard in (dtype, torch.float32))
    optimizer = SpeculativeCPUAdamW(model.parameters(), lr=0.0, weight_decay=0.0)
    take_reduced_gradients(optimizer, model)
    with OffloadScheduler(optimizer, model, num_threads=1, bucket_numel=300) if overlaps else nullcontext():
        for step in range(4):
            for micro in range(1 + step % 2):
                for one in (model, twin):
                    backward(one, device, 10 * step + micro, dtype)
            for parameter, other in zip(model.parameters(), twin.parameters(), strict=True):
                taken = taken_of(parameter.grad)
                assert torch.equal(taken.exact(), local(other.grad))
                assert torch.equal(local(parameter.grad) + 0, taken.exact().to(dtype))
            optimizer.step()
            optimizer.zero_grad()
            twin.zero_grad()


def test_result_of_a_collective_that_is_under_way_is_waited_for(device):
    like = DTensor.from_local(torch.zeros(4, device=device), init_device_mesh(device, (1,)), [Shard(0)])
    part = shards.part_of(torch_private.dtensor_like(like, AsyncCollectiveTensor(torch.ones(4, device=device))), like)
    assert type(part) is Tensor
    assert part.tolist() == [1.0] * 4


def test_state_that_was_cleared_is_shown_as_it_is_made_again(device):
    model = sharded(device, torch.bfloat16)
    optimizer = SpeculativeCPUAdamW(model.parameters(), lr=1e-2)
    for seed in range(3):
        before = {p: entry["exp_avg"] for p, entry in optimizer.state.items()}
        optimizer.state.clear()
        backward(model, device, seed)
        optimizer.step()
        optimizer.zero_grad()
    for p, entry in optimizer.state.items():
        assert entry["step"] == 1
        assert entry["exp_avg"] is not before[p]


@pytest.mark.parametrize("wraps_layers", [False, True])
def test_a_model_that_is_one_group_is_told_that_nothing_overlaps(device, wraps_layers, caplog):
    model = nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 8))
    wrap([*(model if wraps_layers else ()), model], mesh=init_device_mesh(device, (1,)))
    optimizer = SpeculativeCPUAdamW(model.parameters())
    for bucket_numel in ("auto", 300):  # in one bucket there is nothing to overlap
        assert "one FSDP2 group" not in caplog.text
        OffloadScheduler(optimizer, model, bucket_numel=bucket_numel).close()
    assert ("the model is one FSDP2 group, whose gradients come after backward" in caplog.text) is not wraps_layers
