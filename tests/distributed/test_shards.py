"""State of DTensors: fp32 parts on the CPU, shown as DTensors of the parameter's shape and placements."""

import copy
import itertools
import math
import operator
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.optimizers import through_disk
from support.ranks import on_ranks
from support.shards import Model, Oracle, local, model_of
from support.visible import are_taken, bits, parameters_of
from torch import nn
from torch.distributed.checkpoint import load, save
from torch.distributed.checkpoint import state_dict as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from superadam import SpeculativeCPUAdamW, StepKind
from superadam.distributed.shards import first_position

pytestmark = pytest.mark.slow

BOTH = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


def backward(model: nn.Module, rank: int, step: int) -> None:
    generator = torch.Generator().manual_seed(100 * rank + step)
    model(torch.randn(4, 6, generator=generator).to(next(model.parameters()).dtype)).square().mean().backward()


def train(model: Any, optimizer: Any, rank: int, steps: range, limit: float | None = None) -> None:
    for step in steps:
        backward(model, rank, step)
        optimizer.max_grad_norm = limit if step % 2 else None
        optimizer.step()
        optimizer.zero_grad()


def made(dtype: torch.dtype) -> tuple[Any, Any]:
    model = model_of(dtype)
    return model, SpeculativeCPUAdamW(model.parameters(), lr=1e-2)


def state_of(optimizer: Any) -> list[Any]:
    every = parameters_of(optimizer)
    entries = [{key: bits(local(value)) for key, value in optimizer.state[one].items()} for one in every]
    return [*entries, *(bits(local(one)) for one in every)]


MESHES: dict[str, Any] = {
    "1-D": lambda: {},
    "Shard(1)": lambda: {"shard_placement_fn": lambda p: Shard(1) if p.ndim == 2 and p.shape[1] == 6 else None},
    "HSDP 2 x 1": lambda: {"mesh": init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))},
    "HSDP 1 x 2": lambda: {"mesh": init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicate", "shard"))},
}


@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("mesh", MESHES)
@on_ranks(2)
def test_every_kind_of_shard(rank, mesh, dtype):
    model = model_of(dtype, **MESHES[mesh]())
    optimizer = SpeculativeCPUAdamW(model.parameters(), lr=1e-2)
    oracle = Oracle(optimizer)
    for step in range(4):
        backward(model, rank, step)
        oracle.copy_gradients()
        limit = 1e-3 if step % 2 else None
        optimizer.max_grad_norm = limit
        asked = optimizer.clip_grad_norm_(1e-3).item() if step == 3 else None
        optimizer.step()
        norm, outcome = oracle.step_all(limit), optimizer.last_outcome
        assert outcome.grad_norm == norm
        assert asked in (None, norm)
        assert outcome.kind is (StepKind.CLIPPED if limit else StepKind.COMMITTED)
        optimizer.zero_grad()
        oracle.check()
    assert not optimizer.state[model.unused.weight]
    assert not optimizer.state[model.frozen.weight]
    entry = optimizer.state[model.last.weight]  # of one row: one part is empty but under HSDP
    assert entry["exp_avg"].full_tensor().shape == (1, 7)
    assert {value.device.type for value in entry.values()} == {"cpu"}


OPTIONS: dict[str, Any] = {
    "default": {},
    "not resharded": {"reshard_after_forward": False},
    "offloaded": {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
    "low precision": {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)},
}


@BOTH
@pytest.mark.covering(1)
@pytest.mark.parametrize("options", OPTIONS)
@on_ranks(2)
def test_the_next_forward_sees_new_values(rank, options, dtype):
    model, plain = model_of(dtype, **OPTIONS[options]), Model().to(dtype)
    optimizer = SpeculativeCPUAdamW(model.parameters(), lr=1e-2)
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(0)).to(dtype)
    for step in range(4):
        backward(model, rank, step)
        if step % 2:
            for parameter in model.parameters():  # one by one out of the buffers that they share
                optimizer.speculate([parameter])
            assert all(are_taken(optimizer))
        optimizer.step()
        optimizer.zero_grad()
        plain.load_state_dict(dcp.get_model_state_dict(model, options=dcp.StateDictOptions(full_state_dict=True)))
        given, expected = (x.bfloat16(), copy.deepcopy(plain).bfloat16()) if options == "low precision" else (x, plain)
        assert bits(model(given)) == bits(expected(given))


@on_ranks(2)
def test_state_that_is_held_shows_every_step(rank):
    (model, optimizer), (twin_model, twin) = made(torch.bfloat16), made(torch.bfloat16)
    names = ("first", "second")
    train(model, optimizer, rank, range(1))
    train(twin_model, twin, rank, range(1))
    with torch.no_grad():
        held = [optimizer.state[getattr(model, name).weight]["master"] for name in names]
        held[1] = held[1].to_local()
    for step in (1, 2, 3):
        for m, one in ((model, optimizer), (twin_model, twin)):
            backward(m, rank, step)
            one.speculate()
            one.resolve()
            one.zero_grad()
        for name, master in zip(names, held, strict=True):
            assert bits(local(master)) == bits(local(twin.state[getattr(twin_model, name).weight]["master"]))
    with torch.no_grad():  # edits are the truth
        for master in held:
            master.fill_(3.0)
    train(model, optimizer, rank, range(4, 5))
    for name, master in zip(names, held, strict=True):
        for seen in (local(master), local(getattr(model, name).weight)):
            assert (seen - 3).abs().max() < 0.1


@on_ranks(2)
def test_one_rank_alone_reads_and_writes(rank):
    """Nothing but a step and a norm is asked of other ranks."""
    model, optimizer = made(torch.bfloat16)
    if rank == 0:
        assert not any(optimizer.state_dict()["state"].values())
    train(model, optimizer, rank, range(2))
    backward(model, rank, 2)
    if rank == 1:
        optimizer.speculate()
        optimizer.load_state_dict(optimizer.state_dict())
        optimizer.rollback()
        optimizer.commit()
        optimizer.reload_masters()
        copy.deepcopy(optimizer.state_dict())
    optimizer.step()
    assert optimizer.last_outcome.kind is StepKind.COMMITTED


@BOTH
@on_ranks(2)
def test_outside_writes_are_adopted(rank, dtype):
    states = []
    for part_of in (lambda parameter: parameter, local):  # the DTensor, or the part
        model, one = made(dtype)
        train(model, one, rank, range(2))
        with torch.no_grad():
            part_of(model.first.weight).mul_(2)
        train(model, one, rank, range(2, 4))
        states.append(state_of(one))
        if dtype == torch.bfloat16:
            assert bits(local(model.first.weight)) == bits(local(one.state[model.first.weight]["master"]).bfloat16())
    assert states[0] == states[1]


@on_ranks(2)
def test_parts_that_are_replaced(rank):
    """As by `model.to`, which swaps the contents of parameters, and by loading with `assign`."""
    model, optimizer = made(torch.float32)
    train(model, optimizer, rank, range(1))
    moments = bits(local(optimizer.state[model.first.weight]["exp_avg"]))
    model.to(torch.bfloat16)
    state = optimizer.state[model.first.weight]
    assert bits(local(state["exp_avg"])) == moments
    before = local(model.first.weight).clone()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert state["master"].dtype == torch.float32
    assert bits(local(state["master"]).bfloat16()) == bits(local(model.first.weight))
    assert bits(before) != bits(local(model.first.weight))


def through_dict(optimizer: Any, model: Any, *, is_file: bool) -> Any:
    other = model_of(next(model.parameters()).dtype)
    other.load_state_dict(model.state_dict())
    loaded = SpeculativeCPUAdamW(other.parameters(), amsgrad=True)
    loaded.load_state_dict(through_disk(optimizer.state_dict()) if is_file else optimizer.state_dict())
    entry = loaded.state[other.first.weight]
    assert entry["exp_avg"].placements == other.first.weight.placements
    assert entry["exp_avg"] is not optimizer.state[model.first.weight]["exp_avg"]
    return loaded


COPIES: dict[str, Callable[[Any, Any], Any]] = {
    "state dict": lambda optimizer, model: through_dict(optimizer, model, is_file=False),
    "file": lambda optimizer, model: through_dict(optimizer, model, is_file=True),
    "copy": lambda optimizer, model: copy.deepcopy(optimizer),
    "pickle": lambda optimizer, model: pickle.loads(pickle.dumps(optimizer)),
}


@BOTH
@on_ranks(2)
def test_copies_go_on_with_the_same_bits(rank, dtype):
    model = model_of(dtype)
    optimizer = SpeculativeCPUAdamW(model.parameters(), lr=1e-2, amsgrad=True)
    train(model, optimizer, rank, range(3), 1e-3)
    every = [optimizer, *(copies(optimizer, model) for copies in COPIES.values())]
    for one in every:
        assert state_of(one) == state_of(optimizer)
    for one in every:
        for position, parameter in enumerate(one.param_groups[0]["params"]):
            parameter.grad = torch.ones_like(parameter) * (position + 1)
        one.step()
        assert state_of(one) == state_of(optimizer)


@BOTH
@on_ranks(2)
def test_state_dicts_of_torch(rank, dtype):
    (model, ours), other = made(dtype), model_of(dtype)
    theirs = torch.optim.AdamW(other.parameters(), lr=1e-2)
    train(model, ours, rank, range(2))
    theirs.load_state_dict(ours.torch_state_dict())
    other.load_state_dict(model.state_dict())
    train(other, theirs, rank, range(2, 3))
    entry = theirs.state[other.first.weight]
    assert entry["step"].item() == 3
    ours.load_state_dict(theirs.state_dict())
    entry = ours.state[model.first.weight]
    assert entry["step"].item() == 3
    assert entry["exp_avg"].dtype == torch.float32
    train(model, ours, rank, range(3, 4))


@BOTH
@pytest.mark.covering(1)
@pytest.mark.parametrize("is_full", [False, True])
@pytest.mark.parametrize("moments", ["fp32", "bf16"])
@on_ranks(2)
def test_functions_of_distributed_checkpoint(rank, dtype, is_full, moments, tmp_path):
    """Where every parameter that is trained has state, which they need of every optimizer; shards go through files."""
    options = dcp.StateDictOptions(full_state_dict=is_full)
    models = [model_of(dtype), model_of(dtype)]
    optimizer, loaded = (SpeculativeCPUAdamW(m.parameters(), lr=1e-2, moments=moments) for m in models)
    for model in models[: 1 if is_full else 2]:
        for parameter in filter(operator.attrgetter("requires_grad"), model.parameters()):
            parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    state_dict = dcp.get_optimizer_state_dict(models[0], optimizer, options=options)
    if not is_full:
        save({"optimizer": state_dict}, checkpoint_id=tmp_path)
        loaded.step()
        loaded.zero_grad()
        state_dict = dcp.get_optimizer_state_dict(models[1], loaded, options=options)
        load({"optimizer": state_dict}, checkpoint_id=tmp_path)
    dcp.set_optimizer_state_dict(models[1], loaded, state_dict, options=options)
    models[1].load_state_dict(models[0].state_dict())
    assert state_of(optimizer) == state_of(loaded)
    for model, one in zip(models, (optimizer, loaded), strict=True):
        train(model, one, rank, range(2))
    assert state_of(optimizer) == state_of(loaded)


@BOTH
@on_ranks(2)
def test_tensor_parallelism(rank, dtype):
    """Parameters that are cut in both ways, and the norm's, which are not: their gradients are the same everywhere."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 6), nn.Linear(6, 8), nn.LayerNorm(8)).to(dtype)
    parallelize_module(model, init_device_mesh("cpu", (2,)), {"0": ColwiseParallel(), "1": RowwiseParallel()})
    optimizer = SpeculativeCPUAdamW(model.parameters(), lr=1e-2)
    oracle = Oracle(optimizer)
    for step in range(3):
        torch.manual_seed(step)
        model(torch.randn(3, 8).to(dtype)).square().mean().backward()
        optimizer.speculate()
        oracle.check_step(rel_tol=1e-14)  # the norm is added in another order


@on_ranks(4)
def test_where_a_part_begins_in_the_whole(rank):
    """Thresholds, by which smaller state is rounded, are those of the whole where a part is rows of it."""
    for sizes in ((4,), (2, 2)):
        mesh = init_device_mesh("cpu", sizes)
        for shape, placements in itertools.product(
            [(9, 5), (7,)], itertools.product([Shard(0), Shard(1), Replicate()], repeat=len(sizes))
        ):
            cut = {placement.dim for placement in placements if placement.is_shard()}
            if max(cut, default=0) < len(shape):
                part = distribute_tensor(torch.arange(math.prod(shape)).view(shape), mesh, placements)
                if part.to_local().numel():
                    assert first_position(part) == (0 if 1 in cut else part.to_local().flatten()[0])


@on_ranks(2)
def test_state_of_other_placements_is_refused(rank):
    mesh = init_device_mesh("cpu", (2,))
    parameter = nn.Parameter(distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)]))
    parameter.grad = torch.ones_like(parameter)
    optimizer = SpeculativeCPUAdamW([parameter])
    optimizer.step()
    good = optimizer.state_dict()
    before = state_of(optimizer)
    for wrong in (
        distribute_tensor(torch.ones(4, 4), mesh, [Shard(1)]),
        distribute_tensor(torch.ones(4, 4), mesh, [Replicate()]),
        distribute_tensor(torch.ones(4, 5), mesh, [Shard(0)]),
        torch.ones(4, 4),
        torch.ones(2, 4),
    ):
        bad = copy.copy(good)
        bad["state"] = {0: {**good["state"][0], "exp_avg": wrong}}
        with pytest.raises(ValueError, match=r"^exp_avg of parameter 0 of group 0 is .*, expected it like its"):
            optimizer.load_state_dict(bad)
        assert state_of(optimizer) == before
    single = SpeculativeCPUAdamW([nn.Parameter(torch.ones(4, 4))])
    with pytest.raises(ValueError, match=r"^exp_avg of parameter 0 of group 0 is .*DTensor.*, expected floats"):
        single.load_state_dict(good)
    single.param_groups[0]["params"][0].grad = parameter.grad
    with pytest.raises(TypeError, match=r"^the gradient of .* is a DTensor .*, expected it like .* ordinary tensor"):
        single.step()
    optimizer.state[parameter]["exp_avg"] = torch.ones(4, 4)
    with pytest.raises(ValueError, match="expected it like its parameter"):
        optimizer.step()


@on_ranks(2)
def test_parameters_that_are_not_summed_are_refused(rank):
    mesh = init_device_mesh("cpu", (2,))
    for where, placements in ((mesh, [Partial()]), (init_device_mesh("cpu", (2, 1)), [Shard(0), Partial()])):
        partial = nn.Parameter(DTensor.from_local(torch.ones(3), where, placements))
        with pytest.raises(TypeError, match=r"^parameter 0 of group 0 is placed .* expected Shard or Replicate"):
            SpeculativeCPUAdamW([partial])
