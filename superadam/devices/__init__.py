"""Where models lie: streams, events, copies and memory behind one small interface."""

from superadam.devices.interface import Device, Event, Stream
from superadam.devices.plain import PlainDevice

__all__ = ["Device", "Event", "PlainDevice", "Stream"]
