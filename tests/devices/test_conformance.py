"""Every device of this project and its benchmarks passes the conformance suite; a broken one does not."""

from collections.abc import Callable, Sequence

import pytest
import torch
from measures.paced_device import PRESETS, PacedDevice
from torch import Tensor

from superadam.devices import Device, PlainDevice, Stream
from superadam.testing import DEVICE_CHECKS, SimulatedDevice
from superadam.testing.accelerator import SimulatedEvent


def cuda() -> Device:
    from superadam.devices import CudaDevice

    return CudaDevice("cuda")


DEVICES: dict[str, Callable[[], Device]] = {
    "plain": PlainDevice,
    "lazy": lambda: SimulatedDevice(0, 0.0),
    "hasty": lambda: SimulatedDevice(1, 0.9),
    "paced": lambda: PacedDevice(PRESETS["h200"]),
    **({"cuda": cuda} if torch.cuda.is_available() else {}),
}


@pytest.mark.parametrize("name", DEVICES)
@pytest.mark.parametrize("check", DEVICE_CHECKS)
def test_device_does_what_the_interface_promises(check, name):
    DEVICE_CHECKS[check](DEVICES[name]())


class WithoutWaits(SimulatedDevice):
    """A device whose streams do not wait for one another."""

    def wait(self, stream: Stream, event: object) -> None: ...


class WithoutRecords(SimulatedDevice):
    """A device that reuses memory while streams still need it."""

    def record_stream(self, buffer: Tensor, stream: Stream) -> None: ...


class WithEmptyMarks(SimulatedDevice):
    """A device whose hooks get an event that was never recorded."""

    def mark_ready(self, parameter: Tensor) -> SimulatedEvent:
        return SimulatedEvent(self.accelerator)


class Counting(PlainDevice):
    """A device whose scatters count as writes."""

    def scatter(self, sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
        for target, source in zip(targets, sources, strict=True):
            with torch.no_grad():
                target.copy_(source)


@pytest.mark.parametrize(
    "broken",
    [
        lambda: WithoutWaits(0, 0.0),
        lambda: WithoutRecords(0, 0.0),
        lambda: WithEmptyMarks(0, 0.0),
        Counting,
    ],
)
def test_broken_device_fails(broken):
    def passes(check):
        try:
            check(broken())
        except AssertionError:
            return False
        return True

    assert not all(map(passes, DEVICE_CHECKS.values()))
