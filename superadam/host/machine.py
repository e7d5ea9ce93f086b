"""The files, environment, programs and control groups of the machine, in one place so that tests can substitute one."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from superadam.host.signals import THIS_THREAD

COMMAND_SECONDS = 10.0
"""Timeout of other programs; nvidia-smi takes a second or two where no daemon runs."""


def _run(words: Sequence[str]) -> str:
    return subprocess.run(words, capture_output=True, text=True, timeout=COMMAND_SECONDS, check=True).stdout


@dataclass(frozen=True, slots=True)
class Host:
    """A machine; `run` runs a program and returns what it prints, or raises OSError or subprocess.SubprocessError."""

    root: Path = Path("/")  # of its file system
    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    # CPUs that this process may run on: those of its first thread, as others may be bound near a GPU
    affinity: frozenset[int] = field(default_factory=lambda: frozenset(os.sched_getaffinity(os.getpid())))
    run: Callable[[Sequence[str]], str] = _run
    process: int = field(default_factory=os.getpid)

    def path(self, path: str) -> Path:
        """Return where the file with the absolute path `path` lies below `root`."""
        return self.root / path.lstrip("/")

    def read(self, path: str) -> str:
        """Return the text of a file, stripped; raises OSError where it cannot be read."""
        return self.path(path).read_text(errors="replace").strip()

    def read_or(self, path: str, default: str) -> str:
        """Return the text of a file, or `default` where it cannot be read."""
        with THIS_THREAD.without_handlers, suppress(OSError):
            return self.read(path)
        return default

    def glob(self, pattern: str) -> list[str]:
        """Return the absolute paths that match a pattern, sorted; none where a directory cannot be read."""
        with THIS_THREAD.without_handlers, suppress(OSError):
            return sorted("/" + str(path.relative_to(self.root)) for path in self.root.glob(pattern.lstrip("/")))
        return []


def cpus_of(text: str) -> frozenset[int]:
    """Return the numbers in a list as the kernel writes it, such as "0-3,8,10-11"; raises ValueError for other text."""
    numbers: set[int] = set()
    for part in filter(None, text.replace("\n", ",").split(",")):
        first, _, last = part.partition("-")
        numbers.update(range(int(first), int(last or first) + 1))
    return frozenset(numbers)


@dataclass(frozen=True, slots=True)
class Group:
    """A control group (cgroup); its files have other names in version 1 than in version 2."""

    version: int
    directory: str  # may not exist


def groups_of(host: Host, controller: str) -> list[Group]:
    """Return the groups that limit this process's "cpu" or "memory", with their parents, whose limits hold as well."""
    found = []
    for line in host.read_or("/proc/self/cgroup", "0::/").splitlines():
        _, controllers, path = line.split(":", 2)
        parts = [part for part in path.split("/") if part not in ("", "..")]
        if controllers == "":
            version, roots = 2, ["/sys/fs/cgroup"]
        elif controller in controllers.split(","):
            version, roots = 1, [f"/sys/fs/cgroup/{controllers}", f"/sys/fs/cgroup/{controller}"]
        else:
            continue
        for root in dict.fromkeys(roots):
            found += [Group(version, "/".join([root, *parts[:depth]])) for depth in range(len(parts) + 1)]
    return found
