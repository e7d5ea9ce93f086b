"""Probes whether caches and memory bandwidth can be partitioned between training and the optimizer's threads.

Intel RDT, AMD PQoS and Arm's MPAM are offered by the kernel through the same file system, resctrl.
"""

from __future__ import annotations

from superadam.cli.doctor.finding import Finding, Status
from superadam.host.machine import Host


def cache_partitioning(host: Host) -> Finding:
    """Report whether resctrl is offered and mounted."""
    name = "resctrl/MPAM"
    mpam = host.path("/sys/firmware/acpi/tables/MPAM").exists()
    if host.path("/sys/fs/resctrl/schemata").exists():
        schemata = ", ".join(line.strip() for line in host.read("/sys/fs/resctrl/schemata").splitlines())
        return Finding(name, Status.OK, f"mounted: {schemata}", values={"mounted": True, "mpam": mpam})
    values = {"mounted": False, "mpam": mpam}
    offered = "resctrl" in host.read("/proc/filesystems").split()
    resources = [path.rpartition("/")[2] for path in host.glob("/sys/fs/resctrl/info/*")]
    if offered and (mpam or _has_flags(host)):
        detail = "this processor has it, not mounted" + (f" ({', '.join(resources)})" if resources else "")
        return Finding(name, Status.BETTER, detail, "sudo mount -t resctrl resctrl /sys/fs/resctrl", values)
    if mpam:
        detail = "this processor has MPAM, but the kernel offers no resctrl"
        return Finding(name, Status.BETTER, detail, "boot a kernel with CONFIG_ARM64_MPAM=y", values)
    return Finding(name, Status.OK, "not offered here; only busy shared machines gain from it", values=values)


def _has_flags(host: Host) -> bool:
    """Whether an x86 processor says that it can allocate cache or memory bandwidth."""
    flags = next((line for line in host.read_or("/proc/cpuinfo", "").splitlines() if line.startswith("flags")), "")
    return bool({"cat_l3", "cat_l2", "mba"} & set(flags.split()))
