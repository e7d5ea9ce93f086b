"""Small optimizers, what they may have, and steps that they make alike."""

import io
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from support.visible import parameter, parameters_of, train, visible
from torch.optim import Optimizer

from superadam import SpeculativeCPUAdam, SpeculativeCPUAdamW

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
EACH_DTYPE = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
"""All that a parameter may have."""

PAIRS = [(SpeculativeCPUAdam, torch.optim.Adam), (SpeculativeCPUAdamW, torch.optim.AdamW)]
EACH_PAIR = pytest.mark.parametrize(("ours", "theirs"), PAIRS, ids=["Adam", "AdamW"])


def make(dtype: torch.dtype = torch.float32, cls: type = SpeculativeCPUAdamW, **options: Any) -> Any:
    """Return an optimizer of two parameters."""
    return cls([parameter(70, dtype=dtype), parameter(4, 5, dtype=dtype, seed=1)], **options)


class TorchWithMasters(Optimizer):
    """Torch's fused AdamW on fp32 masters: it widens gradients, and parameters get the rounded masters."""

    def __init__(self, parameters: list[torch.nn.Parameter], **options: Any) -> None:
        super().__init__(parameters, {})
        self.parameters = parameters
        self.masters = [parameter.detach().float().clone() for parameter in parameters]
        self.adam = torch.optim.AdamW(self.masters, fused=True, **options)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for one, master in zip(self.parameters, self.masters, strict=True):
            master.grad = None if one.grad is None else one.grad.float()
        self.adam.step()
        with torch.no_grad():
            for one, master in zip(self.parameters, self.masters, strict=True):
                one.copy_(master)


def copy_weights(optimizer: Optimizer, source: Optimizer) -> None:
    with torch.no_grad():
        for one, theirs in zip(parameters_of(optimizer), parameters_of(source), strict=True):
            one.copy_(theirs)


def trained(optimizer: Any, seeds: Iterable[int] = range(2), *, speculative: bool = False) -> Any:
    for seed in seeds:
        train(optimizer, seed, speculative=speculative)
    return optimizer


def train_alike(optimizer: Any, twin: Any, *seeds: int, speculative: bool = True) -> None:
    """Make steps, the first optimizer's speculative; afterwards nothing that a user can see differs."""
    trained(optimizer, seeds, speculative=speculative)
    trained(twin, seeds)
    assert visible(optimizer) == visible(twin)


def through_disk(value: Any, *, weights_only: bool = True) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=weights_only)
