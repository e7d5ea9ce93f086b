"""State of resident buckets, in the device's memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from superadam.devices import Device, Event, Stream
from superadam.kernels import torch_private
from superadam.kernels.hyperparameters import Coefficients
from superadam.kernels.resident_step import ResidentStep
from superadam.state.parameter import ARRAYS, Piece, flat


class ResidentStates:
    """Master and moments of some pieces, newer on the device than in the host's tensors, which stay allocated.

    Steps run on the current stream of the calling thread, which must be the one that the model computes on. Any thread
    may bring state home, one at a time.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._arrays: dict[Piece, dict[str, Tensor]] = {}  # flat tensors, by name
        self._updated: Event  # after the last step, before which nothing is here

    def arrays_of(self, piece: Piece) -> Mapping[str, Tensor] | None:
        """Return the arrays, by name, flat, of a state that is newer here, to be read on the current stream."""
        return self._arrays.get(piece)

    def step(
        self, pieces: Sequence[Piece], gradients: Sequence[Tensor], indices: Sequence[int], sets: Sequence[Coefficients]
    ) -> None:
        """Make a step of distinct pieces in place, parameters included; state on the host moves here first.

        Args:
            gradients: one for each, on the device in its layout, neither scaled nor clipped.
            indices: for each, that of its coefficients in `sets`.

        Raises:
            torch.OutOfMemoryError: there is no memory for state that is not here yet; nothing was changed.
        """
        steps: list[ResidentStep] = []
        arrived: list[Piece] = []
        delivered: list[tuple[Tensor, Tensor]] = []
        try:
            for piece, gradient, index in zip(pieces, gradients, indices, strict=True):
                arrays, state = self._arrays.get(piece), piece.state
                if arrays is None:
                    host = {name: tensor for name in ARRAYS if (tensor := getattr(state, name)) is not None}
                    arrays = self._arrays[piece] = {
                        name: self._moved(piece.elements_of(tensor)) for name, tensor in host.items()
                    }
                    arrived.append(piece)
                parameter = piece.working_copy
                if parameter.stride() != piece.strides or parameter.is_neg():
                    values = self._device.empty(parameter.numel(), parameter.dtype, Stream.CURRENT)
                    values = values.as_strided(piece.shape, piece.strides)
                    delivered.append((parameter.data, values))
                    parameter = values
                given: dict[str, Any] = {"max_exp_avg_sq": None, **arrays, "gradient": gradient, "parameter": parameter}
                steps.append(ResidentStep(**given, coefficients=index, first_threshold=state.first_threshold))
            if arrived:  # not behind everything that the model has enqueued
                self._device.wait(Stream.CURRENT, self._device.record(Stream.UPLOAD))
                for tensor in (tensor for piece in arrived for tensor in self._arrays[piece].values()):
                    self._device.record_stream(tensor, Stream.CURRENT)
            self._device.update(steps, sets)
            self._updated = self._device.record(Stream.CURRENT)
        except BaseException:
            for piece in arrived:
                del self._arrays[piece]  # the host's tensors are as new, and may be dropped
            raise
        for parameter, values in delivered:
            parameter.copy_(values)

    def bring_home(self, pieces: Iterable[Piece]) -> list[Piece]:
        """Copy the state of these pieces to the host and free its memory here; return those whose state was here."""
        leaving = [piece for piece in pieces if piece in self._arrays] if self._arrays else []
        if not leaving:
            return leaving
        self._device.wait(Stream.CURRENT, self._updated)  # perhaps on the current stream of another thread
        for piece in leaving:
            for name, distant in self._arrays[piece].items():
                home = flat(piece.elements_of(getattr(piece.state, name)))
                with torch_private.inference_mode(home.is_inference()), torch.no_grad():  # the first enables it
                    self._device.copy(home, distant, Stream.CURRENT)
        self._device.record(Stream.CURRENT).synchronize()
        for piece in leaving:
            del self._arrays[piece]
        return leaving

    def _moved(self, tensor: Tensor) -> Tensor:
        """Return a flat copy on the device, which the upload stream writes."""
        arriving = self._device.empty(tensor.numel(), tensor.dtype, Stream.UPLOAD)
        self._device.copy(arriving, flat(tensor), Stream.UPLOAD)
        return arriving
