"""How much memory of the host this process can have and how much of it it may lock, and the check of what it needs."""

from __future__ import annotations

import logging
import resource
from dataclasses import dataclass
from typing import Self

from superadam.host.machine import Group, Host, groups_of

UNLIMITED = 1 << 60  # version 1 of control groups writes "no limit" as a number beyond this
BUCKETS_UNDER_WAY = 2  # in each direction: one that is copied, and one that is computed

_logger = logging.getLogger("superadam")


@dataclass(frozen=True, slots=True)
class HostMemory:
    """Bytes of host memory."""

    total: int  # of the machine
    limit: int  # what this process can have at most: the machine's, or what its control groups allow
    available: int  # an estimate, without swapping: of the machine, or of the control groups where they leave less

    @classmethod
    def of(cls, host: Host) -> Self:
        """Return the present values; raises OSError without /proc/meminfo, and ValueError where that lacks a line."""
        lines = dict(line.split(":", 1) for line in host.read("/proc/meminfo").splitlines() if ":" in line)
        missing = {"MemTotal", "MemAvailable"} - set(lines)
        if missing:
            raise ValueError(f"/proc/meminfo has no line {min(missing)}, expected one; mount the /proc of Linux there")
        total, available = (int(lines[key].split()[0]) << 10 for key in ("MemTotal", "MemAvailable"))
        groups = [found for group in groups_of(host, "memory") if (found := _limit_of(host, group)) is not None]
        limit = min([total, *(allowed for allowed, _ in groups)])
        return cls(total, limit, max(0, min([available, *(left for _, left in groups)])))


@dataclass(frozen=True, slots=True)
class HostNeeds:
    """Bytes of host memory that training takes, besides parameters and what autograd keeps."""

    state: int = 0  # masters and moments
    gradients: int = 0  # of one step, where backward leaves them in host memory
    pending: int = 0  # gradients of one step that are copied to the host, and stay there together
    shadows: int = 0  # new values that wait on the host for the verdict
    lists: int = 0  # elements whose new value may change with the verdict
    largest: int = 0  # the largest buffer that is copied, in either direction
    present: int = 0  # what of all this is allocated already

    def __add__(self, other: HostNeeds) -> HostNeeds:
        return HostNeeds(
            self.state + other.state,
            self.gradients + other.gradients,
            self.pending + other.pending,
            self.shadows + other.shadows,
            self.lists + other.lists,
            max(self.largest, other.largest),
            self.present + other.present,
        )

    @property
    def under_way(self) -> int:
        """Buckets that are being copied or computed, in both directions."""
        return 2 * BUCKETS_UNDER_WAY * self.largest

    @property
    def missing(self) -> int:
        """Bytes that are not allocated yet."""
        return max(0, self.total - self.present)

    @property
    def total(self) -> int:
        """All bytes, allocated or not."""
        return self.state + self.gradients + self.pending + self.shadows + self.lists + self.under_way

    def check(self, host: Host) -> None:
        """Check that the host can hold this; see `require_memory`."""
        parts = f"{gigabytes(self.state)} of state, {gigabytes(self.gradients + self.pending)} of gradients"
        values = gigabytes(self.shadows + self.lists + self.under_way)
        subject = f"training ({parts}, {values} of new values and buckets under way)"
        remedy = "allow this process more memory, train fewer parameters, or let gradients travel in a narrower "
        require_memory(host, self.total, subject, remedy + "transfer_dtype", missing=self.missing)


def require_memory(host: Host, needed: int, subject: str, remedy: str, *, missing: int | None = None) -> None:
    """Check that this process can have `needed` bytes, of which `missing` ones, by default all, are not allocated yet.

    Warns where the system's estimate of what is available is less: programs end, caches are dropped, memory is swapped.

    Raises:
        MemoryError: it is more than the machine has, or than the control groups of this process allow.
    """
    try:
        memory = HostMemory.of(host)
    except (OSError, ValueError):
        return  # unknown
    if needed > memory.limit:
        raise MemoryError(
            f"{subject} needs about {gigabytes(needed)} of host memory, but this process can have "
            f"{gigabytes(memory.limit)} at most; {remedy}"
        )
    missing = needed if missing is None else missing
    if missing > memory.available:
        _logger.warning(
            "%s needs about %s more host memory, but by the system's estimate %s are available, beyond which it swaps "
            "or ends programs; %s",
            subject,
            gigabytes(missing),
            gigabytes(memory.available),
            remedy,
        )


def gigabytes(size: int) -> str:
    """Return how messages write a number of bytes."""
    return f"{size / 1e9:,.2f} GB"


def lockable_bytes() -> int | None:
    """Return how much memory this process may lock (RLIMIT_MEMLOCK), or None for no limit."""
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if limit == resource.RLIM_INFINITY else limit


def _limit_of(host: Host, group: Group) -> tuple[int, int] | None:
    """Return a group's limit and what it leaves, counting file cache that can be dropped; None without a limit."""
    if group.version == 2:
        names = ("memory.max", "memory.current", "inactive_file")
    else:
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    limit = host.read_or(f"{group.directory}/{names[0]}", "max")
    if not limit.isdecimal() or int(limit) > UNLIMITED:
        return None
    used = int(host.read_or(f"{group.directory}/{names[1]}", "0"))
    counts = dict(line.split() for line in host.read_or(f"{group.directory}/memory.stat", "").splitlines())
    return int(limit), int(limit) - used + int(counts.get(names[2], "0"))
