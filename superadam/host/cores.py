"""Which CPUs a rank may use: its share of the node, and of those near its GPU; and threads that stay on them."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from superadam.host.local_ranks import local_rank, processes
from superadam.host.machine import Host, cpus_of
from superadam.host.signals import THIS_THREAD

_logger = logging.getLogger("superadam")
_Result = TypeVar("_Result")


def share(host: Host, address: str = "") -> frozenset[int]:
    """Return this rank's part of the CPUs that it may use, on the NUMA node of its GPU where some of them are.

    Ranks whose GPUs lie otherwise on the nodes than their numbers may get the same CPUs: that costs time, never bits.
    Where the GPU's `address` on the PCI bus ("0000:1b:00.0") is unknown, it is empty, for all CPUs.

    Raises ValueError where what the launcher tells of ranks makes no sense.
    """
    return _share_of(host, local_rank(host).number, _affinities(host), address)


def shares(host: Host) -> list[frozenset[int]]:
    """Return the share of each rank on this node, of all CPUs that it may use."""
    affinities = _affinities(host)
    return [_share_of(host, number, affinities, "") for number in range(len(affinities))]


def _share_of(host: Host, number: int, affinities: Sequence[frozenset[int]], address: str) -> frozenset[int]:
    """Divide the CPUs near a GPU among as many ranks as are there, if ranks lie on the nodes as CPUs do."""
    allowed = affinities[number]
    cpus = sorted(_near(host, allowed, address))
    sharing = [other for other, affinity in enumerate(affinities) if not affinity.isdisjoint(allowed)]
    count = -(-len(sharing) * len(cpus) // len(allowed))
    place = sharing.index(number) % count
    units = _cores(host, cpus)
    if len(units) < count:
        units = [[cpu] for cpu in cpus]
    first, end = (-(-part * len(units) // count) for part in (place, place + 1))
    mine = frozenset(cpu for unit in units[first:end] for cpu in unit)
    return mine or frozenset([cpus[place * len(cpus) // count]])  # one that is shared is better than none


def _affinities(host: Host) -> list[frozenset[int]]:
    """Return the CPUs that each rank on this node may run on; those of one that cannot be seen are as our own."""
    found = []
    for pid in processes(host, local_rank(host)):
        lines = host.read_or(f"/proc/{pid}/status", "").splitlines() if pid not in (None, host.process) else []
        allowed = [line.partition(":")[2].strip() for line in lines if line.startswith("Cpus_allowed_list:")]
        found.append(cpus_of(allowed[0]) if allowed else host.affinity)
    return found


def _near(host: Host, affinity: frozenset[int], address: str) -> frozenset[int]:
    node = host.read_or(f"/sys/bus/pci/devices/{address}/numa_node", "-1") if address else "-1"
    if not node.isdecimal():  # -1: the firmware does not say
        return affinity
    return affinity & cpus_of(host.read_or(f"/sys/devices/system/node/node{node}/cpulist", "")) or affinity


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

    The calling thread keeps its affinity, which other ranks may look at. It works itself where no thread can start.
    """
    with THIS_THREAD.without_handlers, ThreadPoolExecutor(1, "superadam-near", bind_thread, (cpus,)) as thread:
        try:
            result = thread.submit(work)
        except RuntimeError:
            return work()
        return result.result()
