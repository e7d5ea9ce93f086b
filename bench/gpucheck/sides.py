"""The optimizers that are measured against one another, each over the same bf16 model.

Owns what each of them does after backward. All do AdamW on fp32 masters, and take the global norm to clip by it.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from superadam import OffloadScheduler, SpeculativeCPUAdamW
from superadam.cli.bench.arrays import HYPERPARAMETERS
from superadam.cli.bench.contests import MAX_GRAD_NORM
from superadam.cli.train.device import wait_for

_OPTIONS = {
    "lr": HYPERPARAMETERS.lr,
    "betas": (HYPERPARAMETERS.beta1, HYPERPARAMETERS.beta2),
    "eps": HYPERPARAMETERS.eps,
    "weight_decay": HYPERPARAMETERS.weight_decay,
}


class Side(abc.ABC):
    """An optimizer of a model; made before the first forward."""

    @abc.abstractmethod
    def update(self) -> None:
        """Make of the gradients new parameters, and drop the gradients."""

    def close(self) -> None:  # noqa: B027 - most have nothing to close
        """End what works beside training."""

    def figures(self) -> dict[str, Any]:
        """Return what it can tell of itself, as JSON holds it."""
        return {}


class NoOptimizer(Side):
    """Forward and backward alone: what is left where everything else is hidden."""

    def __init__(self, model: nn.Module) -> None:
        self._parameters = list(model.parameters())

    def update(self) -> None:
        """Drop the gradients."""
        for parameter in self._parameters:
            parameter.grad = None


class TorchOnDevice(Side):
    """torch's fused AdamW with masters and moments on the model's device: what is possible while they fit."""

    def __init__(self, model: nn.Module) -> None:
        self._parameters = list(model.parameters())
        self._masters = [nn.Parameter(parameter.detach().float()) for parameter in self._parameters]
        self._adamw = torch.optim.AdamW(self._masters, fused=True, **_OPTIONS)

    @torch.no_grad()
    def update(self) -> None:
        """Widen, clip, step and round, all on the device."""
        for parameter, master in zip(self._parameters, self._masters, strict=True):
            assert parameter.grad is not None
            master.grad = parameter.grad.float()
            parameter.grad = None
        nn.utils.clip_grad_norm_(self._masters, MAX_GRAD_NORM)
        self._adamw.step()
        torch._foreach_copy_([parameter.data for parameter in self._parameters], self._masters)
        for master in self._masters:
            master.grad = None


class TorchOnHost(Side):
    """torch's fused AdamW on the CPU, after backward; gradients go down and parameters up through pinned memory."""

    def __init__(self, model: nn.Module) -> None:
        self._parameters = list(model.parameters())
        self._device = self._parameters[0].device
        total = sum(parameter.numel() for parameter in self._parameters)
        dtype = self._parameters[0].dtype
        staging = torch.empty(total, dtype=dtype, pin_memory=self._device.type == "cuda")
        parts = staging.split([parameter.numel() for parameter in self._parameters])
        self._staged = [part.view_as(parameter) for part, parameter in zip(parts, self._parameters, strict=True)]
        self._masters = [nn.Parameter(parameter.detach().to("cpu", torch.float32)) for parameter in self._parameters]
        self._gradients = [torch.zeros_like(master) for master in self._masters]
        for master, gradient in zip(self._masters, self._gradients, strict=True):
            master.grad = gradient
        self._adamw = torch.optim.AdamW(self._masters, fused=True, **_OPTIONS)

    @torch.no_grad()
    def update(self) -> None:
        """Copy down, widen, clip, step, round, copy up."""
        for parameter, staged in zip(self._parameters, self._staged, strict=True):
            assert parameter.grad is not None
            staged.copy_(parameter.grad, non_blocking=True)
        wait_for(self._device)
        for parameter in self._parameters:
            parameter.grad = None
        torch._foreach_copy_(self._gradients, self._staged)
        nn.utils.clip_grad_norm_(self._masters, MAX_GRAD_NORM)
        self._adamw.step()
        masters: list[Tensor] = [master.detach() for master in self._masters]
        torch._foreach_copy_(self._staged, masters)
        for parameter, staged in zip(self._parameters, self._staged, strict=True):
            parameter.copy_(staged, non_blocking=True)


class Superadam(Side):
    """superadam, with the scheduler or as a plain step."""

    def __init__(self, model: nn.Module, *, overlap: bool) -> None:
        self._optimizer = SpeculativeCPUAdamW(model.parameters(), max_grad_norm=MAX_GRAD_NORM, **_OPTIONS)
        self._scheduler = OffloadScheduler(self._optimizer, model) if overlap else None

    def update(self) -> None:
        """Step."""
        self._optimizer.step()
        self._optimizer.zero_grad()

    def figures(self) -> dict[str, Any]:
        """Return where steps were made, and what the scheduler counted since it was made."""
        if self._scheduler is None:
            return {}
        placement = {name: str(value) for name, value in dataclasses.asdict(self._scheduler.placement).items()}
        return {"placement": placement, "statistics": dataclasses.asdict(self._scheduler.statistics)}

    def close(self) -> None:
        """Close the scheduler."""
        if self._scheduler is not None:
            self._scheduler.close()


PLAIN, OVERLAPPED, ALONE = "superadam, plain", "superadam", "no optimizer"

SIDES: dict[str, Callable[[nn.Module], Side]] = {
    ALONE: NoOptimizer,
    OVERLAPPED: lambda model: Superadam(model, overlap=True),
    "torch on the GPU": TorchOnDevice,
    PLAIN: lambda model: Superadam(model, overlap=False),
    "torch on the CPU": TorchOnHost,
}
"""By name, in the order of what one wants to know first."""
