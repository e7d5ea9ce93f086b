"""Devices: streams, events, copies and memory behind one small interface."""

from typing import TYPE_CHECKING, Any

from superadam.devices.choice import device_for
from superadam.devices.interface import Device, Event, Stream
from superadam.devices.plain import PlainDevice

if TYPE_CHECKING:
    from superadam.devices.cuda import CudaDevice

__all__ = ["CudaDevice", "Device", "Event", "PlainDevice", "Stream", "device_for"]


def __getattr__(name: str) -> Any:
    """Import on first use what needs Triton."""
    if name != "CudaDevice":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from superadam.devices.cuda import CudaDevice

    return CudaDevice
