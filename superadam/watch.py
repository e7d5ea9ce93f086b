"""Watches a model for whoever overwrites its parameters during backward.

Owns which parameters are unsettled (their gradient was taken, and their step has no verdict yet), and the backwards
that are under way. Refuses a forward over unsettled parameters, and keeps them out of state dicts.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.utils.hooks import RemovableHandle

from superadam.blocks import awaited_parameters
from superadam.hooks import Taker, attach

present_backward: Callable[[], int] = torch._C._current_graph_task_id
"""Returns what autograd calls its running backward."""

NO_BACKWARD = -1
"""What it calls it when there is none."""

REMEDY = (
    "leave gradients to accumulate() for all but the last backward, call optimizer.step() before the next forward, "
    "or make the scheduler with overlap=False for this model"
)
"""What a person can do about a graph that needs a parameter's old value after its gradient is complete."""


class Keeper(Taker, Protocol):
    """Who overwrites parameters, as seen from the watch."""

    def await_parameters(self, parameters: frozenset[int]) -> None:
        """Parameters with these ids are about to be read."""

    def catch_up(self) -> None:
        """Return when everything that was taken is speculated on."""

    def accepted_value(self, parameter: Tensor) -> Tensor | None:
        """Return a parameter's value after the last accepted step, where the parameter itself shows another."""

    def abandon(self) -> None:
        """Drop the open step."""


class ModelWatch:
    """Hooks on a model, and what they have seen.

    Args:
        model: every forward and state dict of it is watched.
        keeper: is told.

    Attributes:
        reports_reads: whether to report which parameters a forward or a state dict is about to read.
        unreported: ids of followed parameters that no forward of the model reports.
    """

    def __init__(self, model: nn.Module, keeper: Keeper) -> None:
        self._model = model
        self._keeper = keeper
        self.reports_reads = False
        self.unreported: frozenset[int] = frozenset()
        self._handles: list[RemovableHandle] = []
        self._awaited: dict[nn.Module, frozenset[int]] = {}
        self._unsettled: set[int] = set()  # ids: compiled hooks cannot look at sets of tensors
        self._running: set[int] = set()  # backwards that gave gradients and have not ended
        self._is_counted = False  # whether the present one is among them

    def follow(self, parameters: Iterable[Tensor]) -> None:
        """Hook these parameters and the model, instead of what was hooked before."""
        self.let_go()
        followed = list(parameters)  # also frozen ones, which may be trained later
        self._handles = attach(self._model, followed, self, self._keeper)
        self._awaited = awaited_parameters(self._model)
        self.unreported = frozenset(map(id, followed)).difference(*self._awaited.values())

    def let_go(self) -> None:
        """Remove every hook."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    @property
    def has_unsettled(self) -> bool:
        """Whether a gradient was taken since the last verdict."""
        return bool(self._unsettled)

    def check_settled(self, parameter: Tensor, name: str) -> None:
        """Raise if this parameter's gradient was taken since the last verdict.

        Raises:
            RuntimeError: it was; the sentence calls the parameter by `name`.
        """
        if id(parameter) in self._unsettled:
            raise RuntimeError(f"{name} got a second gradient before optimizer.step(); {REMEDY}")

    def note_taken(self, parameter: Tensor, name: str) -> None:
        """Count a parameter as unsettled, and the present backward, if any, as under way until it ends well.

        Raises:
            RuntimeError: as `check_settled`.
        """
        if id(parameter) in self._unsettled:
            self.check_settled(parameter, name)
        self._unsettled.add(id(parameter))
        if not self._is_counted:
            self._count_backward()

    def note_backward(self) -> None:
        """Gradients that come from now on are those of another backward."""
        self._is_counted = False

    def _count_backward(self) -> None:
        self._is_counted = True
        task = present_backward()
        if task != NO_BACKWARD:
            self._running.add(task)
            torch.autograd.Variable._execution_engine.queue_callback(functools.partial(self._running.discard, task))

    def is_backward_broken(self) -> bool:
        """Whether a backward that gave gradients ended with an error."""
        return bool(self._running) and present_backward() == NO_BACKWARD

    def note_verdict(self) -> None:
        """Count every parameter as settled."""
        self._unsettled.clear()
        self._running.clear()
        self._is_counted = False

    # ---- what hooks report (hooks.Listener) --------------------------------------------------------------------------

    def forward_begins(self, module: nn.Module) -> None:
        """Refuse a forward over unsettled parameters; drop the step of a backward that failed."""
        if self._unsettled:
            self._look_at(module)
        if self.reports_reads:
            self._report_reads(module)

    @_disable_dynamo
    def _report_reads(self, module: nn.Module) -> None:
        self._keeper.await_parameters(self._awaited[module])

    @_disable_dynamo
    def _look_at(self, module: nn.Module) -> None:
        if self.is_backward_broken():
            self._keeper.abandon()
            return
        # A checkpoint recomputes a block, which may read its submodules' parameters without calling them.
        in_backward = present_backward() != NO_BACKWARD
        if not self._unsettled.isdisjoint(map(id, module.parameters(recurse=in_backward))):
            self._keeper.abandon()
            name = type(module).__name__
            raise RuntimeError(f"{name}.forward reads parameters whose step has no verdict yet; {REMEDY}")

    def state_dict_loads(self, module: nn.Module) -> None:
        """Let everything that is on its way to a module's own parameters arrive before they are written."""
        if self._unsettled:
            self._keeper.catch_up()
        if self._unsettled or self.reports_reads:
            self._keeper.await_parameters(frozenset(map(id, module.parameters(recurse=False))))

    def state_dict_taken(self, module: nn.Module, entries: dict[str, Any], prefix: str) -> None:
        """Put the values of the last accepted step into a state dict that is taken while a step is open."""
        if self.reports_reads:
            self._keeper.await_parameters(frozenset(map(id, module.parameters(recurse=False))))
        if not self._unsettled:
            return
        for name, parameter in module.named_parameters(recurse=False):
            if prefix + name in entries and (accepted := self._keeper.accepted_value(parameter)) is not None:
                entries[prefix + name] = torch.empty_like(parameter, requires_grad=False).copy_(accepted)
