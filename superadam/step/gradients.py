"""The gradients of one step: which parameters have one, in the form that kernels read, with their hyper-parameters."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from superadam.handles.gradient_handle import GradientHandle
from superadam.handles.taken_gradient import TakenGradient
from superadam.kernels.hyperparameters import Hyperparameters
from superadam.state.parameter import ParameterState
from superadam.state.table import ParameterTable, Rows, Segments

_ORDINARY = {Tensor, GradientHandle, type(None)}  # others may be DTensors


@dataclass(frozen=True, slots=True)
class StepGradients:
    """The gradients of one step, at most one for each parameter.

    Attributes:
        rows: of `states`.
        gradients: one for each of `states`: as `ParameterState.host_gradient` returns it, or one that was taken before.
        runs: present hyper-parameters, and the number of consecutive states that each is for.
        segments: the job over them; None where some were taken, or some parameters are cut.
    """

    states: Sequence[ParameterState]
    rows: Rows
    gradients: Sequence[Tensor | TakenGradient]
    runs: list[tuple[Hyperparameters, int]]
    segments: Segments | None = None

    @property
    def hyper(self) -> list[Hyperparameters]:
        """Hyper-parameters of each state."""
        return [hyper for hyper, count in self.runs for _ in range(count)]


def gather(table: ParameterTable, runs: list[tuple[Hyperparameters, int]]) -> StepGradients:
    """Return the gradients in `.grad` of a table's parameters; changes nothing.

    `runs` is as in `StepGradients`, for all rows. Raises TypeError or ValueError where a gradient does not fit its
    parameter.
    """
    received = table.new_values.received
    every: list[Any] = [parameter.grad for parameter in table.parameters]
    kinds = set(map(type, every))
    if table.is_distributed or not kinds <= _ORDINARY:
        pairs = zip(table.states, every, strict=True)
        every = [None if gradient is None else state.local_gradient(gradient) for state, gradient in pairs]
        kinds = set(map(type, every))
    states, present_runs = table.states, runs
    if any(map(operator.is_, every, itertools.repeat(None))):
        takes_part = [gradient is not None for gradient in every]
        each = iter(takes_part)
        present_runs = [(hyper, sum(itertools.islice(each, count))) for hyper, count in runs]
        states = list(itertools.compress(table.states, takes_part))
        every = list(itertools.compress(every, takes_part))
    rows = table.rows_of(states)
    if GradientHandle in kinds or table.is_cut:
        meant = [_meant(one, state, received) for one, state in zip(every, states, strict=True)]
        return StepGradients(states, rows, meant, present_runs)
    gradients, segments = table.job(rows, every if received is None else [*map(received, every)])
    return StepGradients(states, rows, gradients, present_runs, segments)


def _meant(
    gradient: Tensor, state: ParameterState, received: Callable[[Tensor], Tensor] | None
) -> Tensor | TakenGradient:
    if type(gradient) is GradientHandle:
        taken: TakenGradient = gradient.taken
        if taken.given is None:
            if state.waits_with(taken):  # so it was checked before
                return taken
            state.check_gradient(gradient)
            if received is not None and not taken.is_unrounded:  # else it is as it travels
                taken.pending = received(state.host_gradient(taken.ready()))
            return taken
        gradient = taken.given
    return state.host_gradient(gradient if received is None else received(gradient))
