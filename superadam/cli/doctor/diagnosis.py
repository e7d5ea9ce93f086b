"""Runs all probes in the order of the report; one that fails becomes an unknown finding instead of an exception."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from superadam.cli.doctor import accelerator, memory, processor, software
from superadam.cli.doctor.finding import Finding, Status
from superadam.host.machine import Host

Probe = Callable[[Host], Finding]

PROBES: dict[str, Probe] = {
    "superadam": software.superadam_version,
    "torch": software.torch_version,
    "triton": software.triton_version,
    "instruction sets": processor.instruction_sets,
    "processors": processor.processors,
    "ranks": processor.ranks,
    "threads": processor.threads,
    "NUMA nodes": processor.numa_nodes,
    "memory": memory.main_memory,
    "memory bandwidth": memory.bandwidth,
    "huge pages": memory.huge_pages,
    "pinned memory": memory.pinned_memory,
    "GPU": accelerator.gpus,
    "GPU driver": accelerator.driver,
    "GPU link": accelerator.link,
}
"""Each probe under the name of what it looks at."""


def diagnose(host: Host, probes: Mapping[str, Probe] = PROBES) -> dict[str, Finding]:
    """Return one finding for each probe, by its name, whatever happens in it."""
    return {name: _ask(probe, host) for name, probe in probes.items()}


def _ask(probe: Probe, host: Host) -> Finding:
    try:
        return probe(host)
    except Exception as error:  # a report with a gap is worth more than none
        words = f"{type(error).__name__}: {error}"
        if isinstance(error, OSError) and error.filename is not None:
            words = f"cannot read {error.filename}: {error.strerror}"
        return Finding(words, fault=Status.UNKNOWN)
