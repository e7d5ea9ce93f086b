"""How much memory of the host this process can have and how much of it it may lock, and the check of what it needs."""

from __future__ import annotations

import logging
import os
import re
import resource
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields
from typing import Self

from superadam.host.local_ranks import local_rank
from superadam.host.machine import Group, Host, groups_of
from superadam.host.signals import THIS_THREAD

UNLIMITED = 1 << 60  # version 1 of control groups writes "no limit" as a number beyond this
BUCKETS_UNDER_WAY = 2  # in each direction: one that is copied, and one that is computed

_logger = logging.getLogger("superadam")


@dataclass(frozen=True, slots=True)
class HostMemory:
    """Bytes of host memory."""

    total: int  # of the machine, without that of GPUs
    limit: int  # what this process can have at most: the machine's, or what its control groups allow
    available: int  # an estimate, without swapping: of the machine, or of the control groups where they leave less

    @classmethod
    def of(cls, host: Host) -> Self:
        """Return the present values; raises OSError without /proc/meminfo, and ValueError where that lacks a line."""
        limits = [*_limits(host).values()]
        return cls(limits[0][0], min(limit for limit, _ in limits), max(0, min(left for _, left in limits)))


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
    changes: Callable[[], Mapping[str, int]] = field(default=dict, compare=False)
    """Returns `total` with other arguments, by these in words; a sum has none."""

    def __add__(self, other: HostNeeds) -> HostNeeds:
        names = (field.name for field in fields(self) if field.compare)
        sums = {name: getattr(self, name) + getattr(other, name) for name in names}
        return HostNeeds(**{**sums, "largest": max(self.largest, other.largest)})

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
        """Check that this process can have all of it.

        Warns where what is missing is more than is left, if all ranks on this node need as much. Raises MemoryError
        where the sum is more than the machine has, or than the control groups of this process allow.
        """
        with THIS_THREAD.without_handlers:
            try:
                memory, count = HostMemory.of(host), local_rank(host).count
            except (OSError, ValueError):
                return  # unknown
        subject = (
            f"training ({gigabytes(self.state)} of state, {gigabytes(self.gradients + self.pending)} of gradients, "
            f"{gigabytes(self.shadows + self.lists + self.under_way)} of new values and buckets under way)"
        )

        def remedy(excess: int) -> str:
            """Return what to do about this many bytes too many."""
            fitting = [words for words, size in self.changes().items() if size <= self.total - excess]
            return ", or ".join(["allow this process more memory, train fewer parameters", *fitting])

        if self.total > memory.limit:
            raise MemoryError(
                f"{subject} needs about {gigabytes(self.total)} of host memory, but this process can have "
                f"{gigabytes(memory.limit)} at most; {remedy(self.total - memory.limit)}"
            )
        if count * self.total > memory.limit:
            _logger.warning(
                "%s needs about %s of host memory, and %d ranks on this machine need %s if each needs as much, but "
                "they can have %s together at most; %s, or start fewer ranks on this machine",
                *(subject, gigabytes(self.total), count, gigabytes(count * self.total), gigabytes(memory.limit)),
                remedy(self.total - memory.limit // count),
            )
        elif (missing := count * self.missing) > memory.available:
            _logger.warning(
                "%s needs about %s more host memory%s, but by the system's estimate %s are available, beyond which it "
                "swaps or ends programs; %s",
                *(subject, gigabytes(missing), f" on {count} ranks" if count > 1 else "", gigabytes(memory.available)),
                remedy(-(-(missing - memory.available) // count)),
            )


@dataclass(frozen=True, slots=True)
class Claim:
    """Host memory that one of several processes is about to take at once."""

    size: int  # bytes
    left: Mapping[str, int]  # bytes that each limit leaves; processes have the same key for a limit that they share

    @classmethod
    def of(cls, host: Host, size: int) -> Self:
        """Return the claim of this process."""
        with THIS_THREAD.without_handlers, suppress(OSError, ValueError):
            return cls(size, {key: left for key, (_, left) in _limits(host).items()})
        return cls(size, {})  # it is unknown

    def check(self, claims: Sequence[Claim]) -> None:
        """Raise MemoryError where a limit leaves less than those of all processes take that it holds for."""
        for key, left in self.left.items():
            together = sum(claim.size for claim in claims if key in claim.left)
            if together > left:
                beside = f"with those of other ranks {gigabytes(together)}, " if together > self.size else ""
                raise MemoryError(f"{beside}of which {gigabytes(max(0, left))} are left")


def gigabytes(size: int) -> str:
    """Return how messages write a number of bytes."""
    return f"{size / 1e9:,.2f} GB"


def lockable_bytes() -> int | None:
    """Return how much memory this process may lock (RLIMIT_MEMLOCK), or None for no limit."""
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if limit == resource.RLIM_INFINITY else limit


def _limits(host: Host) -> dict[str, tuple[int, int]]:
    """Return the bytes of the machine, then of limited groups, and what is left, by a key that all processes share."""
    lines = dict(line.split(":", 1) for line in host.read("/proc/meminfo").splitlines() if ":" in line)
    missing = {"MemTotal", "MemAvailable"} - set(lines)
    if missing:
        raise ValueError(f"/proc/meminfo has no line {min(missing)}, expected one; mount the /proc of Linux there")
    machine = host.read_or("/proc/sys/kernel/random/boot_id", os.uname().nodename)
    total, left = (int(lines[name].split()[0]) << 10 for name in ("MemTotal", "MemAvailable"))
    of_gpus, free_of_gpus = _memory_of_gpus(host)
    limits = {machine: (total - of_gpus, left - free_of_gpus)}
    for group in groups_of(host, "memory"):
        limit = _limit_of(host, group)
        if limit is not None:
            limits[f"{machine} {host.path(group.directory).stat().st_ino}"] = limit
    return limits


def _memory_of_gpus(host: Host) -> tuple[int, int]:
    """Return the bytes of GPUs that the kernel counts as the machine's, in all and available.

    On a GH200 the driver adds a GPU's memory to the system as a NUMA node. Memory of programs lands there once the
    other nodes are full, and torch's allocator finds less.
    """
    nodes = set[str]()
    for path in host.glob("/proc/driver/nvidia/gpus/*/numa_status"):
        found = re.match(r"Node:\s*(\d+)\s+Status:\s*online\s", host.read_or(path, "") + "\n")
        nodes.update(found.groups() if found else ())
    total = left = 0
    for node in nodes:
        text = host.read_or(f"/sys/devices/system/node/node{node}/meminfo", "")
        sizes = {name: int(size) << 10 for name, size in re.findall(r"([\w()]+):\s*(\d+) kB", text)}
        total += sizes.get("MemTotal", 0)
        left += sum(sizes.get(name, 0) for name in ("MemFree", "Active(file)", "Inactive(file)"))
    return total, left


def _limit_of(host: Host, group: Group) -> tuple[int, int] | None:
    """Return a group's limit and what it leaves, file caches included; None without a limit."""
    most, now, prefix = ("max", "current", "") if group.version == 2 else ("limit_in_bytes", "usage_in_bytes", "total_")
    limit = host.read_or(f"{group.directory}/memory.{most}", "max")
    if not limit.isdecimal() or int(limit) > UNLIMITED:
        return None
    used = int(host.read_or(f"{group.directory}/memory.{now}", "0"))
    counts = dict(line.split() for line in host.read_or(f"{group.directory}/memory.stat", "").splitlines())
    caches = sum(int(counts.get(f"{prefix}{kind}", "0")) for kind in ("inactive_file", "active_file"))
    return int(limit), int(limit) - used + caches
