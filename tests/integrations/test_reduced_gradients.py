"""Reduced gradients on one rank: which of them there are, and what is refused."""

import copy
import gc
import pickle
import weakref
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from support.shards import local, wrap
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy

from superadam import OffloadScheduler, SpeculativeCPUAdamW
from superadam.handles.gradient_handle import taken_of
from superadam.integrations.reduced_gradients import ReducedGradients, take_reduced_gradients
from superadam.testing import SimulatedDevice

pytestmark = pytest.mark.usefixtures("one_rank")


def sharded(shard: torch.dtype = torch.bfloat16, reduced: torch.dtype | None = torch.float32) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).to(torch.bfloat16).to(shard)
    param = torch.bfloat16 if shard == torch.float32 else shard
    wrap([*model, model], mp_policy=MixedPrecisionPolicy(param_dtype=param, reduce_dtype=reduced))
    return model


def reduced(*dtypes: torch.dtype | None) -> tuple[Any, SpeculativeCPUAdamW]:
    """Return a model, and its optimizer, which takes reduced gradients."""
    model = sharded(*dtypes)
    optimizer = SpeculativeCPUAdamW(model.parameters())
    take_reduced_gradients(optimizer, model)
    return model, optimizer


def backward(model: Any) -> None:
    inputs = torch.randn(3, 4, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    (model(inputs) - 1).float().square().sum().backward()


def are_taken(model: Any) -> set[bool]:
    return {taken_of(parameter.grad) is not None for parameter in model.parameters()}


@pytest.mark.parametrize(
    ("shard", "link"),
    [(torch.bfloat16, None), (torch.bfloat16, torch.float16), (torch.float32, torch.float32), (torch.float32, None)],
    ids=str,
)
def test_gradients_that_are_not_rounded_stay(shard, link):
    model, optimizer = reduced(shard, link)
    backward(model)
    assert are_taken(model) == {False}
    optimizer.step()
    assert optimizer.statistics.committed == 1


def test_gradients_that_no_buffer_was_shown_for_stay():
    model, optimizer = reduced()
    sum(parameter.to_local().float().square().sum() for parameter in model.parameters()).backward()
    assert are_taken(model) == {False}
    optimizer.step()


def test_an_error_while_gradients_add_up_is_told_by_step(monkeypatch):
    model, optimizer = reduced()
    backward(model)
    assert are_taken(model) == {True}
    monkeypatch.setattr(ReducedGradients, "_unrounded", Mock(side_effect=MemoryError("planted")))
    backward(model)
    with pytest.raises(MemoryError, match="planted"):
        optimizer.step()


def test_adding_to_them_after_a_step_leaves_what_is_to_be_committed():
    shown = []
    for speculates in (False, True):
        model, optimizer = reduced()
        for _ in range(3):
            backward(model)
            if speculates:
                optimizer.speculate()
            optimizer.step()
            backward(model)
        shown.append([local(optimizer.state[parameter]["exp_avg"]) for parameter in model.parameters()])
    assert all(map(torch.equal, *shown))


def test_copies_have_no_part_in_it():
    model, optimizer = reduced()
    backward(model)
    assert pickle.loads(pickle.dumps(optimizer))._binding.source is None
    assert copy.deepcopy(optimizer)._binding.source is None


def test_it_lasts_as_long_as_the_optimizer():
    model, optimizer = reduced()
    backward(model)
    gone = weakref.ref(optimizer)
    gradients = [local(parameter.grad) + 0 for parameter in model.parameters()]
    gc.disable()
    try:
        del optimizer
        assert gone() is None
    finally:
        gc.enable()
    assert all(torch.equal(local(p.grad) + 0, one) for p, one in zip(model.parameters(), gradients, strict=True))
    model.zero_grad()
    backward(model)
    assert are_taken(model) == {False}


def test_it_stays_through_loading_and_in_wrappers():
    model = sharded()
    optimizer = SpeculativeCPUAdamW(model.parameters())
    take_reduced_gradients(SimpleNamespace(optimizer=optimizer), model)
    for _ in range(2):
        backward(model)
        assert are_taken(model) == {True}
        optimizer.step()
        source = optimizer._binding.source
        assert source._buffer is source._rounded is None  # they hold memory of the device
        optimizer.zero_grad()
        optimizer.load_state_dict(optimizer.state_dict())


def test_parameters_that_are_replaced():
    """They are noticed by the step."""
    (model, optimizer), other = reduced(), sharded()
    take_reduced_gradients(optimizer, other)
    backward(model)
    optimizer.step()
    optimizer.param_groups[0]["params"] = list(other.parameters())
    optimizer.step()
    for one in (model, other):
        one.zero_grad()
        backward(one)
    assert (are_taken(model), are_taken(other)) == ({False}, {True})


def test_gradients_that_were_there_before_stay_ordinary():
    model = sharded()
    optimizer = SpeculativeCPUAdamW(model.parameters())
    backward(model)
    gradients = [local(parameter.grad).clone() for parameter in model.parameters()]
    take_reduced_gradients(optimizer, model)
    backward(model)
    assert are_taken(model) == {False}
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        assert torch.equal(local(parameter.grad), 2 * gradient)
    optimizer.step()


@pytest.mark.parametrize("transfer_dtype", ["auto", torch.bfloat16], ids=str)
@pytest.mark.parametrize("shard", [torch.bfloat16, torch.float32], ids=str)
def test_a_scheduler_has_room_for_gradients_as_they_travel(shard, transfer_dtype):
    model, optimizer = reduced(shard)
    with OffloadScheduler(optimizer, model, device=SimulatedDevice(0), transfer_dtype=transfer_dtype) as scheduler:
        backward(model)
        optimizer.step()
        assert scheduler._needs.pending == scheduler.statistics.downloaded_bytes > 0


def test_nothing_that_fails_is_attached(monkeypatch):
    model = sharded()
    optimizer = SpeculativeCPUAdamW(model.parameters())
    plain = SpeculativeCPUAdamW(nn.Linear(4, 4).parameters())
    with pytest.raises(TypeError, match="optimizer is a SGD, expected a SpeculativeCPUAdam; make one first"):
        take_reduced_gradients(torch.optim.SGD(model.parameters()), model)
    for some, of, told in [(plain, model, "3 modules .* and 0 parameters"), (optimizer, nn.Linear(4, 4), "0 modules")]:
        with pytest.raises(ValueError, match=f"{told} .*, expected some of both; call fully_shard"):
            take_reduced_gradients(some, of)
    with monkeypatch.context() as patch:
        patch.setattr(DeviceMesh, "device_type", "cuda")
        with pytest.raises(ValueError, match=r"shards lie in host memory .*, expected both in one place; keep fp32"):
            take_reduced_gradients(optimizer, model)
    with monkeypatch.context() as patch:
        patch.setattr(FSDPModule, "set_all_reduce_hook", Mock(side_effect=ValueError("planted")))
        with pytest.raises(ValueError, match=r"cannot show its reduced gradients \(planted\), expected one mesh"):
            take_reduced_gradients(optimizer, model)
    assert optimizer._binding.source is plain._binding.source is None
    backward(model)
    assert are_taken(model) == {False}
