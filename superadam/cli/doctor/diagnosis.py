"""Runs all probes in the order of the report; one that fails becomes an unknown finding instead of an exception."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from superadam.cli.doctor import accelerator, memory, processor, software
from superadam.cli.doctor.finding import Finding, Status
from superadam.host.machine import Host

Probe = Callable[[Host], Finding]

PROBES: tuple[tuple[str, Probe], ...] = (
    ("superadam", software.superadam_version),
    ("torch", software.torch_version),
    ("triton", software.triton_version),
    ("instruction sets", processor.instruction_sets),
    ("processors", processor.processors),
    ("ranks", processor.ranks),
    ("threads", processor.threads),
    ("NUMA nodes", processor.numa_nodes),
    ("memory", memory.main_memory),
    ("memory bandwidth", memory.bandwidth),
    ("huge pages", memory.huge_pages),
    ("pinned memory", memory.pinned_memory),
    ("GPU", accelerator.gpus),
    ("GPU driver", accelerator.driver),
    ("GPU link", accelerator.link),
)
"""Each probe under the name of its finding."""


def diagnose(host: Host, probes: Sequence[tuple[str, Probe]] = PROBES) -> list[Finding]:
    """Return one finding for each probe, whatever happens in it."""
    return [_ask(name, probe, host) for name, probe in probes]


def _ask(name: str, probe: Probe, host: Host) -> Finding:
    try:
        return probe(host)
    except Exception as error:  # a report with a gap is worth more than none
        return Finding(name, Status.UNKNOWN, f"{type(error).__name__}: {error}")
