"""Which of the ranks on its node this process is, and the processes of the others."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from superadam.host.machine import Host

_VARIABLES = (
    ("LOCAL_RANK", "LOCAL_WORLD_SIZE"),  # torchrun, accelerate launch
    ("LOCAL_RANK", "LOCAL_SIZE"),  # deepspeed
    ("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),  # Open MPI
    ("MPI_LOCALRANKID", "MPI_LOCALNRANKS"),  # Intel MPI, MPICH
    ("MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_SIZE"),  # MVAPICH
    ("SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"),  # srun; a batch script has no step
    ("LOCAL_RANK", "WORLD_SIZE"),  # Lightning, which does not tell how many of them are on this node: at most all
)
"""Variables of launchers with the number of a rank on its node, and with how many there are; the first pair counts."""


@dataclass(frozen=True, slots=True)
class LocalRank:
    """A rank among those on its node; `variable` tells the number to processes, and is empty without a launcher."""

    number: int = 0
    count: int = 1
    variable: str = ""


def local_rank(host: Host) -> LocalRank:
    """Return which of the ranks on this node this process is; the only one where no launcher tells.

    A pair of variables that makes no sense is passed over: Accelerate sets LOCAL_WORLD_SIZE to 1 where it is missing.
    Raises ValueError where there is no other.
    """
    environment, refused = host.environment, ""
    for number, count in _VARIABLES:
        if number in environment and count in environment:
            text = environment[count]
            if count == "SLURM_STEP_TASKS_PER_NODE":
                text = _tasks_on_node(environment)
            if _is_number(environment[number]) and _is_number(text) and int(environment[number]) < int(text):
                return LocalRank(int(environment[number]), int(text), number)
            refused = refused or (
                f"{number} is {environment[number]!r} and {count} is {environment[count]!r}, expected the number of "
                "this rank on its node, from 0 on, and how many ranks are there; start them with torchrun, or unset "
                "both variables for one process that has the whole node"
            )
    if refused:
        raise ValueError(refused)
    return LocalRank()


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) < 7  # no machine has so many ranks


def _tasks_on_node(environment: Mapping[str, str]) -> str:
    """Return the number of tasks on this node, of a list such as "4(x2),3"; an empty text where it has none."""
    counts: list[str] = []
    for part in environment["SLURM_STEP_TASKS_PER_NODE"].split(","):
        match = re.fullmatch(r"([0-9]+)(?:\(x([0-9]{1,6})\))?", part)
        counts += [match[1]] * int(match[2] or 1) if match else []
    node = environment.get("SLURM_NODEID", "0")
    return counts[int(node)] if _is_number(node) and int(node) < len(counts) else ""


def processes(host: Host, rank: LocalRank) -> list[int | None]:
    """Return the process of each rank on this node; None for one that cannot be seen, or is yet to be started.

    Those of other ranks are as far below the launcher as this one, as in a program that a shell script starts.
    """
    found: list[int | None] = [None] * rank.count
    found[rank.number] = host.process
    if rank.count == 1:
        return found
    parents = {int(path.split("/")[2]): _parent(host, path) for path in host.glob("/proc/[0-9]*/stat")}
    top, depth = host.process, 0
    while variable_of(host, parents.get(top, 0), rank.variable) == str(rank.number):
        top, depth = parents[top], depth + 1
    here = {
        pid: number
        for pid, parent in parents.items()
        if parent == parents.get(top) and pid != top
        if (number := variable_of(host, pid, rank.variable)) is not None
    }
    for _ in range(depth):
        here = {pid: here[parent] for pid, parent in parents.items() if parent in here}
    for other in range(rank.count):
        alike = [pid for pid, number in here.items() if number == str(other)]
        if other != rank.number and len(alike) == 1:
            found[other] = alike[0]
    return found


def _parent(host: Host, path: str) -> int:
    words = host.read_or(path, "").rpartition(")")[2].split()  # the name before may hold anything
    return int(words[1]) if len(words) > 1 else 0


def variable_of(host: Host, pid: int, variable: str) -> str | None:
    """Return a variable of the environment that a process was started with, where it may be asked."""
    for line in host.read_or(f"/proc/{pid}/environ", "").split("\0"):
        name, _, value = line.partition("=")
        if name == variable:
            return value
    return None
