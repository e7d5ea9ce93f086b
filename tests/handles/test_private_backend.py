"""Gradients on backends that are registered with torch as PrivateUse1, of which torch gives subclasses no memory."""

import shutil
import subprocess
import sys
import sysconfig
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from superadam import OffloadScheduler, SpeculativeCPUAdamW
from superadam.handles.gradient_handle import take_gradient

SOURCE = Path(__file__).parents[1] / "support" / "private_backend.cpp"


def test_backward_adds_to_a_gradient_whose_handle_cannot_have_memory() -> None:
    """Torch treats handles of the meta device as those of such backends."""
    parameter = nn.Parameter(torch.ones(3, 2, device="meta"))
    owner = nn.ParameterDict({"parameter": parameter})
    parameter.sum().backward()
    assert take_gradient(parameter, owner) is not None
    handle: Any = parameter.grad
    parameter.sum().backward()
    assert type(parameter.grad) is Tensor
    handle.mul_(2)
    assert handle.taken.given is parameter.grad
    assert handle._version >= 2


class Event:
    def record(self) -> None: ...
    def query(self) -> bool:
        return True

    def synchronize(self) -> None: ...


def register(folder: Path) -> torch.device:
    """Compile the backend and register it, for the rest of this process."""
    from torch.utils import cpp_extension

    backend = cpp_extension.load("private_backend", [str(SOURCE)], build_directory=str(folder), extra_cflags=["-O0"])
    backend.init()
    module = SimpleNamespace(is_available=lambda: True, is_initialized=lambda: True, current_device=lambda: 0)
    module.device, module.Event, module._is_in_bad_fork = lambda _: nullcontext(), Event, lambda: False
    module.manual_seed_all, module.device_count = lambda _: None, lambda: 1
    torch.utils.rename_privateuse1_backend("private")
    torch._register_device_module("private", module)
    return torch.device("private", 0)


def trained(device: torch.device, *, overlaps: bool) -> list[Tensor]:
    """Train with gradients that are edited, added to, clipped and dropped after they were taken."""
    torch.default_generator.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).to(torch.bfloat16).to(device)
    optimizer = SpeculativeCPUAdamW(model.parameters(), lr=0.01, max_grad_norm=0.5)
    overlap = OffloadScheduler(optimizer, model, num_threads=1, bucket_numel=10) if overlaps else None
    with overlap or nullcontext():
        for step in range(8):
            for micro in range(1 + step % 3):
                inputs = torch.ones(3, 4, dtype=torch.bfloat16).to(device) * (step + micro)
                model(inputs).float().square().mean().backward()
            gradients: list[Any] = [parameter.grad for parameter in model.parameters()]
            if step == 2:
                gradients[0].clamp_(-1e-3, 1e-3)
            elif step == 3:
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            elif step == 4:
                gradients[1].view(-1)[0] = 5.0
            elif step == 5:
                gradients[2].data.zero_()
            optimizer.step()
            optimizer.zero_grad()
    if overlap is not None:
        assert overlap.statistics.given_back_gradients > 0
    return [parameter.detach().cpu() for parameter in model.parameters()]


def can_compile() -> bool:
    header = Path(sysconfig.get_path("include")) / "Python.h"
    return bool(shutil.which("g++") and shutil.which("ninja") and header.exists() and sys.platform == "linux")


@pytest.mark.deep
@pytest.mark.slow
@pytest.mark.subprocess
@pytest.mark.skipif(not can_compile(), reason="a backend of torch takes g++, ninja and Python.h to compile")
def test_training_on_such_a_backend_has_the_bits_of_the_optimizer_alone(tmp_path: Path) -> None:
    subprocess.run([sys.executable, __file__, str(tmp_path)], check=True)  # torch's engine is made once in a process


if __name__ == "__main__":
    device = register(Path(sys.argv[1]))
    for ours, theirs in zip(trained(device, overlaps=True), trained(device, overlaps=False), strict=True):
        assert torch.equal(ours, theirs)
