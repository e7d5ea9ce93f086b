"""Machines that are made up: what their files, their environment and their programs say."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from superadam.host.machine import Host


def eight_gpus(nodes: int = 2, cpus: int = 144, siblings: int = 1) -> dict[str, str]:
    """Return the files of a machine with eight GPUs, half of them on each of two NUMA nodes, or all on one.

    Of `cpus` CPUs, number `c` and those `cpus / siblings` after it are on one core.
    """
    cores, files = cpus // siblings, {}
    of_node: list[list[int]] = [[] for _ in range(nodes)]
    for cpu in range(cpus):
        core = cpu % cores
        of_node[core * nodes // cores].append(cpu)
        alike = ",".join(str(core + cores * one) for one in range(siblings))
        files[f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"] = alike
    for node, here in enumerate(of_node):
        files[f"/sys/devices/system/node/node{node}/cpulist"] = ",".join(map(str, here))
    for gpu, address in enumerate(GPUS):
        files[f"/sys/bus/pci/devices/{address}/numa_node"] = str(gpu * nodes // 8)
        files[f"/sys/bus/pci/devices/{address}/vendor"] = "0x10de"
        files[f"/sys/bus/pci/devices/{address}/device"] = "0x2330"
    return files


GPUS = [f"0000:{bus:02x}:00.0" for bus in range(0x10, 0x90, 0x10)]
LAUNCHER = 100  # the process that has started all ranks


def ranks(files: dict[str, str], affinities: Sequence[str], *, script: bool = False) -> dict[str, str]:
    """Return the files of a machine with the processes of torchrun: 200 is rank 0, 201 is rank 1, and so on.

    With `script`, each was started by a shell script, 300 and so on, which may run anywhere.
    """
    processes = {"/proc/1/stat": "1 (init) S 0 1", f"/proc/{LAUNCHER}/stat": f"{LAUNCHER} (torch run) S 1 1"}
    for rank, allowed in enumerate(affinities):
        for first, parent in ((300, LAUNCHER), (200, 300 + rank)) if script else ((200, LAUNCHER),):
            cpus = "0-143" if first == 300 else allowed
            processes[f"/proc/{first + rank}/stat"] = f"{first + rank} (python (3) x) S {parent} 1 1"
            processes[f"/proc/{first + rank}/environ"] = f"HOME=/\0LOCAL_RANK={rank}\0X=1\0"
            processes[f"/proc/{first + rank}/status"] = f"Name:\tpython\nCpus_allowed_list:\t{cpus}\nThreads: 1\n"
    return files | processes


def machine(
    root: Path,
    files: Mapping[str, str] | None = None,
    environment: dict[str, str] | None = None,
    affinity: frozenset[int] = frozenset(range(8)),
    programs: Mapping[str, str] | None = None,
    process: int = 200,
) -> Host:
    """Return a machine of these files below `root`; `programs` maps a word of a command line to what is printed."""
    for path, text in (files or {}).items():
        target = root / path.lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)

    def run(words: Sequence[str]) -> str:
        for word, output in (programs or {}).items():
            if any(word in given for given in words):
                return output
        raise FileNotFoundError(words[0])

    return Host(root, environment or {}, affinity, run, process)
