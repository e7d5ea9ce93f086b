"""A model whose layers take time on a paced device, and compute nothing.

Its gradients are constants, handed over at once: the host runs ahead of the device, as with CUDA. They are made, and
scaled to other norms, between measurements.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from measures.paced_device import PacedDevice, constant
from superadam.devices import Stream
from superadam.devices.interface import ChunkSums
from superadam.kernels import native
from superadam.state.samples import Samples
from superadam.testing import stand_in


def without_samples() -> AbstractContextManager[object]:
    """Look for no writes that left no hint: with constants, parameters do not show the values that were published."""
    return mock.patch.object(Samples, "find_written", lambda self, rows: [])  # noqa: PT008 - a mock is slower


BLOCK = 1 << 20
"""Elements of a layer after which its values repeat."""


class Gradients:
    """Constant bf16 gradients of layers of these sizes: at least two sets, because two steps are pending at once.

    Elements have Student's t distribution with 4 degrees of freedom, and a scale of their own, which is log-normal.

    Attributes:
        numels: elements of each layer, in the order of forward.
        sets: flat tensors, each with the layers in the order of backward.
        norms: the 2-norm of each set.
        sums: of each layer in each set, by address and elements; see `PacedDevice.norms`.
    """

    def __init__(self, numels: Sequence[int], sets: int = 2) -> None:
        generator = torch.Generator().manual_seed(0)
        self.numels = list(numels)
        scale = torch.empty(min(*numels, BLOCK), device="cpu").normal_(0.0, 1.2, generator=generator).exp_()
        mean_square = float(scale.square().mean()) * sum(numels)  # of all elements, where blocks are whole
        self._scale = scale / math.sqrt(mean_square)
        self._begins = [sum(numels[layer + 1 :]) for layer in range(len(numels))]
        self.sets = [torch.empty(sum(numels), dtype=torch.bfloat16, device="cpu") for _ in range(sets)]
        self.norms = [0.0] * sets
        self.sums: dict[tuple[int, int], ChunkSums] = {}
        for gradients in self.sets:
            normal, *others = torch.empty(5, len(scale), device="cpu").normal_(generator=generator)
            student = normal / torch.stack(others).square().sum(0).div(2.0).sqrt()  # variance 1
            for layer in self._layers_of(gradients):
                _repeat(student * self._scale, layer.view(1, -1))
        self._take_norms()

    def scale_to(self, norms: Sequence[float]) -> None:
        """Give each set another norm, up to the rounding of its elements; no device may use them meanwhile."""
        for gradients, now, wanted in zip(self.sets, self.norms, norms, strict=True):
            gradients.mul_(wanted / now)
        self._take_norms()

    def _take_norms(self) -> None:
        self.sums.clear()
        for index, gradients in enumerate(self.sets):
            squares = 0.0
            for layer in self._layers_of(gradients):
                chunks = native.chunk_count(len(layer))
                found = ChunkSums.over(torch.empty(2 * chunks, dtype=torch.float64, device="cpu"))
                stand_in.take_norm([layer], found)
                self.sums[layer.data_ptr(), len(layer)] = found
                squares += float(found.sums.sum())
            self.norms[index] = math.sqrt(squares)

    def _layers_of(self, gradients: Tensor) -> list[Tensor]:
        """Return the layers of a set, in the order of forward."""
        return [gradients[begin : begin + numel] for begin, numel in zip(self._begins, self.numels, strict=True)]

    def of(self, step: int, layer: int) -> Tensor:
        """Return the gradient of a layer; gradients lie in the order of backward."""
        return constant(self.sets[step % len(self.sets)], self._begins[layer], self.numels[layer])

    def steady_state(self, norm: float, numel: int) -> dict[str, Tensor]:
        """Return the state of a layer of `numel` elements after a thousand steps with gradients of this norm.

        Weights are N(0, 0.02), and lie anywhere between the values of bf16; `exp_avg_sq` is off by the log-normal
        factor that its memory leaves, and `exp_avg` is what remains of gradients that do not agree.
        """
        generator = torch.Generator().manual_seed(1)
        scale = norm * self._scale
        master, average, factor = torch.empty(3, len(scale), device="cpu").normal_(generator=generator)
        squares = scale.square() * (0.4 * factor).exp()
        blocks = {"master": 0.02 * master, "exp_avg": 0.3 * average * scale, "exp_avg_sq": squares}
        state = {"step": torch.tensor(1000.0, device="cpu")}
        for name, block in blocks.items():
            state[name] = torch.empty(numel, device="cpu")
            _repeat(block, state[name].view(1, -1))
        return state


def _repeat(block: Tensor, rows: Tensor) -> None:
    """Fill each row with a block, again and again."""
    length = len(block)
    whole = rows.shape[1] // length * length
    for begin in range(0, whole, length):
        rows[:, begin : begin + length].copy_(block)
    rows[:, whole:].copy_(block[: rows.shape[1] - whole])


class _Layer(torch.autograd.Function):
    """Spends time on the device and returns its gradient at once: the host runs ahead, as with CUDA."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, model: TimedModel, layer: int) -> Tensor:
        ctx.model, ctx.layer = model, layer
        model.device.spend(Stream.CURRENT, model.forward_seconds / len(model.gradients.numels))
        return hidden.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None, None]:
        model: TimedModel = ctx.model
        model.device.spend(Stream.CURRENT, model.backward_seconds / len(model.gradients.numels))
        return gradients[0], model.gradients.of(model.step - 1, ctx.layer), None, None


class TimedModel(nn.Module):
    """Layers of one bf16 parameter each that spend time on `device` and compute nothing.

    Attributes:
        forward_seconds, backward_seconds: of all layers; to be set, as is `device`.
        step: number of forwards; the sets of gradients take turns.
    """

    device: PacedDevice

    def __init__(self, gradients: Gradients) -> None:
        super().__init__()
        self.gradients = gradients
        self.forward_seconds = self.backward_seconds = 0.0
        self.step = 0
        self.weights = nn.ParameterList(
            torch.zeros(numel, dtype=torch.bfloat16, device="cpu") for numel in gradients.numels
        )

    @property
    def norm(self) -> float:
        """Of the gradients of the last backward."""
        return self.gradients.norms[(self.step - 1) % len(self.gradients.norms)]

    def forward(self) -> Tensor:
        """Return what backward begins from."""
        self.step += 1
        hidden = torch.zeros((), requires_grad=True, device="cpu")
        for layer, weight in enumerate(self.weights):
            hidden = _Layer.apply(hidden, weight, self, layer)  # type: ignore[no-untyped-call]
        return hidden
