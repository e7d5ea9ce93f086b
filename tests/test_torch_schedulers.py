"""torch's learning-rate schedulers drive ours as they drive torch's AdamW."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler
from visible import parameter, state_bits, train

from superadam import SpeculativeCPUAdamW


def make(cls: type = SpeculativeCPUAdamW, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    return cls([parameter(70, dtype=dtype), parameter(4, 5, dtype=dtype, seed=1)], **options)


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "StepLR": lambda optimizer: lr_scheduler.StepLR(optimizer, 2, 0.5),
    "LambdaLR": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.9**epoch),
    "OneCycleLR": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=6),  # cycles beta1 too
    "CosineAnnealingLR": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 3),
    "ReduceLROnPlateau": lambda optimizer: lr_scheduler.ReduceLROnPlateau(optimizer, patience=0),
    "SequentialLR": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer, [lr_scheduler.LinearLR(optimizer, 0.1), lr_scheduler.ExponentialLR(optimizer, 0.5)], [2]
    ),
}


@pytest.mark.filterwarnings("error:Detected call of", "ignore:The epoch parameter")
@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.parametrize("is_tensor", [False, True], ids=["float lr", "Tensor lr"])
@pytest.mark.parametrize("speculative", [False, True])
def test_schedulers(name: str, is_tensor: bool, speculative: bool) -> None:
    """Learning rates and betas are those that torch's AdamW gets, and the steps are made with them."""

    def lr() -> Any:
        return torch.tensor(0.01, dtype=torch.float64) if is_tensor else 0.01

    optimizer, reference, twin = make(lr=lr()), make(torch.optim.AdamW, lr=lr()), make()
    schedulers = [SCHEDULERS[name](one) for one in (optimizer, reference)]
    rates = set()
    for seed in range(5):
        train(reference, seed)
        train(optimizer, seed, speculative=speculative)
        twin.param_groups[0].update({key: optimizer.param_groups[0][key] for key in ("lr", "betas")})
        twin.param_groups[0]["lr"] = float(twin.param_groups[0]["lr"])
        train(twin, seed)
        rates.add(twin.param_groups[0]["lr"])
        for scheduler in schedulers:
            scheduler.step(*([1.0] if name == "ReduceLROnPlateau" else []))
        for key in ("lr", "betas"):
            assert optimizer.param_groups[0][key] == reference.param_groups[0][key]
    assert isinstance(optimizer.param_groups[0]["lr"], torch.Tensor) is is_tensor
    assert state_bits(optimizer) == state_bits(twin)
    assert len(rates) > 1  # something was scheduled
