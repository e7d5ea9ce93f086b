"""Which device a model gets, and that choosing imports nothing that is not needed."""

import importlib
import sys
from typing import Any

import pytest
import torch
from support.children import in_child
from support.fake_cuda import fake_cuda

import superadam.devices
from superadam.devices import CudaDevice, PlainDevice, device_for


class Placed:
    """A parameter that says where it lies; no GPU is needed to say so."""

    def __init__(self, device: str) -> None:
        self.device = torch.device(device)
        self.is_cpu = self.device.type == "cpu"


def parameters(*devices: str) -> Any:
    return (Placed(device) for device in devices)  # models hand out generators


@pytest.mark.parametrize("devices", [[], ["cpu"], ["meta", "cpu"], ["mps:0"], ["xpu:0", "xpu:1"]], ids=str)
def test_models_without_cuda_are_copied_plainly(devices):
    assert type(device_for(parameters(*devices))) is PlainDevice


@pytest.mark.parametrize("devices", [["cuda:1"], ["cpu", "cuda:1", "cuda:1"]], ids=str)
def test_models_on_one_gpu_get_its_device(devices):
    with fake_cuda():
        device = device_for(parameters(*devices))
        assert isinstance(device, CudaDevice)
        assert device.device == torch.device("cuda:1")


@pytest.mark.parametrize("devices", [["cuda:1", "cuda:0", "cpu"], ["cuda:0", "meta"]], ids=str)
def test_models_on_several_are_refused(devices):
    names = ", ".join(sorted(set(devices) - {"cpu"}))
    with pytest.raises(ValueError, match=f"the parameters lie on {names}, expected one CUDA device.*FSDP2"):
        device_for(parameters(*devices))


def test_names_of_the_package():
    assert all(getattr(superadam.devices, name) for name in superadam.devices.__all__)
    with pytest.raises(AttributeError, match="no attribute 'RocmDevice'"):
        _ = superadam.devices.RocmDevice


@in_child
def test_importing_superadam_imports_neither_kernels_nor_integrations() -> None:
    """Once more, as if torch had just been imported."""
    late = ("superadam", "torch.distributed")
    for name in [name for name in sys.modules if name.startswith(late)]:
        del sys.modules[name]
    again = importlib.import_module("superadam.devices")
    importlib.import_module("superadam")
    again.device_for([torch.ones(2)])
    assert "superadam.optim.adam" in sys.modules
    late = ("superadam.gpu", "superadam.devices.cuda", "superadam.integrations", "torch.distributed")
    assert [name for name in sys.modules if name.startswith(late)] == []
