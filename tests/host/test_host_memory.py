"""Available memory: of the machine, or of the control groups of this process where they leave less."""

from __future__ import annotations

import logging
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from support.machines import machine

from superadam.host.announced import announced
from superadam.host.machine import Group, Host, groups_of
from superadam.host.memory import (
    Claim,
    HostMemory,
    HostNeeds,
    announce_needs,
    lockable_bytes,
    require_memory,
)

MEMINFO = {"/proc/meminfo": "MemTotal:       4000 kB\nMemFree: 1 kB\nMemAvailable:   3000 kB\n"}
VERSION_2 = {"/proc/self/cgroup": "0::/a/b"}
VERSION_1 = {"/proc/self/cgroup": "5:cpu:/c\n4:memory:/a"}
TOP, PARENT, GROUP = "/sys/fs/cgroup", "/sys/fs/cgroup/a", "/sys/fs/cgroup/a/b"


@pytest.mark.parametrize(
    ("files", "limit", "available"),
    [
        ({}, 4000 << 10, 3000 << 10),
        (VERSION_2, 4000 << 10, 3000 << 10),
        (VERSION_2 | {f"{GROUP}/memory.max": "max"}, 4000 << 10, 3000 << 10),
        (VERSION_2 | {f"{GROUP}/memory.max": "5000", f"{GROUP}/memory.current": "2000"}, 5000, 3000),
        (VERSION_2 | {f"{PARENT}/memory.max": "5000", f"{GROUP}/memory.max": "90000"}, 5000, 5000),
        (VERSION_2 | {f"{TOP}/memory.max": "5000", f"{TOP}/memory.current": "9000"}, 5000, 0),
        (
            VERSION_2
            | {
                f"{GROUP}/memory.max": "5000",
                f"{GROUP}/memory.current": "5000",
                f"{GROUP}/memory.stat": "anon 1\ninactive_file 700\nactive_file 3000",
            },
            5000,
            700,  # the file cache that can be dropped
        ),
        (VERSION_1 | {"/sys/fs/cgroup/memory/a/memory.limit_in_bytes": "9223372036854771712"}, 4000 << 10, 3000 << 10),
        (
            VERSION_1
            | {
                "/sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712",
                "/sys/fs/cgroup/memory/a/memory.limit_in_bytes": "7000",
                "/sys/fs/cgroup/memory/a/memory.usage_in_bytes": "4000",
                "/sys/fs/cgroup/memory/a/memory.stat": "inactive_file 1\ntotal_inactive_file 500\n",
            },
            7000,
            3500,
        ),
    ],
)
def test_available_memory(tmp_path: Path, files: dict[str, str], limit: int, available: int) -> None:
    memory = HostMemory.of(machine(tmp_path, MEMINFO | files))
    assert (memory.total, memory.limit, memory.available) == (4000 << 10, limit, available)


@pytest.mark.parametrize(("limit", "lockable"), [(8 << 20, 8 << 20), (resource.RLIM_INFINITY, None), (0, 0)])
def test_lockable_memory(monkeypatch: pytest.MonkeyPatch, limit: int, lockable: int | None) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (limit, resource.RLIM_INFINITY))
    assert lockable_bytes() == lockable


def test_a_machine_that_does_not_say(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="meminfo"):
        HostMemory.of(machine(tmp_path, {}))
    with pytest.raises(ValueError, match="no line MemAvailable, expected one"):
        HostMemory.of(machine(tmp_path, {"/proc/meminfo": "MemTotal: 4 kB"}))


GROUP_OF_5_GB = VERSION_2 | {f"{GROUP}/memory.max": "5000000000", f"{GROUP}/memory.current": "2000000000"}


@pytest.mark.parametrize(
    ("files", "limit", "available"),
    [
        ({"/proc/meminfo": "MemTotal: 5000000 kB\nMemAvailable: 3000000 kB\n"}, 5_120_000_000, 3_072_000_000),
        ({"/proc/meminfo": "MemTotal: 9000000 kB\nMemAvailable: 8000000 kB\n"} | GROUP_OF_5_GB, 5 * 10**9, 3 * 10**9),
    ],
    ids=["physical memory", "control group"],
)
def test_only_real_limits_refuse(
    files: dict[str, str], limit: int, available: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """In both, less than the limit is available; that is an estimate, of what is still to come."""
    host = machine(tmp_path, files)
    with caplog.at_level(logging.WARNING, "superadam"):
        require_memory(host, available, "it", "do less")
        require_memory(host, limit, "it", "do less", missing=available)
        assert not caplog.records
        require_memory(host, limit, "it", "do less", missing=available + 1)
        require_memory(host, available + 1, "it", "do less")
    assert len(caplog.records) == 2
    sentence = caplog.records[0].getMessage()
    assert f"needs about {(available + 1) / 1e9:.2f} GB more host memory, but by the system's estimate" in sentence
    assert f" {available / 1e9:.2f} GB are available" in sentence
    assert sentence.endswith("; do less")
    assert "\n" not in sentence
    with pytest.raises(MemoryError) as caught:
        require_memory(host, limit + 1, "it", "do less", missing=0)
    assert str(caught.value) == (
        f"it needs about {(limit + 1) / 1e9:.2f} GB of host memory, but this process can have {limit / 1e9:.2f} GB at "
        "most; do less"
    )


def test_claims_of_processes_that_share_a_limit_count_together(tmp_path: Path) -> None:
    """By directory of the control group, which may have the same path in another container."""
    boot = {"/proc/sys/kernel/random/boot_id": "one"}
    limit = {f"{GROUP}/memory.max": "5000", f"{GROUP}/memory.current": "4500"}
    caches = {f"{GROUP}/memory.stat": "inactive_file 700\nactive_file 800\nanon 900"}
    host = machine(tmp_path / "a", MEMINFO | boot | VERSION_2 | limit | caches)
    container = machine(tmp_path / "b", MEMINFO | boot | VERSION_2 | limit | caches)
    elsewhere = machine(tmp_path / "c", MEMINFO | {"/proc/sys/kernel/random/boot_id": "two"})
    claim = Claim.of(host, 1500)
    assert sorted(claim.left.values()) == [2000, 3000 << 10]
    for others in ([], [Claim.of(container, 1500)], [Claim.of(host, 500)], [Claim.of(elsewhere, 4000 << 10)]):
        claim.check([claim, *others])
    for others, words in (
        ([Claim.of(host, 501)], "with those of other ranks 0.00 GB, of which 0.00 GB are left"),
        ([Claim.of(container, 3000 << 10)], "with those of other ranks 0.00 GB, of which 0.00 GB are left"),
    ):
        with pytest.raises(MemoryError) as caught:
            claim.check([claim, *others])
        assert str(caught.value) == words
    alone = Claim.of(host, 2001)
    with pytest.raises(MemoryError, match=r"^of which 0\.00 GB are left$"):
        alone.check([alone])


def test_claim_on_a_machine_that_does_not_say_is_not_refused(tmp_path: Path) -> None:
    claim = Claim.of(machine(tmp_path, {}), 1 << 60)
    claim.check([claim])


def test_a_machine_that_does_not_say_refuses_nothing(tmp_path: Path) -> None:
    require_memory(machine(tmp_path, {}), 1 << 80, "it", "do less")


def test_needs_are_summed() -> None:
    one, other = HostNeeds(1, 2, 3, 4, 5, 6, 7), HostNeeds(10, 20, 30, 40, 50, 3, 5)
    assert one + other == HostNeeds(11, 22, 33, 44, 55, 6, 12)  # buckets under way are the largest ones
    assert one.total == 1 + 2 + 3 + 4 + 5 + 4 * 6
    assert one.missing == one.total - 7
    assert HostNeeds(present=1).missing == 0


def test_this_machine() -> None:
    memory = HostMemory.of(Host())
    assert 0 < memory.available <= memory.total
    assert 0 < memory.limit <= memory.total


def test_groups_and_their_parents(tmp_path: Path) -> None:
    two = machine(tmp_path / "2", VERSION_2)
    assert groups_of(two, "memory") == [Group(2, TOP), Group(2, PARENT), Group(2, GROUP)]
    one = machine(tmp_path / "1", {"/proc/self/cgroup": "4:cpu,cpuacct:/c\n3:memory:/a"})
    assert groups_of(one, "memory") == [Group(1, f"{TOP}/memory"), Group(1, f"{TOP}/memory/a")]
    mounts = [f"{TOP}/cpu,cpuacct", f"{TOP}/cpu,cpuacct/c", f"{TOP}/cpu", f"{TOP}/cpu/c"]
    assert groups_of(one, "cpu") == [Group(1, mount) for mount in mounts]
    assert groups_of(machine(tmp_path / "0", {}), "memory") == [Group(2, TOP)]


def announcing(root: Path, sizes: dict[int, int], group: str = "/a/b", resident: int = 0) -> dict[str, str]:
    """Let processes of a machine announce what they need; return their other files."""
    files = {}
    for process, size in sizes.items():
        folder = root / f"proc/{process}/fd"
        folder.mkdir(parents=True)
        (folder / "0").symlink_to("/dev/null")
        (folder / "9").symlink_to(f"/memfd:superadam-needs-{process:016x}-{size} (deleted)")
        files[f"/proc/{process}/status"] = f"Name:\tpython\nVmRSS:\t  {resident >> 10} kB\n"
        files[f"/proc/{process}/cgroup"] = f"0::{group}"
    return files


def test_ranks_that_do_not_fit_together_are_refused(tmp_path: Path) -> None:
    """Eight ranks of 105 GB on 512 GB, each of which would fit alone."""
    meminfo = {"/proc/meminfo": "MemTotal: 500000000 kB\nMemAvailable: 490000000 kB\n"}
    needed = 105 * 10**9
    files = meminfo | announcing(tmp_path, {200 + rank: needed for rank in range(8)})
    (tmp_path / "proc/205/fd/9").unlink()
    (tmp_path / "proc/205/fd/10").symlink_to("/memfd:superadam-needs-00000000000000c8-105000000000")  # forked from 200
    host = machine(tmp_path, files)
    with pytest.raises(MemoryError) as caught:
        require_memory(host, needed, "it", "do less")
    assert str(caught.value) == (
        "it needs about 105.00 GB of host memory, and other processes that train with superadam here need 630.00 GB, "
        "but together they can have 512.00 GB at most; do less, or start fewer ranks on this machine"
    )


def test_ranks_of_different_sizes_are_summed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    meminfo = {"/proc/meminfo": "MemTotal: 500000000 kB\nMemAvailable: 490000000 kB\n"}
    host = machine(tmp_path, meminfo | announcing(tmp_path, {201: 200 * 10**9}))
    require_memory(host, 300 * 10**9, "it", "do less")
    assert not caplog.records
    with pytest.raises(MemoryError, match="other processes"):
        require_memory(host, 313 * 10**9, "it", "do less")
    require_memory(host, 305 * 10**9, "it", "do less")
    assert "needs about 505.00 GB more host memory, with that of other processes" in caplog.text
    caplog.clear()
    (tmp_path / "proc/201/status").write_text("VmRSS:\t100000000 kB\n")  # it has most of it already
    require_memory(host, 305 * 10**9, "it", "do less")
    assert not caplog.records


def test_a_limit_counts_those_for_whom_it_holds(tmp_path: Path) -> None:
    group = MEMINFO | VERSION_2 | {f"{GROUP}/memory.max": "1000000"}
    apart = announcing(tmp_path / "apart", {201: 700_000}, "/a/c")
    require_memory(machine(tmp_path / "apart", group | apart), 700_000, "it", "do less")
    together = announcing(tmp_path / "together", {201: 700_000}, "/a/b/step")
    with pytest.raises(MemoryError, match=r"together they can have 0\.00 GB at most"):
        require_memory(machine(tmp_path / "together", group | together), 700_000, "it", "do less")


@pytest.mark.slow
def test_another_process_sees_what_is_announced() -> None:
    """Sizes that no scheduler of another test has."""
    code = (
        "import sys, superadam\nfrom superadam.host.machine import Host\nfrom superadam.host import memory\n"
        f"own = memory.announce_needs(5)\nprint(sorted(one.size for one in memory._announced(Host())"
        f" if one.process == {os.getpid()} and one.size < 10))"
    )
    announced = [announce_needs(3), announce_needs(4)]
    announced.append(announce_needs(7))
    announced[0].close()
    announced[0].close()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    for one in announced:
        one.close()
    assert done.stdout == "[4, 7]\n"


def test_forked_process_announces_nothing_of_its_parent() -> None:
    """A loader that was forked lives on after the parent has taken its announcement back."""
    one = announce_needs(6)
    told, ours = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(ours, str(len(announced(Host(), os.getpid(), "needs"))).encode())
        os._exit(0)
    assert os.read(told, 10) == b"0"
    os.waitpid(child, 0)
    assert "6" in announced(Host(), os.getpid(), "needs").values()
    one.close()
    for file in (told, ours):
        os.close(file)
