"""Training under `fully_shard` with a scheduler has the bits of training without one, on every rank."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from support.late_gradients import LateGradients, beside
from support.overlap import ImmediateDevice, ThreadDevice
from support.ranks import on_ranks
from support.shards import ROUNDED, SHAPES, assert_same, local, parts_of, ways_to_shard, wrap
from torch import Tensor, distributed, nn
from torch.distributed import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils.checkpoint import checkpoint

from superadam import OffloadScheduler, SpeculativeCPUAdamW, StepKind
from superadam.devices import Device
from superadam.handles.gradient_handle import GradientHandle, taken_of
from superadam.testing import SimulatedDevice

pytestmark = pytest.mark.slow

STEPS = 14
LIMIT = 0.5


DEVICES: dict[str, Callable[[], tuple[Device, int]]] = {
    "host": lambda: (ThreadDevice(), 0),
    "simulated": lambda: (SimulatedDevice(1, 0.5), 0),
    "kept": lambda: (SimulatedDevice(2, 0.5), 2),
}


def sharded(dtype: torch.dtype, seed: int = 0, shapes: Sequence[tuple[int, int]] = SHAPES, **options: Any) -> nn.Module:
    torch.manual_seed(seed)
    model = nn.Sequential(*[nn.Linear(inner, outer) for inner, outer in shapes]).to(dtype)
    wrap([*model, model], mp_policy=MixedPrecisionPolicy(**ROUNDED), **options)
    return model


def loss_of(model: Any, rank: int, step: int, micro: int, *, recomputes: bool = False) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * rank + 10 * step + micro)
    values = torch.randn(3, SHAPES[0][0], generator=generator).to(torch.bfloat16)
    if recomputes:
        values.requires_grad_()
        for layer in model:
            values = checkpoint(layer, values, use_reentrant=step % 2 == 0)
    else:
        values = model(values)
    return (values - 1).float().square().sum()


def train(model: Any, optimizer: SpeculativeCPUAdamW, rank: int, micro_batches: int, *, syncs: bool) -> list[StepKind]:
    kinds = []
    for step in range(STEPS):
        for micro in range(micro_batches):
            if not syncs:
                model.set_requires_gradient_sync(micro == micro_batches - 1)
            loss_of(model, rank, step, micro).backward()
        if step % 5 == 4:
            nn.utils.clip_grad_norm_(model.parameters(), LIMIT)
        gradient = next(model.parameters()).grad
        if step == 6 and rank == 1:
            local(gradient).view(-1)[0] = math.nan
        optimizer.max_grad_norm = LIMIT if step % 3 == 1 else None
        optimizer.step()
        optimizer.zero_grad()
        assert optimizer.last_outcome is not None
        kinds.append(optimizer.last_outcome.kind)
    return kinds


@pytest.mark.covering(1)
@pytest.mark.parametrize(("micro_batches", "syncs"), [(1, True), (2, True), (3, False)])
@pytest.mark.parametrize("where", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@on_ranks(2)
def test_training(rank: int, dtype: torch.dtype, where: str, micro_batches: int, syncs: bool) -> None:
    models = [sharded(dtype) for _ in range(2)]
    plain, ours = (SpeculativeCPUAdamW(model.parameters(), lr=1e-2) for model in models)
    kinds = train(models[0], plain, rank, micro_batches, syncs=syncs)
    assert set(kinds) == set(StepKind)
    device, kept = DEVICES[where]()
    with OffloadScheduler(ours, models[1], device=device, num_threads=1, bucket_numel=8, gpu_buckets=kept) as scheduler:
        assert train(models[1], ours, rank, micro_batches, syncs=syncs) == kinds
        assert scheduler.statistics.buckets > STEPS
        assert (scheduler.statistics.resident_buckets > 0) is (kept > 0)
        if micro_batches == 1 and (where == "simulated" or (dtype == torch.bfloat16 and not kept)):
            assert scheduler.optimizer.statistics.accepted > 0
    assert_same(parts_of(models[1], ours), parts_of(models[0], plain))


@on_ranks(2)
def test_large_parts_are_cut(rank: int) -> None:
    shapes = [SHAPES[0], (5, 2000), (2000, 3)]
    models = [sharded(torch.bfloat16, shapes=shapes) for _ in range(3)]
    plain, *others = (SpeculativeCPUAdamW(model.parameters(), lr=1e-2) for model in models)
    kinds = train(models[0], plain, rank, 1, syncs=True)
    for ours, model, where in zip(others, models[1:], ("simulated", "kept"), strict=True):
        device, kept = DEVICES[where]()
        with OffloadScheduler(ours, model, device=device, num_threads=1, bucket_numel=8, gpu_buckets=kept) as scheduler:
            assert scheduler._transaction is not None
            assert sum(len(state.pieces) == 2 for state in scheduler._transaction.table.states) > 0
            assert train(model, ours, rank, 1, syncs=True) == kinds
            assert scheduler.optimizer.statistics.accepted > 0
        assert_same(parts_of(model, ours), parts_of(models[0], plain))


@on_ranks(2)
def test_groups_are_taken_once_the_next_one_is_ready(rank: int) -> None:
    model = sharded(torch.float32)
    optimizer = SpeculativeCPUAdamW(model.parameters(), lr=1e-2)
    with OffloadScheduler(optimizer, model, device=ThreadDevice(), num_threads=1, bucket_numel=8):
        loss_of(model, rank, 0, 0).backward()
        taken = [isinstance(local(parameter.grad), GradientHandle) for parameter in model.parameters()]
        assert taken == [False, False, True, True, True, True, True, True]
        optimizer.step()


@pytest.mark.parametrize("mesh", ["shard", "replicate", "columns", "ignored", "host"])
@on_ranks(2)
def test_ways_to_shard(rank: int, mesh: str) -> None:
    """HSDP with replicas, `Shard(1)`, parameters that are left alone, and weights on the host."""
    options = ways_to_shard(mesh)
    found = []
    for overlaps in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(3)])
        ignored = {model[1].bias} if mesh == "ignored" else None
        wrap([*model, model], ignored_params=ignored, **options)
        optimizer = SpeculativeCPUAdamW(model.parameters(), lr=1e-2, max_grad_norm=LIMIT)
        scheduler = OffloadScheduler(optimizer, model, device=ThreadDevice(), num_threads=1, bucket_numel=30)
        with scheduler if overlaps else nullcontext():
            if not overlaps:
                scheduler.close()
            for step in range(6):
                generator = torch.Generator().manual_seed(10 * step + rank)
                (model(torch.randn(3, 8, generator=generator)) - 1).square().sum().backward()
                if ignored:
                    distributed.all_reduce(model[1].bias.grad)
                if step == 3 and rank == 1:
                    local(model[2].weight.grad).view(-1)[3] = math.inf
                optimizer.step()
                optimizer.zero_grad()
        assert optimizer.statistics.skipped == 1
        assert not overlaps or scheduler.statistics.buckets > 6
        found.append(parts_of(model, optimizer))
    assert_same(*found)


def on_two_streams(rank: int, where: str | None, layers: int, micro_batches: int) -> list[Tensor]:
    """Train layers with replicas beside layers without, whose gradients come late, each from its group's own stream."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(8, 8, bias=False) for _ in range(layers)]).to(torch.bfloat16)
    meshes = [ways_to_shard("replicate")["mesh"], init_device_mesh("cpu", (2,))]
    for position, layer in enumerate(model):
        wrap([layer], mesh=meshes[position % 2])
    wrap([model], mesh=meshes[1])
    streams = SimulatedDevice(rank, 0.1)
    group_of = {parameter: number for number, layer in enumerate(model) for parameter in layer.parameters()}
    late = LateGradients(
        streams,
        model.parameters() if where else (),
        lambda parameter: 1 + group_of[parameter] % 2 + 2 * micro,
        lambda parameter: where == "host",
    )
    optimizer = SpeculativeCPUAdamW(model.parameters(), lr=1e-2, max_grad_norm=LIMIT)
    device: Device = beside(ImmediateDevice(), streams) if where == "host" else streams
    with OffloadScheduler(optimizer, model, device=device, num_threads=1, bucket_numel=8, gpu_buckets=0) as scheduler:
        for step in range(6):
            for micro in range(micro_batches):
                inputs = torch.randn(3, 8, generator=torch.Generator().manual_seed(10 * step + 2 * micro + rank))
                (model(inputs.to(torch.bfloat16)) - 1).float().square().sum().backward()
                if where == "device" or micro < micro_batches - 1:
                    late.settle()
            optimizer.step()
            optimizer.zero_grad()
            late.settle()
        assert scheduler.statistics.buckets >= 6
    return parts_of(model, optimizer)


@pytest.mark.parametrize(("layers", "micro_batches"), [(4, 1), (4, 2), (1, 2)])
@pytest.mark.parametrize("where", ["device", "host"])
@on_ranks(2)
def test_gradients_are_waited_for_on_the_stream_of_their_own_group(
    rank: int, where: str, layers: int, micro_batches: int
) -> None:
    """Although they are taken in hooks of the next group, or of the next micro-batch."""
    assert_same(*(on_two_streams(rank, one, layers, micro_batches) for one in (where, None)))


PROGRAMS = ["accumulate", "scaler", "place", "edit", "checkpoint", "frozen"]


def run_program(rank: int, program: str, *, overlaps: bool) -> list[Tensor]:
    """Return all values after some steps of a program that does more than backward and step."""
    model = sharded(torch.bfloat16)
    optimizer = SpeculativeCPUAdamW(model.parameters(), lr=1e-2, max_grad_norm=LIMIT)
    device = SimulatedDevice(3, 0.5)
    scheduler = OffloadScheduler(optimizer, model, device=device, num_threads=1, bucket_numel=20) if overlaps else None
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, enabled=program == "scaler")
    model[1].weight.requires_grad_(program != "frozen")
    for step in range(8):
        if step == 4:
            model[1].weight.requires_grad_()
        for micro in range(3 if program == "accumulate" else 1):
            announced = program == "accumulate" and scheduler is not None and micro < 2
            with scheduler.accumulate() if announced and scheduler is not None else nullcontext():
                loss = loss_of(model, rank, step, micro, recomputes=program == "checkpoint")
                scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        if program == "edit" and step % 2:
            for parameter in model.parameters():
                assert parameter.grad is not None
                if parameter.dim() > 1:
                    local(parameter.grad).mul_(0.5)
                else:
                    parameter.grad.add_(1.0)
        if program == "place" and scheduler is not None:
            scheduler.place(gpu_buckets=step % 3, bucket_numel=10 + 10 * (step % 2))
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    if scheduler is not None:
        assert scheduler.statistics.buckets > 8
        assert (scheduler.statistics.given_back_gradients > 0) is (program == "edit")
        scheduler.close()
    return parts_of(model, optimizer)


@pytest.mark.parametrize("program", PROGRAMS)
@on_ranks(2)
def test_programs(rank: int, program: str) -> None:
    assert_same(*(run_program(rank, program, overlaps=overlaps) for overlaps in (False, True)))


@pytest.mark.parametrize("micro_batches", [1, 2])
@on_ranks(2)
def test_sums_of_micro_batches_stay_in_fp32(rank: int, micro_batches: int) -> None:
    twin = sharded(torch.bfloat16)
    sums = [torch.zeros_like(local(parameter), dtype=torch.float32) for parameter in twin.parameters()]
    for micro in range(micro_batches):
        loss_of(twin, rank, 0, micro).backward()  # type: ignore[no-untyped-call]
        for total, parameter in zip(sums, twin.parameters(), strict=True):
            assert parameter.grad is not None
            total += local(parameter.grad)
        twin.zero_grad()
    model = sharded(torch.bfloat16)
    optimizer = SpeculativeCPUAdamW(model.parameters(), lr=1e-2)
    with OffloadScheduler(optimizer, model, device=ThreadDevice(), num_threads=1, bucket_numel=8) as scheduler:
        with scheduler.accumulate(torch.float32):
            for micro in range(micro_batches):
                loss_of(model, rank, 0, micro).backward()  # type: ignore[no-untyped-call]
        for total, parameter in zip(sums, model.parameters(), strict=True):
            taken = taken_of(parameter.grad)
            assert taken is not None
            assert torch.equal(taken.pending, total)
        loss_of(model, rank, 0, 2).backward()  # type: ignore[no-untyped-call]
        optimizer.step()


@on_ranks(2)
def test_gradients_that_something_else_references_are_left_alone(rank: int) -> None:
    model = sharded(torch.float32)
    optimizer = SpeculativeCPUAdamW(model.parameters(), lr=1e-2)
    buffers: list[Tensor] = []
    with OffloadScheduler(optimizer, model, device=ThreadDevice(), num_threads=1, bucket_numel=8):
        model[2].weight.register_post_accumulate_grad_hook(lambda p: buffers.append(local(p.grad).view(-1)))
        loss_of(model, rank, 0, 0).backward()
        taken = [isinstance(local(parameter.grad), GradientHandle) for parameter in model.parameters()]
        assert taken == [False, False, True, True, False, False, True, True]
        optimizer.step()


@on_ranks(2)
def test_what_a_hook_raises_is_told_by_step_on_every_rank(rank: int) -> None:
    model = sharded(torch.float32)
    optimizer = SpeculativeCPUAdamW(model.parameters(), lr=1e-2)
    with OffloadScheduler(optimizer, model, device=ThreadDevice(), num_threads=1, bucket_numel=8) as scheduler:
        loss_of(model, rank, 0, 0).backward()
        optimizer.step()
        optimizer.zero_grad()
        before = parts_of(model, optimizer)
        with pytest.MonkeyPatch.context() as patch:
            if rank == 0:
                patch.setattr(scheduler._transfers, "download", planted)
            loss_of(model, rank, 1, 0).backward()
            with pytest.raises(RuntimeError, match="planted" if rank == 0 else r"step\(\) failed on ranks \[0\]"):
                optimizer.step()
        assert_same(parts_of(model, optimizer), before)
        optimizer.step()
        assert optimizer.statistics.steps == 2


def planted(*arguments: object) -> None:
    raise RuntimeError("planted")


def clipped_training(rank: int, how: str, device: Device | None) -> tuple[list[Tensor], int]:
    """Clip every step of 12, with a learning rate as in fine-tuning; return all values and how many were patched."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(16, 33), nn.Linear(33, 64), nn.Linear(64, 16)).to(torch.bfloat16)
    wrap([*model, model], mp_policy=MixedPrecisionPolicy(**ROUNDED))
    limit = LIMIT if how == "own" else None
    optimizer = SpeculativeCPUAdamW(model.parameters(), lr=1e-5, max_grad_norm=limit)
    options: dict[str, Any] = {"gpu_buckets": 0} if isinstance(device, SimulatedDevice) else {}
    with (
        nullcontext()
        if device is None
        else OffloadScheduler(optimizer, model, device=device, num_threads=1, bucket_numel=500, **options)
    ):
        for step in range(12):
            generator = torch.Generator().manual_seed(100 * rank + step)
            values = model(torch.randn(64, 16, generator=generator).to(torch.bfloat16))
            (100 * (values.float() - 1).square().mean()).backward()
            if how == "torch":
                nn.utils.clip_grad_norm_(model.parameters(), LIMIT)
            elif how == "one by one":
                nn.utils.clip_grad_norm_(model.parameters(), LIMIT, foreach=False)
            optimizer.step()
            assert optimizer.last_outcome is not None
            assert how != "own" or optimizer.last_outcome.kind is StepKind.CLIPPED
            optimizer.zero_grad()
        parts = parts_of(model, optimizer)
    return parts, optimizer.statistics.patched


@pytest.mark.parametrize("how", ["own", "torch", pytest.param("one by one", marks=pytest.mark.deep)])
@on_ranks(2)
def test_values_are_patched_where_every_step_is_clipped(rank: int, how: str) -> None:
    """Each rank predicts from its own parts: the others' are in the factor."""
    expected, none = clipped_training(rank, how, None)
    assert none == 0
    for device in (ThreadDevice(), SimulatedDevice(1, 0.5)):
        found, patched = clipped_training(rank, how, device)
        assert_same(found, expected)
        assert patched > 30, patched  # of 6 parameters in 11 steps
