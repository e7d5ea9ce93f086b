"""State that is kept on the device: master and moments of some parameters, newer there than on the host.

Owns these copies. The host's tensors stay where they are, so that only their contents go back and forth, and everybody
else reads and writes them as ever, after `bring_home`. Everything runs on the current stream of the calling thread,
which must be the one that the model computes on.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from superadam.devices import Device, Stream
from superadam.hyperparameters import Coefficients
from superadam.kept_step import KeptStep
from superadam.parameter import ParameterState


@dataclass(frozen=True, slots=True, eq=False)
class _Resident:
    """Flat tensors on the device, beside the host's tensor of each."""

    state: ParameterState
    master: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    max_exp_avg_sq: Tensor | None

    @property
    def pairs(self) -> list[tuple[Tensor, Tensor]]:
        """Each tensor, flat, on the host and on the device."""
        state = self.state
        assert state.master is not None
        assert state.exp_avg is not None
        assert state.exp_avg_sq is not None
        both = [(state.master, self.master), (state.exp_avg, self.exp_avg), (state.exp_avg_sq, self.exp_avg_sq)]
        if self.max_exp_avg_sq is not None:
            assert state.max_exp_avg_sq is not None
            both.append((state.max_exp_avg_sq, self.max_exp_avg_sq))
        return [(_flat(host), distant) for host, distant in both]


class Residence:
    """What is kept on one device.

    Args:
        device: of the parameters.

    Attributes:
        is_full: whether the device had no memory for more; for others to look at and to take back.
    """

    def __init__(self, device: Device) -> None:
        self.is_full = False
        self._device = device
        self._residents: dict[ParameterState, _Resident] = {}

    @property
    def states(self) -> list[ParameterState]:
        """Whose state is newer on the device than on the host."""
        return list(self._residents)

    def holds(self, state: ParameterState) -> bool:
        """Whether a parameter's state is newer on the device than on the host."""
        return state in self._residents

    @property
    def is_empty(self) -> bool:
        """Whether all state is at home."""
        return not self._residents

    def update(
        self,
        states: Sequence[ParameterState],
        gradients: Sequence[Tensor],
        indices: Sequence[int],
        sets: Sequence[Coefficients],
    ) -> None:
        """Make a step in place, parameters included, with state that moves to the device first where it is not there.

        Args:
            states: of distinct parameters, with everything that the step reads.
            gradients: one for each, on the device, in the layout of the state.
            indices: which coefficients each has.
            sets: the coefficients.

        Raises:
            torch.OutOfMemoryError: the device has no memory for state that is not there.

        Whatever is raised, nothing was changed, as far as the device changed nothing.
        """
        steps: list[KeptStep] = []
        arrived: list[ParameterState] = []
        delivered: list[tuple[Tensor, Tensor]] = []
        try:
            for state, gradient, index in zip(states, gradients, indices, strict=True):
                one = self._residents.get(state)
                if one is None or (one.max_exp_avg_sq is None and state.max_exp_avg_sq is not None):
                    self.bring_home([state])
                    one = self._residents[state] = self._moved(state)
                    arrived.append(state)
                parameter = state.parameter.data
                if parameter.stride() != state.strides:  # no longer dense: somebody replaced `.data`
                    values = self._device.empty(parameter.numel(), parameter.dtype, Stream.CURRENT)
                    values = values.as_strided(state.shape, state.strides)
                    delivered.append((parameter, values))
                    parameter = values
                steps.append(
                    KeptStep(
                        one.master,
                        one.exp_avg,
                        one.exp_avg_sq,
                        one.max_exp_avg_sq,
                        _flat(gradient),
                        _flat(parameter),
                        int(index),
                    )
                )
            self._device.update(steps, sets)
        except BaseException as error:
            self.is_full = self.is_full or isinstance(error, torch.OutOfMemoryError)
            for state in arrived:
                del self._residents[state]  # the host's tensors are as new, and may be dropped
            raise
        for parameter, values in delivered:
            parameter.copy_(values)

    def bring_home(self, states: Iterable[ParameterState] | None = None) -> None:
        """Return when the host's tensors are the newest, and keep nothing of them on the device.

        Args:
            states: default all.
        """
        asked = list(self._residents) if states is None else states
        leaving = [self._residents[state] for state in asked if state in self._residents]
        if not leaving:
            return
        for one in leaving:
            for host, distant in one.pairs:
                self._device.copy(host, distant, Stream.CURRENT)
        self._device.record(Stream.CURRENT).synchronize()
        for one in leaving:
            del self._residents[one.state]

    def forget(self, but: Iterable[ParameterState] = ()) -> None:
        """Drop what is on the device, except of these parameters: somebody replaced their state on the host."""
        kept = set(but)
        self._residents = {state: one for state, one in self._residents.items() if state in kept}

    def _moved(self, state: ParameterState) -> _Resident:
        """Return a parameter's state on its way to the device."""
        device = self._device

        def moved(tensor: Tensor | None) -> Tensor:
            assert tensor is not None
            arriving = device.empty(tensor.numel(), tensor.dtype, Stream.CURRENT)
            device.copy(arriving, _flat(tensor), Stream.CURRENT)
            return arriving

        largest = None if state.max_exp_avg_sq is None else moved(state.max_exp_avg_sq)
        return _Resident(state, moved(state.master), moved(state.exp_avg), moved(state.exp_avg_sq), largest)


def _flat(tensor: Tensor) -> Tensor:
    """Return the elements of a dense tensor in the order of memory."""
    return tensor.as_strided((tensor.numel(),), (1,))
