"""What a scheduler cannot be made for is refused, in one sentence, before anything has changed."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from overlap import adam, mlp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from superadam import OffloadScheduler, SpeculativeCPUAdam
from superadam.admission import LINK_DTYPES, check_count, check_link_dtype, check_model


def refused(error: type[Exception], sentence: str, check: Any, *arguments: Any, **options: Any) -> None:
    with pytest.raises(error, match=sentence) as caught:
        check(*arguments, **options)
    assert "\n" not in str(caught.value)


# ---- arguments -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", ["auto", 1, 2, 10**12])
def test_counts(value: Any) -> None:
    check_count("cores", value)


@pytest.mark.parametrize("value", [0, -1, 1.0, True, False, None, "Auto", "1", math.inf, torch.tensor(3)])
def test_counts_that_are_refused(value: Any) -> None:
    refused(ValueError, "^cores is .*, expected 'auto' or an integer of at least 1$", check_count, "cores", value)


def test_least_count() -> None:
    check_count("gpu_buckets", 0, least=0)
    told = "^gpu_buckets is -1, expected 'auto' or an integer of at least 0$"
    refused(ValueError, told, check_count, "gpu_buckets", -1, least=0)


def test_counts_that_may_not_be_automatic() -> None:
    check_count("cores", 2, may_be_auto=False)
    told = "^cores is 'auto', expected an integer of at least 1$"
    refused(ValueError, told, check_count, "cores", "auto", may_be_auto=False)


@pytest.mark.parametrize("value", ["auto", *LINK_DTYPES], ids=str)
def test_link_dtypes(value: Any) -> None:
    check_link_dtype(value)


@pytest.mark.parametrize(
    "value", [torch.float64, torch.int8, torch.float8_e4m3fn, torch.complex64, "float32", "fp16", None, 16, float]
)
def test_link_dtypes_that_are_refused(value: Any) -> None:
    told = r"^link_dtype is .*, expected 'auto' or one of torch.float32, torch.bfloat16, torch.float16$"
    refused(ValueError, told, check_link_dtype, value)


@pytest.mark.parametrize(
    "options",
    [{"link_dtype": torch.float64}, {"link_dtype": "bf16"}, {"bucket_numel": np.int64(3)}, {"cores": "all"}],
    ids=str,
)
def test_scheduler_refuses_them_before_it_changes_anything(options: dict[str, Any]) -> None:
    model = mlp()
    optimizer = adam(model)
    refused(ValueError, f"^{next(iter(options))} is ", OffloadScheduler, optimizer, model, **options)
    assert not any(parameter._post_accumulate_grad_hooks for parameter in model.parameters())
    OffloadScheduler(optimizer, model).close()


# ---- models ----------------------------------------------------------------------------------------------------------


def test_models_and_optimizers() -> None:
    model = mlp()
    check_model(adam(model), model)
    check_model(adam(model, max_grad_norm=math.inf), model)
    check_model(adam(model, max_grad_norm=None), model)  # as torch's, which has no limit
    check_model(adam(model), nn.Sequential())  # the parameters are those of the optimizer


def test_wrong_kinds() -> None:
    model = mlp()
    told = "^optimizer is a {}, expected a SpeculativeCPUAdam; make one first$"
    refused(TypeError, told.format("AdamW"), check_model, torch.optim.AdamW(model.parameters()), model)
    refused(TypeError, told.format("Sequential"), check_model, model, adam(model))
    told = "^model is a function, expected the nn.Module whose parameters are optimized$"
    refused(TypeError, told, check_model, adam(model), lambda x: x)


# ---- several ranks ---------------------------------------------------------------------------------------------------


@pytest.fixture
def two_ranks() -> Iterator[None]:
    """Make this process the first of two, the other of which need not be there."""
    fake_pg = pytest.importorskip("torch.testing._internal.distributed.fake_pg")
    torch.distributed.init_process_group("fake", store=fake_pg.FakeStore(), rank=0, world_size=2)
    yield
    torch.distributed.destroy_process_group()


def sharded(*placements: Any) -> nn.Module:
    """Return a model whose weights are sharded as `fully_shard` shards them."""
    mesh = init_device_mesh("cpu", (2,))
    model = mlp()
    for module, placement in zip(model[::2], placements, strict=False):
        for name, parameter in list(module.named_parameters()):
            module.register_parameter(name, nn.Parameter(distribute_tensor(parameter.detach(), mesh, [placement])))
    return model


def test_several_ranks_without_sharded_parameters_are_refused(two_ranks: None) -> None:
    model = mlp()
    optimizer = adam(model)
    told = (
        r"^this is one of 2 ranks, but no parameter is a DTensor, so every rank would train on its own gradients; "
        r"shard the model with torch.distributed.fsdp.fully_shard \(FSDP2\) before making the optimizer$"
    )
    refused(RuntimeError, told, check_model, optimizer, model)
    refused(RuntimeError, told, OffloadScheduler, optimizer, model)
    assert not any(parameter._post_accumulate_grad_hooks for parameter in model.parameters())


@pytest.mark.parametrize("placements", [[Shard(0)] * 3, [Replicate()] * 3, [Shard(0)]], ids=str)
def test_several_ranks_with_sharded_parameters_are_admitted(two_ranks: None, placements: list[Any]) -> None:
    model = sharded(*placements)
    assert isinstance(model[0].weight, DTensor)
    check_model(SpeculativeCPUAdam(model.parameters(), max_grad_norm=1.0), model)


def test_optimizer_made_before_sharding_is_refused(two_ranks: None) -> None:
    model = mlp()
    optimizer = adam(model)
    told = "shard the model with .* before making the optimizer$"
    refused(RuntimeError, told, check_model, optimizer, sharded(Shard(0), Shard(0), Shard(0)))


def test_distributed_data_parallel_is_refused_wherever_it_is(two_ranks: None) -> None:
    model = mlp()
    wrapped = nn.parallel.DistributedDataParallel(model)
    told = (
        r"^the model is wrapped in DistributedDataParallel, .*use torch.distributed.fsdp.fully_shard \(FSDP2\) instead$"
    )
    for one in (wrapped, nn.Sequential(nn.Linear(8, 8), wrapped)):
        refused(RuntimeError, told, check_model, adam(model), one)


def test_one_rank_alone_needs_no_sharding() -> None:
    fake_pg = pytest.importorskip("torch.testing._internal.distributed.fake_pg")
    torch.distributed.init_process_group("fake", store=fake_pg.FakeStore(), rank=0, world_size=1)
    try:
        model = mlp()
        check_model(adam(model), model)
    finally:
        torch.distributed.destroy_process_group()
