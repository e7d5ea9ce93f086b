"""How much memory of the host this process can have and how much of it it may lock, and the check of what it needs."""

from __future__ import annotations

import logging
import os
import re
import resource
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Self

from superadam.host.announced import Announcement, announced
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
        total, available = _of_machine(host)
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

    What other processes have announced counts, too, where the same limit holds for them. Warns where the system's
    estimate of what is available is less: programs end, caches are dropped, memory is swapped.

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
    others = _announced(host)
    limits: list[tuple[int, Group | None]] = [(memory.total, None)]
    limits += [(found[0], group) for group in groups_of(host, "memory") if (found := _limit_of(host, group))]
    for limit, group in limits if others else ():
        beside = [one for one in others if group is None or group in groups_of(host, "memory", one.process)]
        theirs = sum(one.size for one in beside)
        if theirs and needed + theirs > limit:
            raise MemoryError(
                f"{subject} needs about {gigabytes(needed)} of host memory, and other processes that train with "
                f"superadam here need {gigabytes(theirs)}, but together they can have {gigabytes(limit)} at most; "
                f"{remedy}, or start fewer ranks on this machine"
            )
    missing = (needed if missing is None else missing) + sum(one.missing for one in others)
    if missing > memory.available:
        _logger.warning(
            "%s needs about %s more host memory%s, but by the system's estimate %s are available, beyond which it "
            "swaps or ends programs; %s",
            subject,
            gigabytes(missing),
            ", with that of other processes that train with superadam here" if others else "",
            gigabytes(memory.available),
            remedy,
        )


@dataclass(frozen=True, slots=True)
class Claim:
    """Host memory that one of several processes is about to take at once.

    Attributes:
        size: bytes.
        left: bytes that each limit leaves, counting all caches; one that processes share has one key in all of them.
    """

    size: int
    left: Mapping[str, int]

    @classmethod
    def of(cls, host: Host, size: int) -> Self:
        """Return the claim of this process."""
        machine = host.read_or("/proc/sys/kernel/random/boot_id", os.uname().nodename)
        left = {}
        with suppress(OSError, ValueError):  # then it is unknown
            left[machine] = _of_machine(host)[1]
            for group in groups_of(host, "memory"):
                if (found := _limit_of(host, group, caches=("inactive_file", "active_file"))) is not None:
                    left[f"{machine} {host.path(group.directory).stat().st_ino}"] = found[1]
        return cls(size, left)

    def check(self, claims: Sequence[Claim]) -> None:
        """Raise MemoryError where a limit leaves less than all processes take for which it holds.

        Args:
            claims: of all processes, this one included.
        """
        for key, left in self.left.items():
            together = sum(claim.size for claim in claims if key in claim.left)
            if together > left:
                beside = f"with those of other ranks {gigabytes(together)}, " if together > self.size else ""
                raise MemoryError(f"{beside}of which {gigabytes(max(0, left))} are left")


@dataclass(frozen=True, slots=True)
class _Announced:
    """Bytes of host memory that another process needs, and those of them that it has not allocated yet, about."""

    process: int
    size: int
    missing: int


_NEEDS = "needs"


def announce_needs(size: int) -> Announcement:
    """Let processes of the same user on this machine know, until it is closed, that this one needs `size` bytes.

    Each counts what the others have announced, so that ranks that share a node are refused where they do not fit
    together.
    """
    return Announcement(_NEEDS, str(size))


def _announced(host: Host) -> list[_Announced]:
    """Return what other processes have announced; forked ones have the same files, which count once."""
    known = set(announced(host, host.process, _NEEDS))
    found = []
    for path in host.glob("/proc/[0-9]*/status"):
        process = int(path.split("/")[2])
        for key, size in announced(host, process, _NEEDS).items():
            if key not in known and size.isdecimal():
                known.add(key)
                resident = re.search(r"^VmRSS:\s*([0-9]+) kB$", host.read_or(path, ""), re.MULTILINE)
                unused = int(size) - (int(resident[1]) << 10 if resident else 0)
                found.append(_Announced(process, int(size), max(0, unused)))
    return found


def gigabytes(size: int) -> str:
    """Return how messages write a number of bytes."""
    return f"{size / 1e9:,.2f} GB"


def lockable_bytes() -> int | None:
    """Return how much memory this process may lock (RLIMIT_MEMLOCK), or None for no limit."""
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if limit == resource.RLIM_INFINITY else limit


def _of_machine(host: Host) -> tuple[int, int]:
    """Return the machine's total and available bytes; raises as `HostMemory.of`."""
    lines = dict(line.split(":", 1) for line in host.read("/proc/meminfo").splitlines() if ":" in line)
    missing = {"MemTotal", "MemAvailable"} - set(lines)
    if missing:
        raise ValueError(f"/proc/meminfo has no line {min(missing)}, expected one; mount the /proc of Linux there")
    return int(lines["MemTotal"].split()[0]) << 10, int(lines["MemAvailable"].split()[0]) << 10


def _limit_of(host: Host, group: Group, caches: Sequence[str] = ("inactive_file",)) -> tuple[int, int] | None:
    """Return a group's limit and what it leaves, counting these file caches; None without a limit."""
    if group.version == 2:
        names, prefix = ("memory.max", "memory.current"), ""
    else:
        names, prefix = ("memory.limit_in_bytes", "memory.usage_in_bytes"), "total_"
    limit = host.read_or(f"{group.directory}/{names[0]}", "max")
    if not limit.isdecimal() or int(limit) > UNLIMITED:
        return None
    used = int(host.read_or(f"{group.directory}/{names[1]}", "0"))
    counts = dict(line.split() for line in host.read_or(f"{group.directory}/memory.stat", "").splitlines())
    return int(limit), int(limit) - used + sum(int(counts.get(prefix + cache, "0")) for cache in caches)
