"""Gradients that have arrived: which parameters have one, in the form that kernels read, with what they were made for.

It reads `.grad` and hyper-parameters, and changes nothing.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from superadam.hyperparameters import Hyperparameters
from superadam.parameter import ParameterState, owned
from superadam.table import ParameterTable, Segments


@dataclass(frozen=True, slots=True)
class Arrivals:
    """Gradients that have arrived, at most one for each parameter.

    Attributes:
        states: the parameters.
        gradients: one for each, as `ParameterState.host_gradient` returns it.
        runs: present hyper-parameters, and how many of the states in turn they are for.
        segments: the job over them, where one was made when the gradients were looked at.
    """

    states: Sequence[ParameterState]
    gradients: list[Tensor]
    runs: list[tuple[Hyperparameters, int]]
    segments: Segments | None = None

    def owned(self) -> Arrivals:
        """Return these with gradients that may be kept: `superadam.parameter.owned` of each."""
        return Arrivals(self.states, [owned(gradient) for gradient in self.gradients], self.runs)

    @property
    def numel(self) -> int:
        """Elements of all gradients."""
        return sum(gradient.numel() for gradient in self.gradients)

    @property
    def hyper(self) -> Iterator[Hyperparameters]:
        """Hyper-parameters of each state."""
        return itertools.chain.from_iterable(itertools.repeat(hyper, count) for hyper, count in self.runs)


def gather(
    table: ParameterTable, runs: list[tuple[Hyperparameters, int]], chosen: Collection[int] | None = None
) -> Arrivals:
    """Return every parameter of a table that has a gradient in `.grad`, with it.

    Args:
        table: the parameters.
        runs: hyper-parameters, and how many rows of the table in turn they are for.
        chosen: only parameters with these ids; default all.

    Raises:
        TypeError, ValueError: a gradient does not fit its parameter.
    """
    every: list[Any] = [parameter.grad for parameter in table.parameters]
    if chosen is None and not any(map(operator.is_, every, itertools.repeat(None))):
        gradients, segments = table.job(table.all_rows, every)
        return Arrivals(table.states, gradients, runs, segments)
    takes_part = [
        gradient is not None and (chosen is None or id(parameter) in chosen)
        for parameter, gradient in zip(table.parameters, every, strict=True)
    ]
    begins = [0, *itertools.accumulate(count for _, count in runs)]
    present_runs = [
        (hyper, sum(takes_part[begin : begin + count])) for (hyper, count), begin in zip(runs, begins, strict=False)
    ]
    states = list(itertools.compress(table.states, takes_part))
    gradients, segments = table.job(table.rows_of(states), list(itertools.compress(every, takes_part)))
    return Arrivals(states, gradients, present_runs, segments)
