"""What tests of programs and devices need: a simulated device, and checks of what every device must do.

`SimulatedDevice` is an accelerator in host memory that does everything as late and as badly as a real one may.
`DEVICE_CHECKS` is the conformance suite of `superadam.devices.Device`: functions to be called with a device.
`round_by_thresholds` and `round_to_8_bits` are how state in fewer bits is rounded.
"""

from superadam.testing.conformance import DEVICE_CHECKS
from superadam.testing.rounding import round_by_thresholds, round_to_8_bits
from superadam.testing.simulated import SimulatedDevice

__all__ = ["DEVICE_CHECKS", "SimulatedDevice", "round_by_thresholds", "round_to_8_bits"]
