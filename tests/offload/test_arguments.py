"""What a scheduler cannot be made for is refused, in one sentence, before anything has changed."""

import math
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from support.overlap import adam, mlp, overlapped
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import Shard, distribute_tensor

from superadam import OffloadScheduler, SpeculativeCPUAdam
from superadam.integrations.reduced_gradients import take_reduced_gradients
from superadam.offload.arguments import check_model
from superadam.testing import SimulatedDevice


def refused(error: type[Exception], sentence: str, check: Any, *arguments: Any, **options: Any) -> None:
    with pytest.raises(error, match=sentence) as caught:
        check(*arguments, **options)
    assert "\n" not in str(caught.value)


# ---- arguments -------------------------------------------------------------------------------------------------------

COUNTS: list[Any] = [0, -1, 1.0, True, False, None, "Auto", "1", math.inf, torch.tensor(3), np.int64(3)]
OTHER_DTYPES: list[Any] = [torch.float64, torch.int8, torch.float8_e4m3fn, torch.complex64, "float32", "bf16", None, 16]


@pytest.mark.parametrize(
    ("name", "values", "expected"),
    [
        ("num_threads", COUNTS, "an integer of at least 1"),
        ("bucket_numel", COUNTS, "an integer of at least 1"),
        ("gpu_buckets", [-1, *COUNTS[2:]], "an integer of at least 0"),
        ("transfer_dtype", [*OTHER_DTYPES, float], "one of torch.float32, torch.bfloat16, torch.float16"),
    ],
)
def test_scheduler_refuses_arguments_before_it_changes_anything(name: str, values: list[Any], expected: str) -> None:
    optimizer = adam(model := mlp())
    for wrong in values:
        told = f"^{name} is .*, expected 'auto' or {expected}$"
        refused(ValueError, told, OffloadScheduler, optimizer, model, **{name: wrong})
    if name == "gpu_buckets":  # which the host cannot step
        refused(ValueError, "^gpu_buckets is 1, ", OffloadScheduler, optimizer, model, gpu_buckets=1)
    assert not any(parameter._post_accumulate_grad_hooks for parameter in model.parameters())
    OffloadScheduler(optimizer, model).close()


@pytest.mark.parametrize(
    "wrong",
    [
        {"gpu_buckets": -1},
        {"bucket_numel": 0},
        {"num_threads": 0},
        {"gpu_buckets": "auto"},
        {"gpu_buckets": 1, "bucket_numel": 1.5},
    ],
    ids=str,
)
def test_placements_that_are_refused_change_nothing(wrong: dict[str, Any]) -> None:
    with overlapped(device=SimulatedDevice(1), gpu_buckets=1) as (_, _, scheduler):
        before = scheduler.placement
        refused(ValueError, f"{[*wrong][-1]} is .*, expected an integer of at least ", scheduler.place, **wrong)
        assert scheduler.placement == before


# ---- models ----------------------------------------------------------------------------------------------------------


def test_wrong_kinds() -> None:
    model = mlp()
    check_model(adam(model), nn.Sequential())  # the parameters are those of the optimizer
    told = "^optimizer is a {}, expected a SpeculativeCPUAdam; make one first, or pass the one that a wrapper holds$"
    refused(TypeError, told.format("AdamW"), check_model, torch.optim.AdamW(model.parameters()), model)
    held = SimpleNamespace(optimizer=torch.optim.AdamW(model.parameters()))
    refused(TypeError, told.format("AdamW"), check_model, held, model)
    refused(TypeError, told.format("Sequential"), check_model, model, adam(model))
    refused(TypeError, "^device is 'cuda', .*; leave it out", OffloadScheduler, adam(model), model, device="cuda")
    wrapped = SimpleNamespace(base_optimizer=adam(model))  # as SAM, Lookahead and others have theirs
    for check in (OffloadScheduler, take_reduced_gradients):
        refused(TypeError, told.format("SimpleNamespace"), check, wrapped, model)
    wrapped.base_optimizer.optimizer = model  # a program's attribute
    OffloadScheduler(wrapped.base_optimizer, model).close()
    told = "^model is a function, expected the nn.Module whose parameters are optimized$"
    refused(TypeError, told, check_model, adam(model), lambda x: x)
    refused(ValueError, "^the model has none of the optimizer's parameters, ", check_model, adam(model), mlp())


# ---- several ranks ---------------------------------------------------------------------------------------------------


@pytest.fixture(params=[2])
def two_ranks(request: pytest.FixtureRequest) -> Iterator[None]:
    """Make this process the first of two, the other of which need not be there."""
    fake_pg = pytest.importorskip("torch.testing._internal.distributed.fake_pg")
    torch.distributed.init_process_group("fake", store=fake_pg.FakeStore(), rank=0, world_size=request.param)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("two_ranks", [1, 2], indirect=True)
def test_several_ranks_are_refused(two_ranks: None) -> None:
    optimizer = adam(model := mlp())
    if torch.distributed.get_world_size() == 1:
        check_model(optimizer, model)
        return
    told = r"^this is one of 2 ranks, and .*, expected one rank, or .*; shard the model, .*, or train without an "
    refused(RuntimeError, told, OffloadScheduler, optimizer, model)
    assert not any(parameter._post_accumulate_grad_hooks for parameter in model.parameters())


def test_sharded_parameters_may_have_ranks(two_ranks: None) -> None:
    weight = nn.Parameter(distribute_tensor(torch.ones(4), init_device_mesh("cpu", (2,)), [Shard(0)]))
    optimizer = SpeculativeCPUAdam([nn.Parameter(torch.ones(2)), weight])
    assert check_model(optimizer, nn.Module()) is optimizer


@pytest.mark.parametrize("wrapper", [nn.parallel.DistributedDataParallel, FullyShardedDataParallel])
def test_wrapped_models_are_refused_wherever_the_wrapper_is(wrapper: Any, two_ranks: None) -> None:
    model = wrapper(mlp(), device_id=torch.device("cpu")) if wrapper is FullyShardedDataParallel else wrapper(mlp())
    told = f"^the model is wrapped in {wrapper.__name__}, .*; train this one without an OffloadScheduler$"
    for one in (model, nn.Sequential(nn.Linear(8, 8), model)):
        refused(RuntimeError, told, check_model, SpeculativeCPUAdam(model.parameters()), one)


def test_no_rank_of_fsdp1_clips_by_its_own_part_or_skips_silently(two_ranks: None) -> None:
    model = FullyShardedDataParallel(mlp(), device_id=torch.device("cpu"))
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer = SpeculativeCPUAdam(model.parameters(), max_grad_norm=1.0)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    refused(RuntimeError, "^max_grad_norm is 1.0, but under FSDP1 .* call clip_grad_norm_", optimizer.step)
    optimizer.max_grad_norm = None
    optimizer.clip_grad_norm_(2.0)
    refused(RuntimeError, "^max_grad_norm is 2.0, but under FSDP1", optimizer.step)
    assert all(map(torch.equal, before, model.parameters()))
    optimizer.zero_grad()  # takes the limit back
    for limit in (None, math.inf):
        optimizer.max_grad_norm = limit
        optimizer.step()
    next(model.parameters()).grad = torch.full_like(next(model.parameters()), math.nan)
    refused(FloatingPointError, r"\d+ gradient elements are Inf or NaN", optimizer.step)


def wrapped_by_lightning(optimizer: SpeculativeCPUAdam) -> Any:
    from lightning.pytorch.core.optimizer import LightningOptimizer  # takes seconds

    return LightningOptimizer(optimizer)


@pytest.mark.parametrize(
    "wrapper",
    [
        lambda optimizer: SimpleNamespace(optimizer=optimizer),
        pytest.param(wrapped_by_lightning, marks=pytest.mark.slow),
    ],
)
def test_optimizers_in_wrappers(wrapper: Any) -> None:
    optimizer = adam(model := mlp())
    with OffloadScheduler(wrapper(optimizer), model) as scheduler:
        assert scheduler.optimizer is optimizer
