"""Chooses the device implementation for a model; imports that of GPUs, and Triton with it, only where it is needed."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from superadam.devices.interface import Device
from superadam.devices.plain import PlainDevice


def device_for(parameters: Iterable[Tensor]) -> Device:
    """Return the device for these parameters.

    They may be on the CPU and on one GPU. Devices of other types get `PlainDevice`, whose copies work between any of
    them but are synchronous: they overlap with nothing.

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
