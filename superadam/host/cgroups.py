"""The control groups of this process: where the kernel writes how much time and memory they are allowed.

Owns the paths, for both versions of the interface. What the files there hold is read by who needs it.
"""

from __future__ import annotations

from dataclasses import dataclass

from superadam.host.machine import Host


@dataclass(frozen=True, slots=True)
class Group:
    """A control group.

    Attributes:
        version: of the interface, 1 or 2; files have other names in each.
        directory: where they lie; there may be no such directory.
    """

    version: int
    directory: str


def groups_of(host: Host, controller: str) -> list[Group]:
    """Return the groups that bind this process, and their parents, whose limits hold as well.

    Args:
        host: the machine.
        controller: "cpu" or "memory".
    """
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
