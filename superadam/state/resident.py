"""State of resident buckets, in the device's memory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor

from superadam.devices import Device, Event, Stream
from superadam.kernels.hyperparameters import Coefficients
from superadam.kernels.resident_step import ResidentStep
from superadam.state.parameter import TENSORS, ParameterState


class ResidentStates:
    """Master and moments of some parameters, newer on the device than in the host's tensors, which stay allocated.

    Steps run on the current stream of the calling thread, which must be the one that the model computes on. Any thread
    may bring state home, one at a time.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._held: dict[ParameterState, dict[str, Tensor]] = {}  # flat tensors, by name
        self._updated: Event | None = None  # after the last step

    def holds(self, state: ParameterState) -> bool:
        """Return whether a parameter's state is newer on the device than on the host."""
        return state in self._held

    def step(
        self,
        states: Sequence[ParameterState],
        gradients: Sequence[Tensor],
        indices: Sequence[int],
        sets: Sequence[Coefficients],
    ) -> None:
        """Make a step of distinct parameters in place, parameters included; state on the host moves here first.

        Args:
            gradients: one for each, on the device in the layout of the state, neither scaled nor clipped.
            indices: for each, that of its coefficients in `sets`.

        Raises:
            torch.OutOfMemoryError: there is no memory for state that is not here yet; nothing was changed.
        """
        steps: list[ResidentStep] = []
        arrived: list[ParameterState] = []
        delivered: list[tuple[Tensor, Tensor]] = []
        try:
            for state, gradient, index in zip(states, gradients, indices, strict=True):
                held = self._held.get(state)
                if held is None or ("max_exp_avg_sq" in held) is (state.max_exp_avg_sq is None):
                    self.bring_home([state])
                    host = {name: tensor for name in TENSORS if (tensor := getattr(state, name)) is not None}
                    held = self._held[state] = {name: self._moved(tensor) for name, tensor in host.items()}
                    arrived.append(state)
                parameter = state.local
                if parameter.stride() != state.strides:  # no longer dense: `.data` was replaced
                    values = self._device.empty(parameter.numel(), parameter.dtype, Stream.CURRENT)
                    values = values.as_strided(state.shape, state.strides)
                    delivered.append((parameter.data, values))
                    parameter = values
                tensors: dict[str, Any] = {name: held.get(name) for name in TENSORS}
                steps.append(ResidentStep(**tensors, gradient=gradient, parameter=parameter, coefficients=int(index)))
            if arrived:  # not behind everything that the model has enqueued
                self._device.wait(Stream.CURRENT, self._device.record(Stream.UPLOAD))
                for tensor in (tensor for state in arrived for tensor in self._held[state].values()):
                    self._device.record_stream(tensor, Stream.CURRENT)
            self._device.update(steps, sets)
            self._updated = self._device.record(Stream.CURRENT)
        except BaseException:
            for state in arrived:
                del self._held[state]  # the host's tensors are as new, and may be dropped
            raise
        for parameter, values in delivered:
            parameter.copy_(values)

    def master_of(self, state: ParameterState) -> Tensor | None:
        """Return the master on the device, flat, to be read on the current stream; None for its own master."""
        return self._held[state].get("master")

    def bring_home(self, states: Iterable[ParameterState]) -> list[ParameterState]:
        """Copy these states to the host and free their memory on the device; return those that were there."""
        leaving = [state for state in states if state in self._held] if self._held else []
        if not leaving:
            return leaving
        if self._updated is not None:  # perhaps on the current stream of another thread
            self._device.wait(Stream.CURRENT, self._updated)
        for state in leaving:
            for name, distant in self._held[state].items():
                self._device.copy(_flat(getattr(state, name)), distant, Stream.CURRENT)
        self._device.record(Stream.CURRENT).synchronize()
        for state in leaving:
            del self._held[state]
        return leaving

    def _moved(self, tensor: Tensor) -> Tensor:
        """Return a flat copy on the device, which the upload stream writes."""
        arriving = self._device.empty(tensor.numel(), tensor.dtype, Stream.UPLOAD)
        self._device.copy(arriving, _flat(tensor), Stream.UPLOAD)
        return arriving


def _flat(tensor: Tensor) -> Tensor:
    return tensor.as_strided((tensor.numel(),), (1,))
