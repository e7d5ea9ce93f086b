"""Probes of memory: its size, how it is mapped and locked, and its bandwidth, measured as an update moves it."""

from __future__ import annotations

import time
from contextlib import suppress

from superadam.cli.bench import floor
from superadam.cli.bench.arrays import PassArrays
from superadam.cli.bench.floor import Variant
from superadam.cli.bench.report import in_words
from superadam.cli.doctor.finding import Finding
from superadam.cli.traffic import bytes_per_element
from superadam.host.local_ranks import local_rank
from superadam.host.machine import Host, groups_of
from superadam.host.memory import HostMemory, lockable_bytes
from superadam.kernels import native
from superadam.kernels.native import Dtype, Pass
from superadam.offload.needs import bytes_of_state
from superadam.state.storage import Moments, Storage
from superadam.state.uncertain import list_bytes

GIB = 1 << 30
MEASURED_BYTES = GIB
"""Size of the arrays that the bandwidth is measured over: more than most caches hold."""
MEASURED_SECONDS = 0.4
"""For how long each number of threads is measured."""
NOTABLE_LOAD = 0.5
"""Programs that were ready to run, on average, from which the report names them."""
VARIANTS = (Variant(128, 2 << 10, stream_out=True), Variant(32, 2 << 10, stream_out=True), Variant(128, 0))
"""Ways to move memory that are tried; `superadam bench` tries more."""
BESIDE_STATE = 2 + list_bytes(GIB) / GIB
"""Bytes on the host beside the state, for a bf16 parameter on a GPU: its gradient, and the list of a clipped step."""
UPDATE_BYTES = bytes_per_element(Pass.UPDATE, Dtype.FLOAT32, Dtype.BFLOAT16)


def main_memory(host: Host) -> Finding:
    """Report how much memory is free, and how many parameters' state would fit into that."""
    memory = HostMemory.of(host)
    values = {"total_bytes": memory.total, "limit_bytes": memory.limit, "available_bytes": memory.available}
    formats = Storage(), Storage(Moments.BFLOAT16)
    counts = [in_words(memory.available / (bytes_of_state(each) + BESIDE_STATE)) for each in formats]
    fits = f"training of {counts[0]} parameters in bf16 on a GPU ({counts[1]} with moments in bf16)"
    detail = f"{memory.available / GIB:.1f} of {memory.total / GIB:.1f} GiB available"
    if memory.limit < memory.total:
        detail += f", where the control group allows {memory.limit / GIB:.1f}"
    detail += f": {fits}"
    with suppress(ValueError):
        count = local_rank(host).count
        detail += f", of all {count} ranks together" if count > 1 else ""
    return Finding(detail, values=values)


def huge_pages(host: Host) -> Finding:
    """Report whether large tensors get huge pages, which spare the processor most address translations."""
    text = host.read("/sys/kernel/mm/transparent_hugepage/enabled")
    mode = text.partition("[")[2].partition("]")[0]
    advised = host.environment.get("THP_MEM_ALLOC_ENABLE") == "1"
    values = {"mode": mode, "torch_advises": advised}
    if mode == "always":
        return Finding("always", values=values)
    remedy = "export THP_MEM_ALLOC_ENABLE=1"
    if mode == "madvise":
        if advised:
            return Finding("madvise, and torch asks for them", values=values)
        return Finding("madvise: for tensors only if torch asks for them", remedy, values)
    remedy = f"echo madvise | sudo tee /sys/kernel/mm/transparent_hugepage/enabled; {remedy}"
    return Finding(mode or f"not understood: {text!r}", remedy, values)


def pinned_memory(host: Host) -> Finding:
    """Report how much memory this process may lock, which transfers to a GPU at full speed need."""
    import torch

    limit = lockable_bytes()
    values = {"limit_bytes": limit}
    if limit is None:
        return Finding("unlimited", values=values)
    detail = f"at most {limit / (1 << 20):,.0f} MiB"
    if not torch.cuda.is_available():
        return Finding(f"{detail}; only a GPU needs it", values=values)
    return Finding(detail, "ulimit -l unlimited", values)


def measure_bandwidth(arrays: PassArrays, threads: int, seconds: float = MEASURED_SECONDS) -> float:
    """Return the bytes per second that an update moves: the best run of all variants within about `seconds`."""
    actions = [floor.action(arrays, Pass.UPDATE, variant, threads) for variant in VARIANTS]
    moved = arrays.numel * bytes_per_element(Pass.UPDATE, arrays.gradient_dtype, arrays.out_dtype)
    best, end = 0.0, time.perf_counter() + seconds
    while best == 0.0 or time.perf_counter() < end:
        for action in actions:
            start = time.perf_counter()
            action()
            best = max(best, moved / (time.perf_counter() - start))
    return best


def _throttled_seconds(host: Host) -> float:
    """Return for how long the quotas of this process's control groups have stopped its threads so far."""
    seconds = 0.0
    for group in groups_of(host, "cpu"):
        counts = dict(line.split()[:2] for line in host.read_or(f"{group.directory}/cpu.stat", "").splitlines() if line)
        seconds += float(counts.get("throttled_usec", 0)) / 1e6 + float(counts.get("throttled_time", 0)) / 1e9
    return seconds


def bandwidth(host: Host, measured_bytes: int = MEASURED_BYTES) -> Finding:
    """Measure what one thread and all threads get from memory, which is what limits a step."""
    try:
        threads = native.get_num_threads()
    except ValueError:
        threads = len(host.affinity)
    with suppress(OSError, ValueError):
        measured_bytes = min(measured_bytes, HostMemory.of(host).available // 4)
    numel = max(measured_bytes // 22 // native.CHUNK, 1) * native.CHUNK  # p, m, v, two gradients: 20 B; out: 2 B
    arrays = PassArrays(numel, Dtype.FLOAT32, Dtype.BFLOAT16)
    before = _throttled_seconds(host)
    load = float((host.read_or("/proc/loadavg", "") or "0").split()[0])  # of the last minute, without what follows
    best = {count: measure_bandwidth(arrays, count) for count in dict.fromkeys((threads, 1))}
    throttled = _throttled_seconds(host) - before
    values = {"bytes_per_second": best[threads], "one_thread": best[1], "threads": threads, "measured_over": numel * 22}
    values |= {"load": load, "throttled_seconds": throttled}
    by_threads = f"with {threads} threads, {best[1] / 1e9:.1f} with one" if threads > 1 else "with one thread"
    detail = f"{best[threads] / 1e9:.1f} GB/s {by_threads}"
    detail += f": a step of a billion parameters moves 30 GB in {UPDATE_BYTES * 1e9 / best[threads]:.2f} s"
    disturbed = [f"a load of {load:g} of the minute before"] if load >= NOTABLE_LOAD else []
    disturbed += [f"a quota that stopped its threads for {throttled:.2f} s"] if throttled > 0 else []
    if disturbed:
        detail += f"; measured next to {' and '.join(disturbed)}, so that it may be more"
    return Finding(detail, values=values)
