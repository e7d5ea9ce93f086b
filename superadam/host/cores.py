"""Which CPUs are near a GPU, and threads that stay on them.

Owns affinity. How many threads compute is decided elsewhere.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Set
from contextlib import contextmanager

from superadam.host.machine import Host, cpus_of

LEFT_TO_TRAINING = 2
"""CPUs for the training process: one for the thread that launches kernels (the training thread in forward, autograd's
in backward), without which the GPU would idle, and one for all that runs beside it, such as data loading."""

_logger = logging.getLogger("superadam")


def near(host: Host, pci_address: str) -> frozenset[int]:
    """Return those CPUs of this process's affinity that are on the NUMA node of a PCI device.

    All of the affinity where the node is not known, has no CPUs, or has none that this process may run on.

    Args:
        host: the machine.
        pci_address: such as "0000:1b:00.0".
    """
    node = host.read_or(f"/sys/bus/pci/devices/{pci_address}/numa_node", "-1")
    if not node.isdecimal():  # -1: the firmware does not say
        return host.affinity
    return host.affinity & cpus_of(host.read_or(f"/sys/devices/system/node/node{node}/cpulist", "")) or host.affinity


def idle_count(cpus: Set[int]) -> int:
    """Return how many of these CPUs are idle while the model computes on a GPU; at least 1.

    A worker that shares its only CPU with the training thread still beats none: that thread mostly waits for the GPU.
    """
    return max(1, len(cpus) - LEFT_TO_TRAINING)


def bind_thread(cpus: Set[int]) -> None:
    """Keep the calling thread, and threads that it starts from now on, on these CPUs; where it may not, leave it."""
    try:
        os.sched_setaffinity(0, cpus)
    except OSError:
        _logger.debug("superadam could not bind a thread to CPUs %s", sorted(cpus), exc_info=True)


@contextmanager
def bound_thread(cpus: Set[int]) -> Iterator[None]:
    """Keep the calling thread on these CPUs for a while: memory that it touches first lies near them."""
    before = os.sched_getaffinity(0)
    bind_thread(cpus)
    try:
        yield
    finally:
        bind_thread(before)
