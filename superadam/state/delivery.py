"""Delivery: how new values reach parameters that kernels on the host cannot write directly.

`SynchronousDelivery` is the optimizer's own; a scheduler brings one whose copies overlap with the model's work.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor

from superadam.kernels.torch_private import foreach_copy_
from superadam.state.parameter import ParameterState, Place

STAGED_NUMEL = 16 * 1024 * 1024
"""Elements of new values that are made at once where each has to be copied, so that their memory does not grow with the
model."""


class Delivery(Protocol):
    """The interface between the passes over parameters and the copies to the model's device."""

    @property
    def staged_numel(self) -> int:
        """About how many elements of new values `shadows` is asked for at once."""

    @property
    def received(self) -> Callable[[Tensor], Tensor] | None:
        """Rounds a gradient that was not taken as if it had travelled to the host; None where that rounds nothing."""

    def is_host(self, parameter: Tensor) -> bool:
        """Whether kernels on the CPU may write this parameter."""

    def shadows(self, states: Sequence[ParameterState]) -> list[Place]:
        """Return memory for one new value of each of these parameters."""

    def publish(self, states: Sequence[ParameterState], places: Sequence[Place]) -> None:
        """Copy new values into their parameters, past version counters, before anything later on the current stream."""

    def settle(self) -> None:
        """Return when everything that was published has arrived, so that the host can read parameters."""


class HostShadow:
    """New values in pageable memory, one tensor for each parameter."""

    def __init__(self, states: Sequence[ParameterState]) -> None:
        self.values = [state.empty(state.parameter_dtype) for state in states]


class SynchronousDelivery:
    """Copies that are done, or at least ordered before everything later, when the call returns."""

    staged_numel = STAGED_NUMEL
    received = None

    def is_host(self, parameter: Tensor) -> bool:
        """Whether it is on the CPU."""
        return parameter.is_cpu

    def shadows(self, states: Sequence[ParameterState]) -> list[Place]:
        """Return pageable memory."""
        shadow = HostShadow(states)
        return [Place(shadow, position) for position in range(len(states))]

    def publish(self, states: Sequence[ParameterState], places: Sequence[Place]) -> None:
        """Copy all of them in one call."""
        foreach_copy_([state.local.data for state in states], [place.value for place in places])

    def settle(self) -> None:
        """Return at once."""
