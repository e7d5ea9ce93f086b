"""torch's learning-rate schedulers drive ours as they drive torch's AdamW."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.optimizers import copy_weights, make
from support.visible import parameter, state_bits, train, visible
from torch.optim import lr_scheduler, swa_utils

from superadam import SpeculativeCPUAdamW

SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "StepLR": lambda optimizer: lr_scheduler.StepLR(optimizer, 2, 0.5),
    "MultiStepLR": lambda optimizer: lr_scheduler.MultiStepLR(optimizer, [1, 3]),
    "LambdaLR": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.9**epoch),
    "MultiplicativeLR": lambda optimizer: lr_scheduler.MultiplicativeLR(optimizer, lambda epoch: 0.9),
    "ConstantLR": lambda optimizer: lr_scheduler.ConstantLR(optimizer, 0.5, 2),
    "LinearLR": lambda optimizer: lr_scheduler.LinearLR(optimizer, 0.5, total_iters=3),
    "ExponentialLR": lambda optimizer: lr_scheduler.ExponentialLR(optimizer, 0.5),
    "PolynomialLR": lambda optimizer: lr_scheduler.PolynomialLR(optimizer, 4, 0.9),
    "OneCycleLR": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=6),  # cycles beta1 too
    "CyclicLR": lambda optimizer: lr_scheduler.CyclicLR(optimizer, 0.001, 0.1, 2),  # as well
    "CosineAnnealingLR": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 3),
    "CosineAnnealingWarmRestarts": lambda optimizer: lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 2),
    "ReduceLROnPlateau": lambda optimizer: lr_scheduler.ReduceLROnPlateau(optimizer, patience=0),
    "SequentialLR": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer, [lr_scheduler.LinearLR(optimizer, 0.1), lr_scheduler.ExponentialLR(optimizer, 0.5)], [2]
    ),
    "ChainedScheduler": lambda optimizer: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(optimizer, 0.5, 2), lr_scheduler.MultiplicativeLR(optimizer, lambda epoch: 0.75)],
        optimizer,
    ),
    "SWALR": lambda optimizer: swa_utils.SWALR(optimizer, 0.5, 3),
}

pytestmark = pytest.mark.filterwarnings("error:Detected call of", "ignore:The epoch parameter")


def test_every_scheduler_of_torch_is_here() -> None:
    assert SCHEDULERS.keys() == {*lr_scheduler.__all__, "SWALR"} - {"LRScheduler"}


def test_a_rate_that_a_scheduler_takes_below_zero_counts_as_in_torch() -> None:
    first, second = (kind([parameter(64)], fused=True) for kind in (SpeculativeCPUAdamW, torch.optim.AdamW))
    schedulers = [lr_scheduler.LambdaLR(one, lambda epoch: 1 - epoch) for one in (first, second)]
    for seed in range(4):
        for one, its in zip((first, second), schedulers, strict=True):
            train(one, seed, speculative=one is first)
            its.step()
    assert first.param_groups[0]["lr"] < 0
    assert state_bits(first) == state_bits(second)
    with pytest.raises(ValueError, match=r"Invalid learning rate: -1.0; expected"):
        SpeculativeCPUAdamW([parameter(64)], lr=-1.0)


@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.parametrize("is_tensor", [False, True], ids=["float lr", "Tensor lr"])
@pytest.mark.parametrize("speculative", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_schedulers(name: str, is_tensor: bool, speculative: bool, dtype: torch.dtype) -> None:
    """Learning rates and betas are those that torch's AdamW gets, and the steps are made with them.

    Copies of scheduler and optimizer, and others that load their state in the middle, go on as if never stopped.
    """
    lr = torch.tensor(0.01, dtype=torch.float64) if is_tensor else 0.01
    optimizer, other = (make(dtype, lr=copy.deepcopy(lr)) for _ in range(2))
    reference, twin = make(cls=torch.optim.AdamW, lr=copy.deepcopy(lr)), make(dtype)
    scheduler, its_scheduler, second = (SCHEDULERS[name](one) for one in (optimizer, reference, other))
    scheduled = [(reference, its_scheduler), (optimizer, scheduler)]
    rates = set()
    for seed in range(6):
        if seed == 3:
            second.load_state_dict(copy.deepcopy(scheduler.state_dict()))
            other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            copy_weights(other, optimizer)
            third = copy.deepcopy(scheduler)
            scheduled += [(other, second), (third.optimizer, third)]
        twin.param_groups[0].update({key: optimizer.param_groups[0][key] for key in ("lr", "betas")})
        twin.param_groups[0]["lr"] = float(twin.param_groups[0]["lr"])
        rates.add(twin.param_groups[0]["lr"])
        train(twin, seed)
        for one, its in scheduled:
            train(one, seed, speculative=speculative and one is not reference)
            if seed < 5:
                its.step(*([1.0] if name == "ReduceLROnPlateau" else []))
        for key in ("lr", "betas"):
            assert optimizer.param_groups[0][key] == reference.param_groups[0][key]
    assert isinstance(optimizer.param_groups[0]["lr"], torch.Tensor) is is_tensor
    assert state_bits(optimizer) == state_bits(twin)
    assert visible(optimizer) == visible(other) == visible(third.optimizer)
    assert len(rates) > 1  # something was scheduled
