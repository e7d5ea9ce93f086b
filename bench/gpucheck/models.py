"""The models that are trained for throughput, as large as published ones, and the device they are on.

They are those of `examples/train.py`, with two savings of memory: backward computes blocks again, and the loss looks at
a part of the logits at a time.
"""

from __future__ import annotations

import resource

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from train import MODELS, Decoder, Shape

SHAPES = {
    "tiny": MODELS["tiny"],
    "1b": Shape(128_256, 2048, 16, 32, 8, 64, 8192, batch=4, seq=2048, lr=3e-4),
    "4b": Shape(151_936, 2560, 36, 32, 8, 128, 9728, batch=2, seq=2048, lr=2e-4),
}
"""By name; the larger ones have the widths of Llama-3.2-1B and Qwen3-4B."""

LOGITS_AT_ONCE = 1 << 28
"""1 GiB of them in fp32, where a batch of 16 Ki tokens over 128 Ki ids has 8 GiB."""


class LargeDecoder(Decoder):
    """A decoder that computes again in backward what would take much memory."""

    def forward(self, windows: Tensor) -> Tensor:
        """Return the mean cross-entropy in nats of predicting each token of (batch, seq + 1) from those before it."""
        places = torch.arange(windows.shape[1] - 1, device=windows.device)
        x = (self.tokens(windows[:, :-1]) + self.positions(places)).to(self.compute_dtype)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False, preserve_rng_state=False)
        x = functional.rms_norm(x, x.shape[-1:], self.norm.to(x.dtype)).flatten(0, 1)
        weight, targets = self.tokens.weight.to(x.dtype), windows[:, 1:].flatten()
        rows, total = max(1, LOGITS_AT_ONCE // len(weight)), x.new_zeros((), dtype=torch.float32)
        for part, expected in zip(torch.split(x, rows), torch.split(targets, rows), strict=True):
            total = total + checkpoint(
                _summed_loss, part, weight, expected, use_reentrant=False, preserve_rng_state=False
            )
        return total / len(x)


def _summed_loss(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(functional.linear(x, weight).float(), targets, reduction="sum")


def build_model(shape: Shape, device: torch.device) -> LargeDecoder:
    """Return an initial model in bf16; on the CPU it computes in fp32."""
    with device:
        return LargeDecoder(shape, torch.float32 if device.type == "cpu" else torch.bfloat16).to(torch.bfloat16)


def elements_of(shape: Shape) -> int:
    """Return the number of elements of all parameters."""
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in Decoder(shape, torch.float32).parameters())


def wait_for(device: torch.device) -> None:
    """Return when the device has finished its current stream's work, and what that stream waits for."""
    if device.type == "cuda":
        # Waiting for the stream itself would spin on a core that Adam needs.
        passed = torch.cuda.Event(blocking=True)
        passed.record(torch.cuda.current_stream(device))
        passed.synchronize()


def moved(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a CPU tensor on the device; the host does not wait for the copy, and may drop the tensor at once."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def peak_host_bytes() -> int:
    """Return the most memory that this process held at once, resident, as the operating system counted it."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts in KiB


def peak_device_bytes(device: torch.device) -> int | None:
    """Return the most memory that tensors took at once on a CUDA device; None for the CPU."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
