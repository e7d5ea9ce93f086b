"""How much memory of the host this process may still take, and how much of it it may lock."""

from __future__ import annotations

import resource
from dataclasses import dataclass
from typing import Self

from superadam.host.cgroups import Group, groups_of
from superadam.host.machine import Host

UNLIMITED = 1 << 60
"""Version 1 of control groups writes "no limit" as a number beyond this."""


@dataclass(frozen=True, slots=True)
class HostMemory:
    """Bytes of host memory."""

    total: int  # of the machine
    available: int  # without swapping: of the machine, or of this process's control groups where they leave less
    lockable: int | None  # RLIMIT_MEMLOCK; None for no limit

    @classmethod
    def of(cls, host: Host) -> Self:
        """Return the present values; raises OSError without /proc/meminfo, and ValueError where that lacks a line."""
        lines = dict(line.split(":", 1) for line in host.read("/proc/meminfo").splitlines() if ":" in line)
        missing = {"MemTotal", "MemAvailable"} - set(lines)
        if missing:
            raise ValueError(f"/proc/meminfo has no line {min(missing)}, expected one; mount the /proc of Linux there")
        total, available = (int(lines[key].split()[0]) << 10 for key in ("MemTotal", "MemAvailable"))
        allowed = [left for group in groups_of(host, "memory") if (left := _left_in(host, group)) is not None]
        return cls(total, max(0, min([available, *allowed])), lockable_bytes())


def lockable_bytes() -> int | None:
    """Return how much memory this process may lock (RLIMIT_MEMLOCK), or None for no limit."""
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if limit == resource.RLIM_INFINITY else limit


def _left_in(host: Host, group: Group) -> int | None:
    """Return the bytes that a group leaves, counting file cache that can be dropped; None where it sets no limit."""
    if group.version == 2:
        names = ("memory.max", "memory.current", "inactive_file")
    else:
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    limit = host.read_or(f"{group.directory}/{names[0]}", "max")
    if not limit.isdecimal() or int(limit) > UNLIMITED:
        return None
    used = int(host.read_or(f"{group.directory}/{names[1]}", "0"))
    counts = dict(line.split() for line in host.read_or(f"{group.directory}/memory.stat", "").splitlines())
    return int(limit) - used + int(counts.get(names[2], "0"))
