"""The optimizers that are measured against one another, each over the same bf16 model.

Owns what each of them does after backward, and which of them one process measures in turn. All do AdamW on fp32
masters, and take the global norm to clip by it.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import torch
from measures.contests import MAX_GRAD_NORM
from torch import Tensor, nn

from gpucheck.models import wait_for
from superadam import OffloadScheduler, Placement, SpeculativeCPUAdamW
from superadam.cli.bench.arrays import ADAMW_OPTIONS
from superadam.testing import SimulatedDevice

ALONE, OVERLAPPED, PLAIN = "no optimizer", "superadam", "superadam, plain"
ON_DEVICE, ON_HOST = "torch on the GPU", "torch on the CPU"

SIDES = (ALONE, OVERLAPPED, ON_DEVICE, PLAIN, ON_HOST)
"""By name, in the order in which they are shown.

PLAIN is what a user has without a scheduler, with pageable copies; ON_HOST copies through pinned memory, as OVERLAPPED.
"""


class Side(abc.ABC):
    """An optimizer of a model; made before the first forward."""

    warm_ups = 2
    """Steps before those that count: the first touches memory."""

    times_backward = False
    """Whether nothing that it does would be in the way of timing backward by itself."""

    @abc.abstractmethod
    def update(self) -> None:
        """Make of the gradients new parameters, and drop the gradients."""

    def figures(self) -> dict[str, Any]:
        """Return what it can tell of itself, as JSON holds it."""
        return {}


class NoOptimizer(Side):
    """Forward and backward alone: what is left where everything else is hidden."""

    times_backward = True

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
        self._adamw = torch.optim.AdamW(self._masters, fused=True, **ADAMW_OPTIONS)

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
        self._adamw = torch.optim.AdamW(self._masters, fused=True, **ADAMW_OPTIONS)

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


class PlacementRefusedError(Exception):
    """The scheduler cannot meet a placement of the sweep."""


class Superadam(Side):
    """superadam: plain at first, with a scheduler from `overlap()` until `close()`; the state goes on."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._optimizer = SpeculativeCPUAdamW(model.parameters(), max_grad_norm=MAX_GRAD_NORM, **ADAMW_OPTIONS)
        self._scheduler: OffloadScheduler | None = None
        self._chosen: Placement | None = None

    def overlap(self) -> Side:
        """Let a new scheduler choose where steps are made; a model on the CPU gets a device that can keep state."""
        self.close()
        device = SimulatedDevice(0) if next(self._model.parameters()).is_cpu else None
        self._scheduler = OffloadScheduler(self._optimizer, self._model, device=device)
        self.warm_ups = 5  # placements are tried, then state moves
        return self

    def place(self, name: str) -> Side:
        """Change what "auto" chose for this scheduler to one of `PLACEMENTS`.

        Raises:
            PlacementRefusedError: it cannot be met.
        """
        if self._scheduler is None:
            self.overlap()
        assert self._scheduler is not None
        self._chosen = chosen = self._chosen or self._scheduler.placement
        total = sum(parameter.numel() for parameter in self._model.parameters())
        unchanged = {key: getattr(chosen, key) for key in ("gpu_buckets", "bucket_numel", "num_threads")}
        try:
            self._scheduler.place(**unchanged | PLACEMENTS[name](chosen, total))
        except ValueError as error:
            raise PlacementRefusedError(str(error)) from error
        self.warm_ups = 2
        return self

    def close(self) -> Side:
        """Let steps be plain ones again."""
        scheduler, self._scheduler, self._chosen = self._scheduler, None, None
        if scheduler is not None:
            scheduler.close()
        self.warm_ups = 2
        return self

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


PLACEMENTS: dict[str, Callable[[Placement, int], dict[str, int]]] = {
    "nothing on the GPU": lambda chosen, total: {"gpu_buckets": 0},
    "1/4 on the GPU": lambda chosen, total: {"gpu_buckets": -(-total // (4 * chosen.bucket_numel))},
    "1/2 on the GPU": lambda chosen, total: {"gpu_buckets": -(-total // (2 * chosen.bucket_numel))},
    "half the threads": lambda chosen, total: {"num_threads": -(-chosen.num_threads // 2)},
    "buckets of 1/4": lambda chosen, total: {
        "gpu_buckets": 4 * chosen.gpu_buckets,
        "bucket_numel": -(-chosen.bucket_numel // 4),
    },
}
"""By name, what differs from the choice of "auto", for a model of a given number of elements."""

AUTO = f"{OVERLAPPED}, auto"
"""The choice that the placements of a sweep are compared with, measured in the same run."""

SWEPT = (AUTO, *(f"{OVERLAPPED}, {name}" for name in PLACEMENTS))

Trial = tuple[str, int, Callable[[], Side]]
"""The name under which something is measured, sequences in a step, and what makes it ready."""


def _overlapped(model: nn.Module, batches: Sequence[int]) -> list[Trial]:
    superadam = cache(lambda: Superadam(model))
    alone: list[Trial] = [(ALONE, batch, lambda: NoOptimizer(model)) for batch in batches]
    return alone + [(OVERLAPPED, batch, lambda: superadam().overlap()) for batch in batches]


def _swept(model: nn.Module, batches: Sequence[int]) -> list[Trial]:
    superadam = cache(lambda: Superadam(model))
    first = batches[0]  # where Adam is longest compared with backward, and the choice matters most
    sweep: list[Trial] = [
        (f"{OVERLAPPED}, {name}", first, partial(lambda name: superadam().place(name), name)) for name in PLACEMENTS
    ]
    plain: list[Trial] = [(PLAIN, batch, lambda: superadam().close()) for batch in batches]
    return [(AUTO, first, lambda: superadam().overlap()), *sweep, *plain]


def _one(name: str, make: Callable[[nn.Module], Side], model: nn.Module, batches: Sequence[int]) -> list[Trial]:
    made = cache(lambda: make(model))
    return [(name, batch, made) for batch in batches]


SWEEP = "placements"

PROGRAMS: dict[str, Callable[[nn.Module, Sequence[int]], list[Trial]]] = {
    OVERLAPPED: _overlapped,
    ON_DEVICE: partial(_one, ON_DEVICE, TorchOnDevice),
    SWEEP: _swept,
    ON_HOST: partial(_one, ON_HOST, TorchOnHost),
}
"""What a process measures, one after the other; every batch size has a scheduler of its own."""
