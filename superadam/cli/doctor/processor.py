"""Probes of the CPU: instruction sets, cores, threads and NUMA nodes."""

from __future__ import annotations

import math

from superadam.cli.bench.report import processor_name
from superadam.cli.doctor.finding import Finding, Status
from superadam.host import cores
from superadam.host.local_ranks import local_rank
from superadam.host.machine import Host, cpus_of, groups_of
from superadam.kernels import native

REBUILD = "pip install --force-reinstall --no-deps .  # in the clone"


def instruction_sets(host: Host) -> Finding:
    """Report which kernels can run here, which does, and why that one."""
    known = native.known_isas()
    forced = host.environment.get("SUPERADAM_ISA") or None
    others = ", ".join(f"{isa} {status}" for isa, status in known.items() if status != "runnable")
    available = native.available_isas()
    values: dict[str, object] = {"known": known, "active": None, "forced": forced}
    try:
        values["active"] = active = native.active_isa()
    except ValueError as error:
        return Finding(str(error), "unset SUPERADAM_ISA", values, Status.BROKEN)
    reason = "SUPERADAM_ISA says so" if active == forced else "the best of " + ", ".join(available)
    detail = f"{active}: {reason}" + (f"; {others}" if others else "")
    if active != available[0]:
        return Finding(f"{detail}; {available[0]} is faster", "unset SUPERADAM_ISA", values)
    remedy = REBUILD if active == "scalar" or "not compiled" in known.values() else ""
    return Finding(detail, remedy, values)


def processors(host: Host) -> Finding:
    """Report the CPU's name, its cores, and how many of its CPUs this process may run on."""
    name = processor_name(host)
    online = cpus_of(host.read("/sys/devices/system/cpu/online"))
    siblings = {
        host.read(path) for path in host.glob("/sys/devices/system/cpu/cpu[0-9]*/topology/thread_siblings_list")
    }
    cores = len(siblings) or len(online)
    values = {"name": name, "cores": cores, "cpus": len(online), "allowed": len(host.affinity)}
    detail = f"{name or 'unnamed'}: {cores} cores, {len(online)} CPUs"
    if online - host.affinity:
        detail += f", of which this process may use {len(host.affinity)} ({ranges_of(host.affinity)})"
    return Finding(detail, values=values)


def cpu_quota(host: Host) -> float | None:
    """Return the number of CPUs whose time the cgroups of this process allow, or None without a limit."""
    limits = []
    for group in groups_of(host, "cpu"):
        if group.version == 2:
            quota, _, period = host.read_or(f"{group.directory}/cpu.max", "max 1").partition(" ")
        else:
            quota = host.read_or(f"{group.directory}/cpu.cfs_quota_us", "-1")
            period = host.read_or(f"{group.directory}/cpu.cfs_period_us", "100000")
        if quota != "max" and float(quota) > 0:
            limits.append(float(quota) / float(period))
    return min(limits) if limits else None


def ranks(host: Host) -> Finding:
    """Report the ranks that a launcher has started on this node, and the CPUs that each of them gets."""
    try:
        shares = cores.shares(host)
    except ValueError as error:
        return Finding(str(error), "unset LOCAL_RANK LOCAL_WORLD_SIZE", fault=Status.BROKEN)
    values = {"shares": [sorted(share) for share in shares]}
    if len(shares) == 1:
        return Finding("one, which may use every CPU of this process", values=values)
    detail = "; ".join(f"rank {rank}: CPUs {ranges_of(share)}" for rank, share in enumerate(shares))
    if sum(map(len, shares)) > len(frozenset.union(*shares)):
        detail += "; some share a CPU, because there are fewer than ranks"
        return Finding(detail, f"torchrun --nproc-per-node {len(frozenset.union(*shares))}", values)
    return Finding(detail, values=values)


def threads(host: Host) -> Finding:
    """Report the number of threads that superadam and torch would use, and that this process, one of ranks, may use."""
    import torch

    forced = host.environment.get("SUPERADAM_THREADS")
    quota, torch_threads = cpu_quota(host), torch.get_num_threads()
    try:
        ranks_here, allowed = local_rank(host).count, len(cores.share(host))
    except ValueError as error:
        return Finding(str(error), "unset LOCAL_RANK LOCAL_WORLD_SIZE", fault=Status.BROKEN)
    if quota:
        allowed = min(allowed, math.floor(quota / ranks_here) or 1)
    values: dict[str, object] = {"superadam": None, "torch": torch_threads, "affinity": len(host.affinity)}
    values |= {"quota": quota, "forced": forced}
    try:
        values["superadam"] = count = native.get_num_threads()
    except ValueError as error:
        return Finding(str(error), "unset SUPERADAM_THREADS", values, Status.BROKEN)
    of_its = "it may use" if ranks_here == 1 else "of its share"
    why = "SUPERADAM_THREADS" if forced else f"one for each CPU {of_its}"
    detail = f"superadam {count} ({why}), torch {torch_threads}"
    if quota:
        detail += f", CPU quota {quota:g}"
    counts = {"SUPERADAM_THREADS": count, "OMP_NUM_THREADS": torch_threads}
    if larger := [f"{variable}={allowed}" for variable, value in counts.items() if value > allowed]:
        detail += f"; only {allowed} can run at once"
        return Finding(detail, f"export {' '.join(larger)}", values)
    if count < allowed:
        detail += f"; {allowed} are allowed"
    return Finding(detail, values=values)


def numa_nodes(host: Host) -> Finding:
    """Report the nodes, and whether this process spans several of them."""
    paths = host.glob("/sys/devices/system/node/node[0-9]*")
    if not paths:
        return Finding("/sys/devices/system/node lists none; the kernel may lack NUMA", fault=Status.UNKNOWN)
    nodes = {
        path.removeprefix("/sys/devices/system/node/node"): cpus_of(host.read(f"{path}/cpulist")) for path in paths
    }
    with_cpus = {node: cpus for node, cpus in nodes.items() if cpus}
    ours = [node for node, cpus in with_cpus.items() if cpus & host.affinity]
    values = {"nodes": {node: sorted(cpus) for node, cpus in nodes.items()}, "spanned": ours}
    if len(with_cpus) <= 1:
        memory_only = len(nodes) - len(with_cpus)
        detail = "one" + (f", and {memory_only} of memory only" if memory_only else "")
        return Finding(detail, values=values)
    detail = "; ".join(f"node {node}: CPUs {ranges_of(cpus)}" for node, cpus in with_cpus.items())
    if len(ours) > 1:
        remedy = f"numactl --cpunodebind={ours[0]} --membind={ours[0]} COMMAND"
        return Finding(f"{detail}; this process spans {len(ours)}", remedy, values)
    return Finding(f"{detail}; this process stays on {', '.join(ours)}", values=values)


def ranges_of(numbers: frozenset[int]) -> str:
    """Return the shortest list that `cpus_of` parses to these numbers."""
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and parts[-1][-1] == number - 1:
            parts[-1][1:] = [number]
        else:
            parts.append([number])
    return ",".join("-".join(map(str, part)) for part in parts)
