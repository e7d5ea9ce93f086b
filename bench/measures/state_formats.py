"""Ways to store Adam's state, by name: superadam's, and others to compare with.

Each makes an optimizer over bf16 or fp32 parameters whose gradients are in `.grad`. Those of others run over fp32
masters, and copy them to the parameters, as a script would.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer

from superadam import SpeculativeCPUAdamW

Groups = Sequence[dict[str, Any]]
"""Parameter groups as of `torch.optim`: `params` and `weight_decay`."""

Betas = tuple[float, float]


class Side(Protocol):
    """An optimizer that is compared."""

    def step(self, lr: float) -> None:
        """Make one step with the gradients in `.grad`."""

    def masters(self) -> list[Tensor]:
        """Return the fp32 values of all parameters, flat, in the order of the groups."""


class Ours:
    """superadam's AdamW."""

    def __init__(self, groups: Groups, betas: Betas, **formats: Any) -> None:
        self._optimizer = SpeculativeCPUAdamW(groups, lr=0.0, betas=betas, **formats)

    def step(self, lr: float) -> None:
        """Make one step."""
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        self._optimizer.step()

    def masters(self) -> list[Tensor]:
        """Return the published masters, or the parameters that are their own."""
        state, groups = self._optimizer.state, self._optimizer.param_groups
        return [
            state[p].get("master", p.detach()).float().flatten().clone() for group in groups for p in group["params"]
        ]


class OverMasters:
    """An optimizer over fp32 masters; `round_off` may change its state, or the masters, after each step."""

    def __init__(
        self,
        groups: Groups,
        make: Callable[[Groups], Optimizer],
        round_off: Callable[[Optimizer], None] = lambda optimizer: None,
    ) -> None:
        self._parameters = [p for group in groups for p in group["params"]]
        self._masters = [p if p.dtype is torch.float32 else p.detach().float() for p in self._parameters]
        of = dict(zip(self._parameters, self._masters, strict=True))
        self._optimizer = make([{**group, "params": [of[p] for p in group["params"]]} for group in groups])
        self._round_off = round_off

    @torch.no_grad()
    def step(self, lr: float) -> None:
        """Make one step with widened gradients."""
        for group in self._optimizer.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(lr)
            else:
                group["lr"] = lr
        for parameter, master in zip(self._parameters, self._masters, strict=True):
            assert parameter.grad is not None
            master.grad = parameter.grad.float()
        self._optimizer.step()
        self._round_off(self._optimizer)
        for parameter, master in zip(self._parameters, self._masters, strict=True):
            if parameter is not master:
                parameter.copy_(master)

    def masters(self) -> list[Tensor]:
        """Return copies."""
        return [master.detach().flatten().clone() for master in self._masters]


def _round(tensor: Tensor) -> None:
    tensor.copy_(tensor.bfloat16())


def _round_moments(optimizer: Optimizer) -> None:
    for state in optimizer.state.values():
        _round(state["exp_avg"])
        _round(state["exp_avg_sq"])


def _round_masters(optimizer: Optimizer) -> None:
    for group in optimizer.param_groups:
        for master in group["params"]:
            _round(master)


def _torch(groups: Groups, betas: Betas, round_off: Callable[[Optimizer], None]) -> Side:
    return OverMasters(groups, lambda g: torch.optim.AdamW(g, lr=0.0, betas=betas, fused=True), round_off)


def _of_package(name: str) -> Callable[[Groups, Betas], Side]:
    def make(groups: Groups, betas: Betas) -> Side:
        optim: Any = importlib.import_module(name)  # typed in none, and installed in few
        return OverMasters(groups, lambda g: optim.AdamW8bit(g, lr=0.0, betas=betas))

    return make


@dataclass(frozen=True, slots=True)
class StateFormat:
    """A way to store state.

    Attributes:
        name: short.
        state_bytes: of master and moments, for one parameter.
        make: returns an optimizer over parameter groups.
        package: what has to be installed for it.
        has_narrow_moments, has_narrow_masters: whether these are not fp32.
    """

    name: str
    state_bytes: float
    make: Callable[[Groups, Betas], Side]
    package: str = "superadam"
    has_narrow_moments: bool = True
    has_narrow_masters: bool = False

    @property
    def is_ours(self) -> bool:
        """Whether superadam stores state so."""
        return self.package == "superadam"

    def is_installed(self) -> bool:
        """Return whether it can be run here."""
        return importlib.util.find_spec(self.package) is not None


FORMATS = {
    format.name: format
    for format in (
        StateFormat("fp32", 12, lambda g, b: Ours(g, b), has_narrow_moments=False),
        StateFormat("bf16", 8, lambda g, b: Ours(g, b, moments="bf16")),
        StateFormat("8bit", 6 + 2 / 64, lambda g, b: Ours(g, b, moments="8bit")),
        StateFormat(
            "24bit", 11, lambda g, b: Ours(g, b, master="24bit"), has_narrow_moments=False, has_narrow_masters=True
        ),
        StateFormat(
            "8bit+24bit", 5 + 2 / 64, lambda g, b: Ours(g, b, moments="8bit", master="24bit"), has_narrow_masters=True
        ),
        StateFormat("bf16 moments to nearest", 8, lambda g, b: _torch(g, b, _round_moments), "torch"),
        StateFormat(
            "bf16 master to nearest",
            10,
            lambda g, b: _torch(g, b, _round_masters),
            "torch",
            has_narrow_moments=False,
            has_narrow_masters=True,
        ),
        StateFormat("bitsandbytes AdamW8bit", 6 + 8 / 256, _of_package("bitsandbytes.optim"), "bitsandbytes"),
        StateFormat("torchao AdamW8bit", 6 + 8 / 256, _of_package("torchao.optim"), "torchao"),
    )
}
"""fp32 is what the others are compared with."""
