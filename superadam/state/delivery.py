"""Delivery: how new values reach parameters that kernels on the host cannot write directly.

`SynchronousDelivery` is the optimizer's own; a scheduler brings one whose copies overlap with the model's work.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

from superadam.devices.flat import FlatLayout
from superadam.kernels.copies import copy_each
from superadam.state.parameter import ParameterState, Slot
from superadam.state.uncertain import HostPatch, Patch

STAGED_NUMEL = 16 * 1024 * 1024
"""Elements of new values in one part, so that their memory does not grow with the model."""


class Delivery(Protocol):
    """The interface between the passes over parameters and the copies to the model's device.

    Attributes:
        staged_numel: about how many elements of new values a part for `stage` has.
    """

    staged_numel: int

    @property
    def received(self) -> Callable[[Tensor], Tensor] | None:
        """Rounds a gradient that was not taken as if it had travelled to the host; None where that rounds nothing."""

    def is_host(self, parameter: Tensor) -> bool:
        """Whether kernels on the CPU may write this parameter."""

    def shadows(self, states: Sequence[ParameterState]) -> list[Slot]:
        """Return memory for one new value of each of these parameters."""

    def stage(self, parts: Sequence[Sequence[ParameterState]]) -> Iterator[list[Slot]]:
        """Return memory for the new values of one part after another; there is at least one.

        All of it is allocated when this returns. Parts may share memory: publish each before asking for the next.
        """

    def publish(self, states: Sequence[ParameterState], slots: Sequence[Slot]) -> None:
        """Copy new values into their parameters, past version counters, before anything later on the current stream.

        Does not fail for want of memory, because the state has changed by then.
        """

    def settle(self) -> None:
        """Return when everything that was published has arrived, so that the host can read parameters."""


Layouts = Sequence[FlatLayout[ParameterState]]  # of new values, one for each dtype


def groups_of(states: Sequence[ParameterState]) -> list[tuple[ParameterState, ...]]:
    """Return the states of each dtype, whose new values lie in one flat buffer."""
    groups: dict[torch.dtype, list[ParameterState]] = {}
    for state in states:
        groups.setdefault(state.parameter_dtype, []).append(state)
    return [*map(tuple, groups.values())]


def size_of(layouts: Layouts) -> int:
    """Return the bytes of the buffers of these layouts."""
    return sum(layout.numel * layout.states[0].parameter_dtype.itemsize for layout in layouts)


def buffers_in(memory: Tensor, layouts: Layouts) -> Iterator[Tensor]:
    """Yield the buffer of each layout, one after another in memory of at least `size_of` bytes."""
    begin = 0
    for layout in layouts:
        end = begin + size_of([layout])
        yield memory[begin:end].view(layout.states[0].parameter_dtype)
        begin = end


class HostShadow:
    """New values in pageable memory, one tensor for each parameter."""

    def __init__(self, values: list[Tensor]) -> None:
        self.values = values

    def patch(self, positions: Sequence[int], counts: Sequence[int]) -> Patch:
        """Return what is put into them."""
        return HostPatch([self.values[position] for position in positions], counts)


class SynchronousDelivery:
    """Copies that are done, or at least ordered before everything later, when the call returns."""

    staged_numel = STAGED_NUMEL
    received = None

    def is_host(self, parameter: Tensor) -> bool:
        """Whether it is on the CPU."""
        return parameter.is_cpu

    def shadows(self, states: Sequence[ParameterState]) -> list[Slot]:
        """Return pageable memory."""
        return next(self.stage([states]))

    def stage(self, parts: Sequence[Sequence[ParameterState]]) -> Iterator[list[Slot]]:
        """Return pageable memory, the same for all parts."""
        layouts = [[*map(FlatLayout, groups_of(states))] for states in parts]
        memory = torch.empty(max(map(size_of, layouts)), dtype=torch.uint8, device="cpu")
        return (_slots(states, some, memory) for states, some in zip(parts, layouts, strict=True))

    def publish(self, states: Sequence[ParameterState], slots: Sequence[Slot]) -> None:
        """Copy all of them in one call."""
        copy_each([state.local.data for state in states], [slot.value for slot in slots])

    def settle(self) -> None:
        """Return at once."""


def _slots(states: Sequence[ParameterState], layouts: Layouts, memory: Tensor) -> list[Slot]:
    pairs = [*zip(layouts, buffers_in(memory, layouts), strict=True)]
    values = {
        state: view for layout, buffer in pairs for state, view in zip(layout.states, layout.views(buffer), strict=True)
    }
    shadow = HostShadow([values[state] for state in states])
    return [Slot(shadow, position) for position in range(len(states))]
