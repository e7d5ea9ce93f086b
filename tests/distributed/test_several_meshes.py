"""One verdict over all that is trained together: stages of a pipeline, parameters on several meshes, ordinary ones."""

import copy
import math
import warnings
import zlib
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from support.overlap import ThreadDevice
from support.ranks import on_ranks, raises
from support.shards import gathered, local
from support.visible import bits, entry_bits
from torch import Tensor, distributed, nn
from torch.distributed import DeviceMesh, init_device_mesh, pipelining
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from superadam import OffloadScheduler, SpeculativeCPUAdamW, StepKind
from superadam.distributed import replicas
from superadam.integrations.deepspeed import save_fp32
from superadam.integrations.distributed_checkpoint import CheckpointError, save


class Part(NamedTuple):
    """A parameter of which this rank holds a part: on a mesh, or all of it where that is None."""

    name: str
    shape: tuple[int, ...]
    mesh: DeviceMesh | None = None
    placements: Sequence[Any] = ()


def pipeline(rank: int) -> list[Part]:
    """Two stages, each sharded over two ranks, whose parameters have the same shapes."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stage", "data"))["data"]
    stage = rank // 2
    return [Part(f"{stage}.{name}", shape, mesh, [Shard(0)]) for name, shape in (("weight", (6, 3)), ("bias", (6,)))]


def plain_pipeline(rank: int) -> list[Part]:
    """Stages that are not sharded, with an embedding that all have."""
    return [Part("tied", (5, 3)), Part(f"{rank}.weight", (4, 3)), Part(f"{rank}.bias", (4 + rank,))]


def tensor_parallel(rank: int) -> list[Part]:
    """Matrices over both dimensions of a mesh, norms over the one and copied along the other, biases everywhere."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    return [
        Part("weight", (8, 6), mesh, [Shard(0), Shard(1)]),
        Part("replicas", (4, 2), mesh, [Replicate(), Shard(0)]),
        Part("norm", (6,), mesh["data"], [Shard(0)]),
        Part("bias", (3,)),
    ]


def experts(rank: int) -> list[Part]:
    """Dense parameters over all ranks, experts over half of them and copied, and some that only two ranks have."""
    mesh = init_device_mesh("cpu", (4,))
    halves = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "experts"))
    found = [Part("experts", (2, 4, 3), halves["experts"], [Shard(0)]), Part("dense", (9, 2), mesh, [Shard(0)])]
    if rank >= 2:
        found.insert(0, Part("late experts", (2, 5), halves["experts"], [Shard(0)]))
    return found


WAYS: dict[str, tuple[Callable[[int], list[Part]], bool]] = {
    "pipeline": (pipeline, True),
    "plain pipeline": (plain_pipeline, True),
    "tensor parallel": (tensor_parallel, False),
    "experts": (experts, False),
}
"""What each rank holds, and whether the optimizer has to be told who trains together."""


def value(name: str, shape: Sequence[int], seed: int) -> Tensor:
    """Return the whole of a parameter or gradient, the same on every rank."""
    generator = torch.Generator().manual_seed(1000 * seed + zlib.crc32(name.encode()) % 1000)
    return torch.randn(shape, generator=generator).bfloat16()


def part_of(part: Part, whole: Tensor) -> Tensor:
    """Return this rank's part of it."""
    if part.mesh is None:
        return whole
    return distribute_tensor(whole, part.mesh, part.placements, src_data_rank=None)


class Trained(nn.Module):
    """Parameters whose gradients are known beforehand."""

    def __init__(self, parts: Sequence[Part]) -> None:
        super().__init__()
        self.parts = parts
        self.of_name = nn.ParameterList(nn.Parameter(part_of(one, value(one.name, one.shape, 0))) for one in parts)

    def named(self) -> list[tuple[str, nn.Parameter]]:
        return [(part.name, parameter) for part, parameter in zip(self.parts, self.of_name, strict=True)]

    def backward(self, step: int, bad: str | None = None) -> None:
        loss = torch.zeros(())
        for part, parameter in zip(self.parts, self.of_name, strict=True):
            gradient = value(part.name, part.shape, step) * (0.01 if step % 2 else 1.0)
            if part.name == bad:
                gradient.view(-1)[-1] = math.nan
            mine = parameter if part.mesh is None else parameter.to_local()
            loss = loss + (mine * local(part_of(part, gradient))).sum()
        loss.backward()


def train(model: Trained, optimizer: SpeculativeCPUAdamW, bad: str) -> list[Any]:
    seen = []
    for step in range(1, 8):
        model.backward(step, bad if step == 5 else None)
        optimizer.step()
        optimizer.zero_grad()
        outcome = optimizer.last_outcome
        seen.append((outcome.kind, outcome.grad_norm, outcome.clip_coefficient))
    return seen


@pytest.mark.parametrize("way", WAYS)
@on_ranks(4)
def test_every_element_counts_once(rank, way):
    """As in one process that has all parameters; a NaN anywhere skips the step everywhere."""
    hold, is_told = WAYS[way]
    group = distributed.group.WORLD if is_told else None
    parts = hold(rank)
    every = gathered([(part.name, part.shape) for part in parts])
    whole = Trained([Part(*one) for one in dict.fromkeys(one for some in every for one in some)])
    bad = every[3][0][0]
    alone = SpeculativeCPUAdamW(whole.named(), lr=0.1, max_grad_norm=1.0)
    expected = train(whole, alone, bad)
    assert {kind for kind, _, _ in expected} == set(StepKind)
    for overlaps in (False, True):
        model = Trained(parts)
        ours = SpeculativeCPUAdamW(model.named(), lr=0.1, max_grad_norm=1.0, process_group=group)
        options: dict[str, Any] = {"device": ThreadDevice(), "bucket_numel": 8, "num_threads": 1}
        with OffloadScheduler(ours, model, **options) if overlaps else nullcontext():
            seen = train(model, ours, bad)
        assert (ours.statistics.accepted > 0) is overlaps
        assert gathered(repr(seen)) == [repr(seen)] * 4
        for (kind, norm, clip), (its_kind, its_norm, its_clip) in zip(seen, expected, strict=True):
            assert (kind, clip) == (its_kind, its_clip)
            assert norm == pytest.approx(its_norm, rel=1e-14, nan_ok=True)  # added in another order
        of_name = dict(whole.named())
        for part, (name, parameter) in zip(parts, model.named(), strict=True):
            assert bits(local(parameter)) == bits(local(part_of(part, of_name[name].detach())))
            for key in ("master", "exp_avg", "exp_avg_sq"):
                its = alone.state[of_name[name]][key]
                assert bits(local(ours.state[parameter][key])) == bits(local(part_of(part, its)))


def one_step(held: Sequence[Part], group: Any = None, gradients: int = 1) -> SpeculativeCPUAdamW:
    model = Trained(held)
    optimizer = SpeculativeCPUAdamW(model.named(), process_group=group)
    model.backward(gradients)
    before = [bits(local(one)) for one in model.of_name]
    try:
        optimizer.step()
    except Exception:
        assert before == [bits(local(one)) for one in model.of_name]
        raise
    return optimizer


@on_ranks(4)
def test_what_is_unknown_is_refused(rank):
    world = distributed.group.WORLD
    stage = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stage", "data"))["data"]
    half = [Part("weight", (4, 3), stage, [Shard(0)])]
    told = rf"^weight is distributed over ranks \[{2 * (rank // 2)}, .* of a job of 4, .* pass process_group="
    raises(ValueError, told, lambda: one_step(half))
    model = Trained(half)
    raises(ValueError, told, lambda: OffloadScheduler(SpeculativeCPUAdamW(model.named()), model))
    told = r"^the copies of a parameter on ranks \[0, 1\] and \[2, 3\] have gradients that differ, expected the same"
    raises(RuntimeError, told, lambda: one_step(half, world, gradients=1 + rank // 2))
    told = r"^weight is \(4, 3\) on ranks \[0, 1\] and \(5, 3\) on ranks \[2, 3\], expected the same parameter"
    raises(RuntimeError, told, lambda: one_step([Part("weight", (4 + rank // 2, 3), stage, [Shard(0)])], world))
    mesh = init_device_mesh("cpu", (4,))
    uneven = [Part("all", (8,), mesh, [Shard(0)]), Part("some", (8,), mesh, [Shard(0)])][: 2 - (rank == 1)]
    told = r"^some is distributed over ranks \[0, 1, 2, 3\], and only the optimizers of ranks \[0, 2, 3\] have it"
    raises(RuntimeError, told, lambda: one_step(uneven))
    told = r"^weight is \(4, 3\) on ranks \[0, 1\] and \(4, 3\) on ranks \[0, 1, 2, 3\] and .*, or one that has another"
    raises(RuntimeError, told, lambda: one_step([*half, Part("weight", (4, 3), mesh, [Shard(0)])], world))
    small = distributed.new_group([0, 1])
    if rank >= 2:
        told = f"^process_group is a group without this rank, {rank}, expected one of the ranks that train together"
        raises(ValueError, told, lambda: one_step([Part("weight", (4, 3))], small))
    else:
        told = r"^weight is distributed over ranks \[0, 1, 2, 3\], expected some of the process_group's, \[0, 1\]"
        raises(ValueError, told, lambda: one_step([Part("weight", (4, 3), mesh, [Shard(0)])], small))


@on_ranks(4)
def test_some_ranks_train_together(rank):
    """Two trainings in one job, which know nothing of each other; one gets parameters later, also on one rank alone."""
    groups = [distributed.new_group(some) for some in ([0, 1], [2, 3])]
    job = init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("job", "copies", "data"))
    stage, gradients = job["copies"], 1 + rank // 2
    expected = value("weight", (4, 3), gradients).double().norm().item() * (0.01 if gradients == 1 else 1.0)
    for mesh, placements in ((stage, [Shard(0)]), (job["copies", "data"], [Replicate(), Shard(0)])):
        optimizer = one_step([Part("weight", (4, 3), mesh, placements)], groups[rank // 2], gradients)
        assert optimizer.last_outcome.grad_norm == pytest.approx(expected, rel=0.01)
    if rank < 2:
        late = nn.Parameter(part_of(Part("late", (6,), stage, [Shard(0)]), torch.ones(6)))
        optimizer.add_param_group({"params": [("late", late)]})
        optimizer.zero_grad()
        late.grad = torch.ones_like(late)
        assert optimizer.clip_grad_norm_(math.inf).item() == math.sqrt(6.0)
        optimizer.step()
        if rank == 0:
            of_one = nn.Parameter(torch.ones(3))
            optimizer.add_param_group({"params": [("of one rank", of_one)]})
            of_one.grad = torch.ones(3)
        assert optimizer.clip_grad_norm_(math.inf).item() == 3.0
        optimizer.step()


@on_ranks(4)
def test_copies_of_which_one_rank_has_made_the_products(rank):
    seen = []  # rank 0 alone looks at the memory of its gradients: those of others wait with what is recorded
    for overlaps in (False, True):
        model = Trained(tensor_parallel(rank))
        optimizer = SpeculativeCPUAdamW(model.named(), lr=0.1)
        options: dict[str, Any] = {"device": ThreadDevice(), "bucket_numel": 8, "num_threads": 1}
        with OffloadScheduler(optimizer, model, **options) if overlaps else nullcontext():
            for step in range(1, 4):
                model.backward(step)
                for parameter in model.of_name:
                    if rank == 0:
                        local(parameter.grad).data_ptr()
                    parameter.grad.mul_(0.3)
                optimizer.step()
                optimizer.zero_grad()
        seen.append([bits(local(parameter)) for parameter in model.of_name])
        assert (optimizer.statistics.accepted > 0) is (overlaps and rank > 0)
    assert seen[0] == seen[1]


def norms_of_uneven_copies(rank: int, factor: float) -> list[float]:
    """Return norms of a gradient that rank 0 holds whole and the others in parts, on rank 0 multiplied by `factor`."""
    whole = torch.randn(1000, 3, generator=torch.Generator().manual_seed(0))
    mesh = [DeviceMesh("cpu", [0]), DeviceMesh("cpu", [1, 2])][rank > 0]
    place = [Shard(0)]
    parameter = nn.Parameter(distribute_tensor(whole, mesh, place, src_data_rank=None) if rank else whole.clone())
    optimizer = SpeculativeCPUAdamW([("tied", parameter)], process_group=distributed.group.WORLD)
    found = []
    for step in range(8):
        gradient = whole * 10.0**-step
        parameter.grad = distribute_tensor(gradient, mesh, place, src_data_rank=None) if rank else gradient * factor
        found.append(optimizer.clip_grad_norm_(math.inf).item() / gradient.double().norm().item())
        optimizer.step()
    return found


@on_ranks(3)
def test_copies_may_be_divided_differently(rank):
    """Sums of the same squares in another order differ by rounding, which the tolerance is for, and by no more."""
    assert norms_of_uneven_copies(rank, 1.0) == pytest.approx([1.0] * 8, rel=1e-6)
    told = r"^the copies of a parameter on ranks \[0\] and \[1, 2\] have gradients that differ"
    raises(RuntimeError, told, lambda: norms_of_uneven_copies(rank, 1.0 + 1e-5))


@pytest.mark.parametrize("way", ["plain pipeline", "tensor parallel"])
@on_ranks(4)
def test_copies_of_which_some_have_no_gradient_and_others_zeros_are_refused(rank, way):
    """Which would make a step of zero gradients, with weight decay, on some only. Where none has one, there is none."""
    model = Trained(WAYS[way][0](rank))
    optimizer = SpeculativeCPUAdamW(model.named(), process_group=distributed.group.WORLD)
    copied = next(parameter for name, parameter in model.named() if name in ("tied", "norm"))
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    copied.grad = None
    optimizer.step()
    if rank % 2:
        copied.grad = torch.zeros_like(copied)
    before = [bits(local(parameter)) for parameter in model.parameters()]
    for call in (optimizer.step, partial(optimizer.clip_grad_norm_, 1.0)):
        raises(RuntimeError, "^the copies of a parameter on ranks .* have gradients that differ", call)
    assert before == [bits(local(parameter)) for parameter in model.parameters()]
    copied.grad = torch.zeros_like(copied)
    optimizer.step()


@on_ranks(3)
def test_ranks_of_a_group_have_any_order(rank):
    group = distributed.new_group([2, 0, 1], sort_ranks=False)
    model = Trained([Part(f"{rank}.weight", (3 + rank,)), *[Part("tied", (5,))] * (rank != 1)])
    optimizer = SpeculativeCPUAdamW(model.named(), process_group=group)
    model.backward(2)
    every = [value("tied", (5,), 2), *(value(f"{one}.weight", (3 + one,), 2) for one in range(3))]
    expected = torch.cat(every).double().norm().item()
    assert optimizer.clip_grad_norm_(math.inf).item() == pytest.approx(expected, rel=1e-6)
    optimizer.step()


@on_ranks(2)
def test_group_set_on_one_rank_alone_is_refused_on_all(rank):
    """The rank that begins anew knows of no copies, and sends as many words as those that do."""
    optimizer = one_step([Part("tied", (5,)), Part(f"{rank}.weight", (4, 3))], distributed.group.WORLD)
    if rank == 1:
        optimizer.process_group = distributed.group.WORLD
    raises(RuntimeError, "^the ranks are not at the same point: rank 0 is in call", optimizer.step)


@on_ranks(2)
def test_process_group_is_an_attribute(rank):
    """Copies do not have it; it can be given, and taken away, at any time."""
    model = Trained(plain_pipeline(rank))
    optimizer = SpeculativeCPUAdamW(model.named(), process_group=distributed.group.WORLD)
    norms = []
    for group in (None, distributed.group.WORLD, None):
        model.backward(2)
        norms.append(optimizer.clip_grad_norm_(math.inf).item())
        optimizer.process_group = group
        assert optimizer.process_group is group
        norms.append(optimizer.clip_grad_norm_(math.inf).item())
        optimizer.step()
        optimizer.zero_grad()
    assert norms[0] == norms[3] == norms[4]
    assert norms[1] == norms[2] == norms[5] < norms[0]


def warned(rank: int, shapes: list[list[tuple[int, ...]]], **options: Any) -> list[str]:
    parameters = [(f"p{number}", nn.Parameter(torch.ones(shape))) for number, shape in enumerate(shapes[rank])]
    optimizer = SpeculativeCPUAdamW(parameters, **options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            for _, parameter in parameters:
                parameter.grad = torch.ones_like(parameter)
            optimizer.step()
            distributed.barrier()  # rank 0 comes first, or as others do
    return [str(one.message) for one in caught if "has other parameters" in str(one.message)]


@on_ranks(3)
def test_ordinary_parameters_that_differ_are_told_once(rank):
    replicas._world, replicas._worlds = None, 0  # each of these processes has served in another number of tests
    different = [[(2, 3)], [(2, 3)], [(2, 4), (5,)]]
    words = gathered(warned(rank, different))
    said = [one for some in words for one in some]
    assert said
    assert all("process_group=torch.distributed.group.WORLD" in one for one in said)
    assert words[2] == [] or words[2][0].startswith("rank 2 has other parameters (2) in its optimizer than rank ")
    assert max(map(len, words)) == 1
    assert warned(rank, [[(2, 3)]] * 3) == []  # replicas
    assert warned(rank, different, process_group=[distributed.new_group([one]) for one in range(3)][rank]) == []
    names = [(f"{rank}.weight", nn.Parameter(torch.ones(2)))]
    if rank < 2:  # the rank that never comes is not waited for
        names[0][1].grad = torch.ones(2)
        with warnings.catch_warnings(record=True):
            SpeculativeCPUAdamW(names).step()


@on_ranks(2)
def test_nothing_is_compared_where_the_store_cannot_answer(rank):
    with pytest.MonkeyPatch.context() as context:
        context.setattr(distributed.PrefixStore, "compare_set", lambda *arguments: 1 / 0, raising=False)
        assert warned(rank, [[(2,)], [(3,)]]) == []


MICRO_BATCHES = 4


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


STAGES: dict[Any, list[list[int]]] = {
    pipelining.ScheduleGPipe: [[0], [1]],
    pipelining.Schedule1F1B: [[0], [1]],
    pipelining.ScheduleInterleaved1F1B: [[0, 2], [1, 3]],
    pipelining.ScheduleZBVZeroBubble: [[0, 3], [1, 2]],
}
"""Which stages each rank has."""


@pytest.mark.covering(1)
@pytest.mark.parametrize(("overlaps", "scales"), [(False, True), (True, True), (True, False)])
@pytest.mark.parametrize("schedule_of", STAGES)
@on_ranks(2)
def test_stages_have_the_bits_of_one_process(rank, schedule_of, overlaps, scales, tmp_path):
    torch.manual_seed(0)
    here, count = STAGES[schedule_of][rank], sum(map(len, STAGES[schedule_of]))
    layers = (nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)) for _ in range(count))
    whole = nn.Sequential(*layers).bfloat16()
    mine = nn.ModuleDict({str(number): copy.deepcopy(whole[number]) for number in here})
    options: dict[str, Any] = {"lr": 0.01, "max_grad_norm": 20.0}
    ours = SpeculativeCPUAdamW(mine.named_parameters(), process_group=distributed.group.WORLD, **options)
    alone = SpeculativeCPUAdamW(whole.named_parameters(), **options)
    stages = [pipelining.PipelineStage(mine[str(number)], number, count, torch.device("cpu")) for number in here]
    schedule = schedule_of(stages if count > 2 else stages[0], MICRO_BATCHES, loss_fn=loss_of, scale_grads=scales)
    made = OffloadScheduler(ours, mine, device=ThreadDevice(), bucket_numel=16, num_threads=1) if overlaps else None
    kinds = set()
    with made or nullcontext():
        for inputs, targets in batches():
            schedule.step(*[inputs] * (0 in here), **({"target": targets} if count - 1 in here else {}))
            for one, target in zip(inputs.chunk(MICRO_BATCHES), targets.chunk(MICRO_BATCHES), strict=True):
                loss_of(whole(one), target).backward()
            for parameter in whole.parameters():
                parameter.grad.div_(MICRO_BATCHES if scales else 1)
            for one in (ours, alone):
                one.step()
                one.zero_grad()
            seen, expected = ours.last_outcome, alone.last_outcome
            assert (seen.kind, seen.clip_coefficient) == (expected.kind, expected.clip_coefficient)
            assert seen.grad_norm == pytest.approx(expected.grad_norm, rel=1e-14, nan_ok=True)  # in another order
            kinds.add(seen.kind)
            for name, parameter in mine.named_parameters():
                its = whole.get_parameter(name)
                assert bits(parameter) == bits(its)
                assert entry_bits(ours.state[parameter]) == entry_bits(alone.state[its])
    assert kinds == set(StepKind)
    for call in (save, save_fp32):  # one checkpoint has all of a model
        raises(CheckpointError, "other parameters than rank 0", partial(call, tmp_path / "run", mine, ours))
    has_hooks = schedule_of is not pipelining.ScheduleZBVZeroBubble  # which computes weights' gradients apart
    assert not has_hooks or (ours.statistics.accepted > ours.statistics.patched) is overlaps, ours.statistics
