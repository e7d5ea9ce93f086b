"""Every device of this project and its benchmarks passes the conformance suite; a broken one does not."""

import subprocess
import sys
from collections.abc import Callable, Sequence

import pytest
import torch
from measures.paced_device import H200, PacedDevice
from torch import Tensor

from superadam.devices import CudaDevice, Device, PlainDevice
from superadam.testing import DEVICE_CHECKS, SimulatedDevice
from superadam.testing.accelerator import SimulatedEvent

DEVICES: dict[str, Callable[[], Device]] = {
    "plain": PlainDevice,
    "lazy": lambda: SimulatedDevice(0, 0.0),
    "hasty": lambda: SimulatedDevice(1, 0.9),
    "paced": lambda: PacedDevice(H200),
    **({"cuda": lambda: CudaDevice("cuda")} if torch.cuda.is_available() else {}),
}


@pytest.mark.parametrize("name", DEVICES)
@pytest.mark.parametrize("check", DEVICE_CHECKS)
def test_device_does_what_the_interface_promises(check, name):
    DEVICE_CHECKS[check](DEVICES[name]())


def write(sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
    with torch.no_grad():
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source)


LAZY = DEVICES["lazy"]
BROKEN: dict[str, tuple[Callable[[], Device], str, Callable[..., object]]] = {
    "streams do not wait for one another": (LAZY, "wait", lambda stream, event: None),
    "memory is reused while streams still need it": (LAZY, "record_stream", lambda buffer, stream: None),
    "marks were never recorded": (LAZY, "mark_ready", lambda _: SimulatedEvent(SimulatedDevice(0).accelerator)),
    "scatters count as writes": (PlainDevice, "scatter", write),
    "the host holds anything": (PlainDevice, "reserve", lambda needs: None),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_device_fails(name):
    make, method, broken = BROKEN[name]

    def check_all():
        for check in DEVICE_CHECKS.values():
            device = make()
            setattr(device, method, broken)
            check(device)

    with pytest.raises(AssertionError):
        check_all()


@pytest.mark.slow
@pytest.mark.subprocess
def test_no_device_passes_where_assertions_are_left_out():
    program = "import superadam.testing as testing, superadam.devices as devices\n"
    program += "for check in testing.DEVICE_CHECKS.values(): check(devices.PlainDevice())"
    done = subprocess.run([sys.executable, "-O", "-B", "-c", program], stderr=subprocess.PIPE, text=True, check=False)
    assert done.stderr.endswith("; run it without -O\n")
