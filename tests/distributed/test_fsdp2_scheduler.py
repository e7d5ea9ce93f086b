"""Training under `fully_shard` with a scheduler has the bits of training without one, on every rank."""

import itertools
import math
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from support.deep import DEEP, TIMES
from support.late_gradients import LateGradients, beside
from support.overlap import ImmediateDevice, ThreadDevice
from support.ranks import on_ranks
from support.shards import DEVICES, ROUNDED, SHAPES, assert_same, gathered, local, parts_of, ways_to_shard, wrap
from support.visible import bits
from torch import Tensor, distributed, nn
from torch.distributed import init_device_mesh
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.utils.checkpoint import checkpoint

from superadam import OffloadScheduler, SpeculativeCPUAdam, SpeculativeCPUAdamW, StepKind
from superadam.devices import Device
from superadam.handles.gradient_handle import taken_of
from superadam.integrations.reduced_gradients import take_reduced_gradients
from superadam.testing import SimulatedDevice

pytestmark = pytest.mark.slow

LIMIT = 0.5
LAYERS = tuple(SHAPES[:3])


def sharded(
    dtype: torch.dtype, shapes: Sequence[tuple[int, int]] = LAYERS, mesh: str = "shard", **options: Any
) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(inner, outer) for inner, outer in shapes]).to(dtype)
    ignored = {model[1].bias} if mesh == "ignored" else None
    if mesh == "tied":
        model[1].weight = model[0].weight
    if mesh == "coarse":
        model.unused = nn.Parameter(torch.ones(5, dtype=dtype))
    modules = {"tied": [model], "coarse": [model[0], model]}.get(mesh, [*model, model])
    options = {"mp_policy": MixedPrecisionPolicy(**ROUNDED), **ways_to_shard(mesh), **options}
    wrap(modules, ignored_params=ignored, **options)
    return model


def loss_of(model: Any, rank: int, step: int, micro: int, *, recomputes: bool = False) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * rank + 10 * step + micro)
    values = torch.randn(3, model[0].in_features, generator=generator).bfloat16().to(model[0].weight.dtype)
    if recomputes:
        values.requires_grad_()
        for layer in model:
            values = checkpoint(layer, values, use_reentrant=step % 2 == 0)
    else:
        values = model(values)
    return (values - 1).float().square().sum()


@dataclass
class Run:
    """A training under way, its draws, and what it has seen; the model shows other parameters while it is gathered."""

    rank: int
    model: Any
    optimizer: SpeculativeCPUAdam
    scheduler: OffloadScheduler | None
    draws: random.Random
    deck: Iterator[str]
    seen: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.parameters: list[Any] = list(self.model.parameters())

    @property
    def gradients(self) -> list[Any]:
        return [one.grad for one in self.parameters if one.grad is not None]

    def look(self, *tensors: Tensor) -> None:
        self.seen += [bits(local(tensor)) for tensor in tensors]


@dataclass(frozen=True)
class Program:
    """A training under `fully_shard`.

    Attributes:
        dtype, shapes, mesh: of the model, and how it lies on the ranks.
        kind, options, sharding: of the optimizer and of `fully_shard`.
        has_groups: whether every other parameter has twice the learning rate.
        reduces: whether the optimizer takes reduced gradients.
        steps, micro_batches: how many, and of each step.
        syncs: whether the gradients of each are reduced, and not those of all at once.
        announces: whether all but the last are announced to the scheduler.
        recomputes: whether layers are computed once more in backward.
        loss_scale: whether torch scales the losses.
        clips: who clips every step, "ours" or "torch", and not only some.
        edit: what is done to the model's gradients, or to the scheduler, before a step.
        seed: of what is drawn meanwhile.
    """

    dtype: torch.dtype = torch.bfloat16
    shapes: Sequence[tuple[int, int]] = LAYERS
    mesh: str = "shard"
    kind: type[SpeculativeCPUAdam] = SpeculativeCPUAdamW
    has_groups: bool = False
    options: dict[str, Any] = field(default_factory=dict)
    sharding: dict[str, Any] = field(default_factory=dict)
    reduces: bool = False
    steps: int = 6
    micro_batches: int = 1
    syncs: bool = True
    announces: bool = False
    recomputes: bool = False
    loss_scale: bool = False
    clips: str = ""
    edit: Callable[[Run, int], object] = lambda run, step: None
    seed: int = 0


def edit_in_kept_memory(run: Run, step: int) -> None:
    """Write to a gradient's memory, which a hook has kept, past its version counter."""
    model = run.model
    if step == 0:
        model.kept = []

        def keep(parameter: Any) -> None:
            part = local(parameter.grad)
            model.kept.append(torch.empty(0, dtype=part.dtype).set_(part.untyped_storage(), 0, (part.numel(),), (1,)))

        model[1].weight.register_post_accumulate_grad_hook(keep)
    for memory in model.kept:
        memory.mul_(0.5)
    model.kept.clear()


def place(run: Run, step: int) -> None:
    if run.scheduler is not None:
        run.scheduler.place(gpu_buckets=step % 3, bucket_numel=10 + 10 * (step % 2))


def freeze(run: Run, step: int) -> None:
    """Train a matrix in every other two steps."""
    run.model[1].weight.requires_grad_(step % 4 > 1)


def clip_largest(run: Run, step: int) -> None:
    if step % 6 == 0:
        nn.utils.clip_grad_norm_(run.parameters, 0.1, norm_type=math.inf)


def sum_of_all_ranks(run: Run, step: int) -> None:
    distributed.all_reduce(run.model[1].bias.grad)


FP32 = torch.float32
FINE = [(16, 33), (33, 64), (64, 16)]
PROGRAMS = {
    "fp32": Program(FP32),
    "bf16": Program(),
    "two micro-batches, reduced at once": Program(micro_batches=2, syncs=False),
    "three micro-batches, announced": Program(micro_batches=3, announces=True),
    "parts that are cut": Program(shapes=(SHAPES[0], (5, 2000), (2000, 3))),
    "replicas": Program(FP32, [(8, 8)] * 2, "replicate"),
    "columns": Program(FP32, [(8, 8)] * 2, "columns"),
    "weights on the host": Program(FP32, [(8, 8)] * 2, "host"),
    "an ordinary parameter": Program(shapes=[(8, 8)] * 2, mesh="ignored", edit=sum_of_all_ranks),
    "scaled losses": Program(loss_scale=True),
    "scaled losses of fp32 shards": Program(FP32, loss_scale=True),
    "placement that changes": Program(edit=place),
    "layers that are computed once more": Program(recomputes=True),
    "a matrix that is frozen": Program(edit=freeze),
    "every step is clipped": Program(shapes=FINE, clips="ours", options={"lr": 1e-5}),
    "torch clips every step": Program(shapes=FINE, steps=9, clips="torch", options={"lr": 1e-5}),
    "smaller state": Program(options={"moments": "8bit", "master": "24bit"}, shapes=[(64, 128), (128, 64)]),
    "gradients' memory that a hook keeps": Program(edit=edit_in_kept_memory),
    "the largest element is clipped": Program(shapes=[(8, 8)] * 2, steps=12, edit=clip_largest),
    "tied weights": Program(shapes=[(8, 8)] * 2, mesh="tied"),
}


def spoil(run: Run, one: Any, factor: float) -> None:
    part = local(one.grad)
    if part.numel() and run.rank == (factor > 1):  # on one rank only
        part.view(-1)[0] = math.nan


def clip(run: Run, one: Any, factor: float, **options: Any) -> None:
    norm: Any = nn.utils.clip_grad_norm_(run.parameters, factor, **options)
    run.look(norm.full_tensor() if run.gradients else norm)


def save_sharded(run: Run, one: Any, factor: float) -> None:
    for module in run.model.modules():
        if isinstance(module, FSDPModule):  # torch cannot save what an evaluation has left gathered
            module.reshard()
    if all(parameter.requires_grad for parameter in run.parameters):
        get_optimizer_state_dict(run.model, run.optimizer)


def state_of(run: Run, one: Any) -> dict[str, Any]:
    """Return moments and master; beside a simulated link, fp32 parameters have masters, too."""
    keys = ["exp_avg", "exp_avg_sq", *(["master"] if one.dtype is torch.bfloat16 else [])]
    return {key: run.optimizer.state[one][key] for key in keys if run.optimizer.state.get(one)}


def look_at_everything(run: Run, one: Any, factor: float) -> None:
    run.look(*run.gradients, *run.parameters, *(value for p in run.parameters for value in state_of(run, p).values()))


ACTIONS: dict[str, Callable[[Run, Any, float], object]] = {
    "multiply a part": lambda run, one, factor: local(one.grad).mul_(factor),
    "multiply a gradient": lambda run, one, factor: one.grad.mul_(factor),
    "multiply all gradients": lambda run, one, factor: run.gradients and torch._foreach_mul_(run.gradients, factor),
    "add to a gradient": lambda run, one, factor: one.grad.add_(factor),
    "drop a gradient": lambda run, one, factor: setattr(one, "grad", None),
    "replace a gradient": lambda run, one, factor: setattr(one, "grad", one.grad.clone() * factor),
    "zero a gradient": lambda run, one, factor: one.grad.zero_(),
    "NaN on one rank": spoil,
    "gather a gradient": lambda run, one, factor: run.look(one.grad.full_tensor()) or repr(one.grad),
    "norms of parts": lambda run, one, factor: run.look(*(local(gradient).norm() for gradient in run.gradients)),
    "clip": clip,
    "clip values": lambda run, one, factor: nn.utils.clip_grad_value_(run.parameters, 0.1 * factor),
    "clip one by one": lambda run, one, factor: clip(run, one, factor, foreach=False),
    "clip by the optimizer": lambda run, one, factor: run.look(run.optimizer.clip_grad_norm_(factor)),
    "change the limit": lambda run, one, factor: setattr(run.optimizer, "max_grad_norm", factor),
    "change the rate": lambda run, one, factor: run.optimizer.param_groups[0].update(lr=0.01 * factor),
    "edit state": lambda run, one, factor: [value.mul_(factor) for value in state_of(run, one).values()],
    "edit parts of state": lambda run, one, factor: [
        local(value).mul_(factor) for value in state_of(run, one).values()
    ],
    "replace state": lambda run, one, factor: run.optimizer.state[one].update(
        {key: value * factor for key, value in state_of(run, one).items()}
    ),
    "write a parameter": lambda run, one, factor: one.mul_(0.9),
    "write a part": lambda run, one, factor: local(one).mul_(0.9),
    "freeze or not": lambda run, one, factor: [
        other.requires_grad_(not other.requires_grad) for other in run.parameters[1::2]
    ],
    "roll back": lambda run, one, factor: run.optimizer.rollback(),
    "commit": lambda run, one, factor: run.optimizer.commit(),
    "step": lambda run, one, factor: run.optimizer.step(),
    "look at everything": look_at_everything,
    "load what is saved": lambda run, one, factor: run.optimizer.load_state_dict(run.optimizer.state_dict()),
    "save sharded": save_sharded,
    "evaluate": lambda run, one, factor: run.model(torch.ones(2, 4, dtype=one.dtype)),
    "change buckets": lambda run, one, factor: run.scheduler and run.scheduler.place(bucket_numel=round(20 * factor)),
}


def act(run: Run, step: int) -> None:
    """Do up to two of these to parameters that have gradients."""
    for _ in range(run.draws.choice([0, 1, 2, 2])):
        having = [one for one in run.parameters if one.grad is not None]
        if having:
            run.seen.append(next(run.deck))
            with torch.no_grad():
                ACTIONS[run.seen[-1]](run, run.draws.choice(having), run.draws.choice([0.3, 0.5, 2.0]))


SEEDS = 6
"""Of programs that together do all of this."""


def drawn(seed: int) -> Program:
    draws = random.Random(seed)
    widths = [4, *(draws.choice([1, 3, 4, 7, 8, 9, 16]) for _ in range(draws.randint(2, 5)))]
    numbers = {"lr": 10 ** draws.uniform(-3, -1), "weight_decay": draws.choice([0.0, 0.1])}
    mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=draws.choice([torch.float32, None]))
    return Program(
        dtype=draws.choice([torch.float32, torch.bfloat16, torch.bfloat16]),
        shapes=list(itertools.pairwise(widths)),
        mesh=draws.choice(["shard", "coarse"]),
        kind=draws.choice([SpeculativeCPUAdamW, SpeculativeCPUAdam]),
        has_groups=draws.random() < 0.5,
        options={**numbers, "amsgrad": draws.random() < 0.3, "maximize": draws.random() < 0.1},
        sharding={
            "mp_policy": mixed if draws.random() < 0.7 else MixedPrecisionPolicy(),
            "reshard_after_forward": draws.random() < 0.7,
        },
        reduces=seed % 2 == 1,
        steps=8,
        micro_batches=draws.choice([1, 1, 2, 3]),
        syncs=draws.random() < 0.6,
        announces=draws.random() < 0.3,
        edit=act,
        seed=seed,
    )


def trained(rank: int, program: Program, where: str | None) -> tuple[list[Tensor], list[Any]]:
    """Return all values, and what was seen of each step; some are clipped, and one gradient is NaN on one rank."""
    model: Any = sharded(program.dtype, program.shapes, program.mesh, **program.sharding)
    lr, parameters = program.options.get("lr", 1e-2), [*model.parameters()]
    groups = [{"params": parameters[::2], "lr": 2 * lr}, {"params": parameters[1::2]}]
    optimizer = program.kind(groups if program.has_groups else parameters, **{**program.options, "lr": lr})
    scheduler, kept = None, 0
    if where is not None:
        device, kept = DEVICES[where]()
        options: dict[str, Any] = {"device": device, "gpu_buckets": kept}
        scheduler = OffloadScheduler(optimizer, model, num_threads=1, bucket_numel=8, **options)
    with suppress(ValueError):  # nothing of this model is rounded
        if program.reduces:
            take_reduced_gradients(optimizer, model)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, enabled=program.loss_scale)
    draws = random.Random(program.seed)
    dealt = random.Random(program.seed // SEEDS).sample([*ACTIONS], len(ACTIONS))
    first = program.seed % SEEDS * len(dealt) // SEEDS
    run = Run(rank, model, optimizer, scheduler, draws, itertools.cycle(dealt[first:] + dealt[:first]))
    is_drawn, is_scaled = program.edit is act, False
    for step in range(program.steps):
        begin = len(run.seen)
        for micro in range(program.micro_batches):
            is_last = micro == program.micro_batches - 1
            if not program.syncs:
                model.set_requires_gradient_sync(is_last)
            is_announced = program.announces and not is_last and scheduler is not None
            with scheduler.accumulate() if is_announced else nullcontext():
                scaler.scale(loss_of(model, rank, step, micro, recomputes=program.recomputes)).backward()
        program.edit(run, step)
        is_clipped = (step % 5 == 4 or program.clips == "torch") and not is_drawn
        makes_products = any(str(one).startswith(("clip", "multiply")) for one in run.seen[begin:])
        is_scaled |= is_clipped or program.loss_scale or makes_products
        if is_clipped and program.mesh != "ignored":  # torch cannot clip where some are not sharded
            nn.utils.clip_grad_norm_(model.parameters(), LIMIT)
        if step == program.steps - 3 and rank == 1 and not is_drawn:
            local(model[0].weight.grad).view(-1)[0] = math.nan
        if not is_drawn:
            optimizer.max_grad_norm = LIMIT if step % 3 == 1 or program.clips == "ours" else None
        scaler.step(optimizer)
        scaler.update()
        outcome = optimizer.last_outcome
        # Of gradients that torch has scaled, the norm is told times the factor, or that of products rounded to bf16.
        share = 2**-9 if is_scaled or program.edit is clip_largest else 0.0
        expected = pytest.approx(outcome.grad_norm, rel=share, abs=0.0, nan_ok=True)
        norm = expected if scheduler is None else outcome.grad_norm
        run.seen += [outcome.kind, outcome.clip_coefficient, norm, scaler.get_scale()]
        if not is_drawn or run.draws.random() < 0.9:  # else gradients are added to
            optimizer.zero_grad(set_to_none=not is_drawn or run.draws.random() < 0.9)
            is_scaled = False
    if scheduler is not None and not is_drawn:
        assert scheduler.statistics.buckets > program.steps
        assert program.edit is place or (scheduler.statistics.resident_buckets > 0) is (kept > 0)
        is_speculated = where == "simulated" or (program.dtype == torch.bfloat16 and not kept)
        if is_speculated and program.micro_batches == 1:
            assert optimizer.statistics.accepted > 0
            patched = optimizer.statistics.patched  # each rank predicts from its own parts
            assert patched > 5 or kept or not program.clips, (where, patched)
    if scheduler is not None:
        scheduler.close()
    return parts_of(model, optimizer), run.seen


@pytest.mark.parametrize("name", PROGRAMS)
@on_ranks(2)
def test_program_has_the_bits_of_training_without_a_scheduler(rank, name):
    """The first two in each of the three settings, which take turns for the others."""
    parts, seen = trained(rank, PROGRAMS[name], None)
    assert gathered(repr(seen)) == [repr(seen)] * 2
    # A scaled loss skips steps by itself, and some clip them all.
    assert all(kind in seen for kind in StepKind) or PROGRAMS[name].loss_scale or PROGRAMS[name].clips
    number = [*PROGRAMS].index(name)
    settings = [where for where in DEVICES if where != "host" or PROGRAMS[name].edit is not place]
    count = len(settings) if DEEP or number < 2 else 1
    for where in itertools.islice(itertools.cycle(settings), number, number + count):
        found, told = trained(rank, PROGRAMS[name], where)
        assert told == seen
        assert_same(found, parts)


@pytest.mark.parametrize("seed", range(TIMES * SEEDS))
@on_ranks(2)
def test_drawn_program_has_the_bits_of_training_without_a_scheduler(rank, seed):
    parts, expected = trained(rank, drawn(seed), None)
    for where in DEVICES:
        found, seen = trained(rank, drawn(seed), where)
        for place, pair in enumerate(zip(seen, expected, strict=True)):
            assert pair[0] == pair[1], f"{where}, after {[one for one in expected[:place] if isinstance(one, str)]}"
        assert_same(found, parts)


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


@pytest.mark.covering(1)
@pytest.mark.parametrize(("layers", "micro_batches"), [(4, 1), (4, 2), (1, 2)])
@pytest.mark.parametrize("where", ["device", "host"])
@on_ranks(2)
def test_gradients_are_waited_for_on_the_stream_of_their_own_group(rank, where, layers, micro_batches):
    """Although they are taken in hooks of the next group, or of the next micro-batch."""
    assert_same(*(on_two_streams(rank, one, layers, micro_batches) for one in (where, None)))


@pytest.mark.parametrize(("before", "micro_batches"), [(0, 1), (0, 2), (1, 3)])
@on_ranks(2)
def test_sums_of_micro_batches_stay_in_fp32(rank, before, micro_batches):
    twin = sharded(torch.bfloat16)
    sums = [torch.zeros_like(local(parameter), dtype=torch.float32) for parameter in twin.parameters()]
    for micro in range(micro_batches):
        loss_of(twin, rank, 0, micro).backward()
        for total, parameter in zip(sums, twin.parameters(), strict=True) if micro >= before else ():
            total += local(parameter.grad)
            parameter.grad = None
    model = sharded(torch.bfloat16)
    optimizer = SpeculativeCPUAdamW(model.parameters(), lr=1e-2)
    with OffloadScheduler(optimizer, model, device=ThreadDevice(), num_threads=1, bucket_numel=8) as scheduler:
        if before:
            loss_of(model, rank, 0, 0).backward()
        with scheduler.accumulate(torch.float32):
            for micro in range(before, micro_batches):
                loss_of(model, rank, 0, micro).backward()
        for total, parameter in zip(sums, model.parameters(), strict=True):
            assert torch.equal(taken_of(parameter.grad).pending, total)
        loss_of(model, rank, 0, 2).backward()
        optimizer.step()


@on_ranks(2)
def test_what_a_hook_raises_is_told_once_by_step_on_every_rank(rank):
    model = sharded(torch.float32)
    optimizer = SpeculativeCPUAdamW(model.parameters(), lr=1e-2)
    with OffloadScheduler(optimizer, model, device=ThreadDevice(), num_threads=1, bucket_numel=8) as scheduler:
        before = parts_of(model, optimizer)
        with pytest.MonkeyPatch.context() as patch:
            if rank == 0:
                patch.setattr(scheduler._transfers, "download", Mock(side_effect=RuntimeError("planted")))
            loss_of(model, rank, 1, 0).backward()
            with pytest.raises(RuntimeError, match="planted" if rank == 0 else r"step\(\) failed on ranks \[0\]"):
                optimizer.step()
        assert_same(parts_of(model, optimizer), before)
        optimizer.step()
        assert optimizer.statistics.steps == 1
