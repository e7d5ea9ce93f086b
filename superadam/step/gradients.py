"""The gradients of one step: which parameters have one, in the form that kernels read, with their hyper-parameters."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from torch import Tensor

from superadam.handles.gradient_handle import GradientHandle
from superadam.handles.taken_gradient import TakenGradient
from superadam.kernels.hyperparameters import Hyperparameters
from superadam.state.parameter import ParameterState
from superadam.state.places import gradients_of
from superadam.state.table import ParameterTable, Rows, Runs, Segments

_ORDINARY = {Tensor, GradientHandle, type(None)}  # others may be DTensors


@dataclass(frozen=True, slots=True)
class StepGradients:
    """The gradients of one step, at most one for each parameter.

    Attributes:
        rows: of `states`.
        gradients: one for each of `states`: as `ParameterState.host_gradient` returns it, or one that was taken before.
        runs: present hyper-parameters of the states.
        are_whole: whether none was taken, and no parameter is cut.
        addresses: of all of them, where they lie as `ParameterTable.plain_layouts` says; None where some do not.
    """

    states: Sequence[ParameterState]
    rows: Rows
    gradients: Sequence[Tensor | TakenGradient]
    runs: Runs
    are_whole: bool
    addresses: npt.NDArray[np.uint64] | None = None

    def job(self, table: ParameterTable) -> Segments:
        """Return the job that reads them, where they `are_whole`."""
        return table.job(self.rows, self.gradients, self.addresses)  # type: ignore[arg-type]


def hyper_of_each(runs: Runs) -> list[Hyperparameters]:
    """Return the hyper-parameters of each state."""
    return [hyper for hyper, count in runs for _ in range(count)]


def gather(table: ParameterTable, runs: Runs) -> StepGradients:
    """Return the gradients in `.grad` of a table's parameters; changes nothing.

    `runs` are for all rows. Raises TypeError or ValueError where a gradient does not fit its parameter.
    """
    received = table.new_values.received
    every, addresses, present, plain = gradients_of(table.parameters, table.plain_layouts)
    if plain < present and (table.is_distributed or not set(map(type, every)) <= _ORDINARY):
        pairs = zip(table.states, every, strict=True)
        every = [None if gradient is None else state.local_gradient(gradient) for state, gradient in pairs]
    states, rows, present_runs = table.states, table.all_rows, runs
    if present < len(every):
        takes_part = [gradient is not None for gradient in every]
        each = iter(takes_part)
        present_runs = [(hyper, sum(itertools.islice(each, count))) for hyper, count in runs]
        states = list(itertools.compress(table.states, takes_part))
        every = list(itertools.compress(every, takes_part))
        rows, addresses = table.rows_of(states), addresses[takes_part]
    if plain == present and received is None and not table.is_cut:
        return StepGradients(states, rows, every, present_runs, True, addresses)
    meant = [_meant(gradient, state, received) for gradient, state in zip(every, states, strict=True)]
    is_any_taken = any(map(isinstance, meant, itertools.repeat(TakenGradient)))
    return StepGradients(states, rows, meant, present_runs, not (is_any_taken or table.is_cut))


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
        gradient = gradient.given
    return state.host_gradient(gradient if received is None else received(gradient))
