"""Which CPUs are near a GPU, and binding threads to them."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Set
from contextlib import contextmanager

from superadam.host.machine import Host, cpus_of

_logger = logging.getLogger("superadam")


def near(host: Host, pci_address: str) -> frozenset[int]:
    """Return this process's CPUs that are on the NUMA node of a PCI device ("0000:1b:00.0"); all if there are none."""
    node = host.read_or(f"/sys/bus/pci/devices/{pci_address}/numa_node", "-1")
    if not node.isdecimal():  # -1: the firmware does not say
        return host.affinity
    return host.affinity & cpus_of(host.read_or(f"/sys/devices/system/node/node{node}/cpulist", "")) or host.affinity


def bind_thread(cpus: Set[int]) -> None:
    """Bind the calling thread, and threads that it starts from now on, to these CPUs; ignored where not permitted."""
    try:
        os.sched_setaffinity(0, cpus)
    except OSError:
        _logger.debug("superadam could not bind a thread to CPUs %s", sorted(cpus), exc_info=True)


@contextmanager
def bound_thread(cpus: Set[int]) -> Iterator[None]:
    """Bind the calling thread to these CPUs in the context; memory that it first touches there is near them."""
    before = os.sched_getaffinity(0)
    bind_thread(cpus)
    try:
        yield
    finally:
        bind_thread(before)
