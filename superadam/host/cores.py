"""Which CPUs a rank may use: its share of the node, and of those near its GPU; and threads that stay on them."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from superadam.host.local_ranks import local_rank, processes
from superadam.host.machine import Host, cpus_of

_logger = logging.getLogger("superadam")
_Result = TypeVar("_Result")


def share(host: Host) -> frozenset[int]:
    """Return this rank's part of the CPUs that it may use; all of them where no other rank on the node may use them.

    Raises ValueError where what the launcher tells of ranks makes no sense.
    """
    return shares(host)[local_rank(host).number]


def shares(host: Host) -> list[frozenset[int]]:
    """Return the share of each rank on this node; disjoint, unless there are fewer CPUs than ranks."""
    affinities = _affinities(host)
    return _divided(host, affinities, affinities)


def near(host: Host, address: str, addresses: Sequence[str] = ()) -> frozenset[int]:
    """Return this rank's part of its CPUs on the NUMA node of its GPU; of all its CPUs if none is there.

    Ranks that know different GPUs may get the same CPUs: that costs time, never bits.

    Args:
        host: the machine.
        address: of the GPU on the PCI bus ("0000:1b:00.0"); empty where that is unknown.
        addresses: the same of each rank on this node; empty where that is unknown.

    Raises:
        ValueError: what the launcher tells of ranks makes no sense.
    """
    rank, affinities = local_rank(host), _affinities(host)
    position = rank.number
    if len(addresses) != rank.count:
        addresses, alike = ["" if other != position else address for other in range(rank.count)], _alike(host, address)
        if len(alike) == rank.count and len(set(affinities)) == 1:  # each has one of them
            addresses, position = alike, alike.index(address)
    claims = [_on_node_of(host, *claim) for claim in zip(affinities, addresses, strict=True)]
    return _divided(host, claims, affinities)[position]


def _affinities(host: Host) -> list[frozenset[int]]:
    """Return the CPUs that each rank on this node may run on; those of one that cannot be seen are as our own."""
    found = []
    for pid in processes(host, local_rank(host)):
        lines = host.read_or(f"/proc/{pid}/status", "").splitlines() if pid not in (None, host.process) else []
        allowed = [line.partition(":")[2].strip() for line in lines if line.startswith("Cpus_allowed_list:")]
        found.append(cpus_of(allowed[0]) if allowed else host.affinity)
    return found


def _on_node_of(host: Host, affinity: frozenset[int], address: str) -> frozenset[int]:
    node = host.read_or(f"/sys/bus/pci/devices/{address}/numa_node", "-1") if address else "-1"
    if not node.isdecimal():  # -1: the firmware does not say
        return affinity
    return affinity & cpus_of(host.read_or(f"/sys/devices/system/node/node{node}/cpulist", "")) or affinity


def _alike(host: Host, address: str) -> list[str]:
    """Return the addresses of all PCI devices of the model that this one is, sorted."""
    folder = "/sys/bus/pci/devices"
    model = [host.read_or(f"{folder}/{address}/{name}", "") for name in ("vendor", "device")]
    if "" in model or not address:
        return []
    paths = host.glob(f"{folder}/*/device")
    found = [path.split("/")[5] for path in paths if host.read_or(path, "") == model[1]]
    return [one for one in found if host.read_or(f"{folder}/{one}/vendor", "") == model[0]]


def _divided(
    host: Host, claims: Sequence[frozenset[int]], affinities: Sequence[frozenset[int]]
) -> list[frozenset[int]]:
    """Divide CPUs among all who claim them; whole cores, where there are as many as claim them.

    All ranks compute the same, though each may know more of its own claim: their order comes from what all know.
    """
    if len(claims) == 1:
        return [*claims]
    claimants: dict[int, list[int]] = {}
    for number in sorted(range(len(claims)), key=lambda one: len(affinities[one])):  # fewer to choose from: first
        for cpu in claims[number]:
            claimants.setdefault(cpu, []).append(number)
    regions: dict[tuple[int, ...], list[int]] = {}
    for cpu in sorted(claimants):
        regions.setdefault(tuple(claimants[cpu]), []).append(cpu)
    parts: list[set[int]] = [set() for _ in claims]
    for numbers, cpus in regions.items():
        units = _cores(host, cpus)
        if len(units) < len(numbers):
            units = [[cpu] for cpu in cpus]
        for place, number in enumerate(numbers):
            first, end = (-(-one * len(units) // len(numbers)) for one in (place, place + 1))
            parts[number].update(cpu for unit in units[first:end] for cpu in unit)
    for number in range(len(claims)):
        for among in (claims, affinities):
            if not parts[number]:
                _take(number, parts, among, set())
    return [
        frozenset(part) or frozenset(sorted(claim)[number % len(claim) :][:1])  # one that is shared is better than none
        for number, (part, claim) in enumerate(zip(parts, claims, strict=True))
    ]


def _take(number: int, parts: list[set[int]], among: Sequence[frozenset[int]], seen: set[int]) -> bool:
    """Give a rank one more CPU, of one that has more or can take another; whether there is such a one."""
    owners = {cpu: owner for owner, part in enumerate(parts) for cpu in part}
    for cpu in sorted(
        among[number] - parts[number], key=lambda one: (-len(parts[owners[one]]) if one in owners else -1, one)
    ):
        if cpu in seen:
            continue
        seen.add(cpu)
        owner = owners.get(cpu)
        if owner is None or len(parts[owner]) > 1 or _take(owner, parts, among, seen):
            if owner is not None:
                parts[owner].discard(cpu)
            parts[number].add(cpu)
            return True
    return False


def _cores(host: Host, cpus: Sequence[int]) -> list[list[int]]:
    """Return CPUs by the physical core that they belong to."""
    found: dict[int, list[int]] = {}
    for cpu in cpus:
        siblings = host.read_or(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list", "")
        found.setdefault(min(cpus_of(siblings), default=cpu), []).append(cpu)
    return [found[core] for core in sorted(found)]


def bind_thread(cpus: Set[int]) -> None:
    """Bind the calling thread, and threads that it starts from now on, to these CPUs; ignored where not permitted."""
    try:
        os.sched_setaffinity(0, cpus)
    except OSError:
        _logger.debug("superadam could not bind a thread to CPUs %s", sorted(cpus), exc_info=True)


def call_near(cpus: Set[int], work: Callable[[], _Result]) -> _Result:
    """Call `work` in a thread on these CPUs, and return its result; memory that it first touches is near them.

    The calling thread keeps its affinity, which other ranks may look at.
    """
    with ThreadPoolExecutor(1, "superadam-near", bind_thread, (cpus,)) as thread:
        return thread.submit(work).result()
