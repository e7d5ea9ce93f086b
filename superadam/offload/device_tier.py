"""State that is kept on the device: master and moments of some parameters, newer there than on the host.

Owns these copies. The host's tensors stay where they are, so that only their contents go back and forth, and everybody
else reads and writes them as ever, after `bring_home`. Everything runs on the current stream of the calling thread,
which must be the one that the model computes on.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from superadam.devices import Device, Stream
from superadam.kernels.hyperparameters import Coefficients
from superadam.kernels.kept_step import KeptStep
from superadam.state.parameter import ParameterState

_TENSORS = ("master", "exp_avg", "exp_avg_sq", "max_exp_avg_sq")
"""Attributes of a `ParameterState`, and fields of a `KeptStep`."""


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
        self._residents: dict[ParameterState, dict[str, Tensor]] = {}  # flat tensors, by name

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
                host = {name: tensor for name in _TENSORS if (tensor := getattr(state, name)) is not None}
                if host.keys() != self._residents.get(state, {}).keys():
                    self.bring_home([state])
                    self._residents[state] = {name: self._moved(tensor) for name, tensor in host.items()}
                    arrived.append(state)
                parameter = state.parameter.data
                if parameter.stride() != state.strides:  # no longer dense: somebody replaced `.data`
                    values = self._device.empty(parameter.numel(), parameter.dtype, Stream.CURRENT)
                    values = values.as_strided(state.shape, state.strides)
                    delivered.append((parameter, values))
                    parameter = values
                own: dict[str, Any] = {
                    "gradient": _flat(gradient),
                    "parameter": _flat(parameter),
                    "coefficients": int(index),
                }
                steps.append(KeptStep(**{**dict.fromkeys(_TENSORS), **self._residents[state], **own}))
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
        leaving = [state for state in asked if state in self._residents]
        if not leaving:
            return
        for state in leaving:
            for name, distant in self._residents[state].items():
                self._device.copy(_flat(getattr(state, name)), distant, Stream.CURRENT)
        self._device.record(Stream.CURRENT).synchronize()
        for state in leaving:
            del self._residents[state]

    def forget(self, but: Iterable[ParameterState] = ()) -> None:
        """Drop what is on the device, except of these parameters: somebody replaced their state on the host."""
        kept = set(but)
        self._residents = {state: one for state, one in self._residents.items() if state in kept}

    def _moved(self, tensor: Tensor) -> Tensor:
        """Return a tensor of the state on its way to the device."""
        arriving = self._device.empty(tensor.numel(), tensor.dtype, Stream.CURRENT)
        self._device.copy(arriving, _flat(tensor), Stream.CURRENT)
        return arriving


def _flat(tensor: Tensor) -> Tensor:
    """Return the elements of a dense tensor in the order of memory."""
    return tensor.as_strided((tensor.numel(),), (1,))
