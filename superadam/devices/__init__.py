"""Devices: streams, events, copies and memory behind one small interface."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from torch import Tensor

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


def device_for(parameters: Iterable[Tensor]) -> Device:
    """Return the device for these parameters, which may be on the CPU and on one GPU.

    Other accelerators get `PlainDevice`, whose copies work between any devices and overlap with nothing.

    Raises:
        ValueError: they are on several CUDA devices, or on a CUDA device and one of another type.
    """
    distant = {parameter.device for parameter in parameters if not parameter.is_cpu}
    if all(device.type != "cuda" for device in distant):
        return PlainDevice()
    if len(distant) > 1:
        names = ", ".join(sorted(map(str, distant)))
        raise ValueError(
            f"the parameters lie on {names}, expected one CUDA device, with or without the CPU; give each device its "
            "own process and shard the model with FSDP2, or move the model to one of them"
        )
    from superadam.devices.cuda import CudaDevice

    return CudaDevice(distant.pop())
