"""`torch.set_default_device` is none of our business: host memory is on the host, and bits are the same."""

import ast
import copy
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from measures.paced_device import H200, PacedDevice
from support.optimizers import through_disk
from support.visible import visible
from torch import Tensor, nn
from torch.utils._device import _device_constructors
from torch.utils.checkpoint import checkpoint

import superadam
from superadam import OffloadScheduler, SpeculativeCPUAdamW
from superadam.devices import Device, PlainDevice
from superadam.testing import SimulatedDevice

FOLLOWING = {one.__name__ for one in _device_constructors() if getattr(torch, one.__name__, None) is one}


def without_device(source: str) -> Iterator[str]:
    """Yield calls of torch functions that would follow the default device."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in FOLLOWING:
            is_torch = isinstance(node.func.value, ast.Name) and node.func.value.id == "torch"
            if is_torch and "device" not in {keyword.arg for keyword in node.keywords}:
                yield f"line {node.lineno}: {ast.unparse(node)}"


def test_every_tensor_that_is_made_names_its_device() -> None:
    found = {path: list(without_device(path.read_text())) for path in Path(superadam.__file__).parent.rglob("*.py")}
    assert {path: calls for path, calls in found.items() if calls} == {}


def test_calls_that_follow_the_default_device_are_found() -> None:
    source = "torch.zeros(3)\ntorch.empty(1, device='cpu')\nnumpy.zeros(3)\n[torch.tensor(1, dtype=x)]\ntorch.stack(b)"
    assert list(without_device(source)) == ["line 1: torch.zeros(3)", "line 4: torch.tensor(1, dtype=x)"]


@contextmanager
def default_device(name: str | None) -> Iterator[None]:
    torch.set_default_device(name)
    try:
        yield
    finally:
        torch.set_default_device(None)


class Recomputed(nn.Linear):
    """A layer that backward computes once more."""

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False).tanh()


def trained(dtype: torch.dtype, device: Device | None, where: str | None, gpu_buckets: int = 0) -> Any:
    """Return everything after training with a scheduler, all that it offers, and a checkpoint in the middle."""
    torch.default_generator.manual_seed(0)
    model = nn.Sequential(*(Recomputed(6, 6) for _ in range(3))).to(dtype)
    optimizer = SpeculativeCPUAdamW(model.parameters(), lr=0.1, max_grad_norm=1.0, amsgrad=True)
    batches = [torch.linspace(-1, 1 + seed, 24).view(4, 6).to(dtype) for seed in range(8)]

    def backward(seed: int) -> None:
        model(batches[seed]).float().square().sum().backward()

    with default_device(where):
        options: dict[str, Any] = {"device": device, "num_threads": 1, "bucket_numel": 40, "gpu_buckets": gpu_buckets}
        with OffloadScheduler(optimizer, model, **options) as scheduler:
            for seed in range(6):
                with scheduler.accumulate(torch.float32 if seed % 2 else None):
                    backward(seed)
                backward(seed + 1)
                if seed == 2:
                    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                if seed == 3:
                    torch._foreach_div_([parameter.grad for parameter in model.parameters()], 3.0)
                if seed == 4:
                    optimizer.clip_grad_norm_(0.1)
                    optimizer.rollback()
                optimizer.step()
                optimizer.zero_grad()
                if seed == 2:
                    optimizer.load_state_dict(through_disk(copy.deepcopy(optimizer.state_dict())))
            optimizer.reload_masters()
        for seed in range(2):  # without a scheduler
            backward(seed)
            optimizer.speculate()
            optimizer.step()
            optimizer.zero_grad()
    return visible(optimizer)


DEVICES: dict[str, Any] = {
    "plain": (PlainDevice, 0),
    "simulated": (lambda: SimulatedDevice(1), 0),
    "kept": (lambda: SimulatedDevice(2), 2),
    "paced": (lambda: PacedDevice(H200), 0),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", DEVICES)
def test_training_has_the_same_bits_under_any_default_device(name: str, dtype: torch.dtype) -> None:
    make, gpu_buckets = DEVICES[name]
    assert trained(dtype, make(), "meta", gpu_buckets) == trained(dtype, make(), None, gpu_buckets)
