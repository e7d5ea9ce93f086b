"""A driver that pins nothing, and events that pass when they are told to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from superadam.devices.slab import PinningError


@dataclass
class RecordingRegistrar:
    """Remembers what is registered: size by address."""

    limit: int = 1 << 62
    refuses_to_unregister: bool = False
    registered: dict[int, int] = field(default_factory=dict)
    unregistered: list[int] = field(default_factory=list)

    def register(self, address: int, size: int) -> None:
        if sum(self.registered.values()) + size > self.limit:
            raise PinningError("no more")
        self.registered[address] = size

    def unregister(self, address: int) -> None:
        if self.refuses_to_unregister:
            raise PinningError("not now")
        del self.registered[address]
        self.unregistered.append(address)


@dataclass
class Point:
    """An event."""

    has_passed: bool = False
    waits: int = 0
    at_synchronize: Callable[[], object] = bool

    def query(self) -> bool:
        return self.has_passed

    def synchronize(self) -> None:
        self.waits += 1
        self.at_synchronize()
        self.has_passed = True
