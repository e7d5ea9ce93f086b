"""The control groups (cgroups) that limit this process: where their files are, in both versions of the interface."""

from __future__ import annotations

from dataclasses import dataclass

from superadam.host.machine import Host


@dataclass(frozen=True, slots=True)
class Group:
    """A control group; its files have other names in version 1 than in version 2."""

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
