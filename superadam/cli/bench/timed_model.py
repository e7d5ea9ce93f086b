"""A model whose layers take time on a device made of time, and compute nothing.

Its gradients are constants, handed over at once: the host runs ahead of the device, as with CUDA.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from superadam.devices import Stream
from superadam.devices.paced import PacedDevice, constant
from superadam.state.samples import Samples


@contextmanager
def without_samples() -> Iterator[None]:
    """Look for no writes that left no hint: with constants, parameters do not show the values that were published."""
    original = Samples.find_written
    Samples.find_written = lambda self, rows: []  # type: ignore[method-assign]
    try:
        yield
    finally:
        Samples.find_written = original  # type: ignore[method-assign]


class Gradients:
    """Constant bf16 gradients of layers of `numel` elements: two sets, because two steps are pending at once."""

    def __init__(self, layers: int, numel: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.layers, self.numel = layers, numel
        self.sets = [torch.empty(layers * numel, dtype=torch.bfloat16, device="cpu") for _ in range(2)]
        for one in self.sets:
            one.normal_(0.0, 1e-3, generator=generator)
        self.norm = float(torch.linalg.vector_norm(self.sets[0], dtype=torch.float32))

    def of(self, step: int, layer: int) -> Tensor:
        """Return the gradient of a layer; gradients lie in the order of backward."""
        return constant(self.sets[step % 2], (self.layers - 1 - layer) * self.numel, self.numel)


class _Layer(torch.autograd.Function):
    """Spends time on the device and returns its gradient at once: the host runs ahead, as with CUDA."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, model: TimedModel, layer: int) -> Tensor:
        ctx.model, ctx.layer = model, layer
        model.device.spend(Stream.CURRENT, model.forward_seconds / model.gradients.layers, "forward")
        return hidden.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None, None]:
        model: TimedModel = ctx.model
        model.device.spend(Stream.CURRENT, model.backward_seconds / model.gradients.layers, "backward")
        return gradients[0], model.gradients.of(model.step, ctx.layer), None, None


class TimedModel(nn.Module):
    """Layers of one bf16 parameter each that spend time on `device` and compute nothing.

    Attributes:
        forward_seconds, backward_seconds: of all layers; to be set, as is `device`.
        step: number of forwards.
    """

    device: PacedDevice

    def __init__(self, gradients: Gradients) -> None:
        super().__init__()
        self.gradients = gradients
        self.forward_seconds = self.backward_seconds = 0.0
        self.step = 0
        self.weights = nn.ParameterList(
            torch.zeros(gradients.numel, dtype=torch.bfloat16, device="cpu") for _ in range(gradients.layers)
        )

    def forward(self) -> Tensor:
        """Return what backward begins from."""
        self.step += 1
        hidden = torch.zeros((), requires_grad=True, device="cpu")
        for layer, weight in enumerate(self.weights):
            hidden = _Layer.apply(hidden, weight, self, layer)  # type: ignore[no-untyped-call]
        return hidden
