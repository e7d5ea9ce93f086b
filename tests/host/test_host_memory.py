"""Available memory: of the machine, or of the control groups of this process where they leave less."""

import resource

import pytest
from support.machines import machine

from superadam.host.machine import Group, groups_of
from superadam.host.memory import Claim, HostMemory, HostNeeds, lockable_bytes

MEMINFO = {"/proc/meminfo": "MemTotal:       4000 kB\nMemFree: 1 kB\nMemAvailable:   3000 kB\n"}
VERSION_2 = {"/proc/self/cgroup": "0::/a/b"}
VERSION_1 = {"/proc/self/cgroup": "5:cpu:/c\n4:memory:/a"}
TOP, PARENT, GROUP = "/sys/fs/cgroup", "/sys/fs/cgroup/a", "/sys/fs/cgroup/a/b"
TOP_1, GROUP_1, WITHOUT_LIMIT_1 = f"{TOP}/memory", f"{TOP}/memory/a", 9223372036854771712


def group(directory: str, limit: object, used: int | None = None, stat: str | None = None) -> dict[str, str]:
    """Return what the files of a control group say, which are called otherwise in version 1."""
    of_limit, of_use = ("limit_in_bytes", "usage_in_bytes") if directory.startswith(TOP_1) else ("max", "current")
    values = {of_limit: limit, of_use: used, "stat": stat}
    return {f"{directory}/memory.{name}": str(value) for name, value in values.items() if value is not None}


CACHES = "anon 1\ninactive_file 700\nactive_file 3000"  # of files, which can be dropped
CACHES_1 = "inactive_file 1\ntotal_inactive_file 500\n"


@pytest.mark.parametrize(
    ("files", "limit", "available"),
    [
        ({}, 4000 << 10, 3000 << 10),
        (VERSION_2, 4000 << 10, 3000 << 10),
        (VERSION_2 | group(GROUP, "max"), 4000 << 10, 3000 << 10),
        (VERSION_2 | group(GROUP, 5000, 2000), 5000, 3000),
        (VERSION_2 | group(PARENT, 5000) | group(GROUP, 90000), 5000, 5000),
        (VERSION_2 | group(TOP, 5000, 9000), 5000, 0),
        (VERSION_2 | group(GROUP, 5000, 5000, CACHES), 5000, 3700),
        (VERSION_1 | group(GROUP_1, WITHOUT_LIMIT_1), 4000 << 10, 3000 << 10),
        (VERSION_1 | group(TOP_1, WITHOUT_LIMIT_1) | group(GROUP_1, 7000, 4000, CACHES_1), 7000, 3500),
    ],
)
def test_available_memory(tmp_path, files, limit, available):
    memory = HostMemory.of(machine(tmp_path, MEMINFO | files))
    assert (memory.total, memory.limit, memory.available) == (4000 << 10, limit, available)


@pytest.mark.parametrize(
    ("status", "limit", "available"),
    [
        ("online", 3000 << 10, 1900 << 10),
        ("online_in_progress", 4000 << 10, 3000 << 10),
        (None, 4000 << 10, 3000 << 10),
    ],
)
def test_memory_of_a_gpu_that_the_kernel_counts_is_not_the_hosts(tmp_path, status, limit, available):
    """As on a GH200, in the words of NVIDIA's driver and of the kernel; elsewhere a node without CPUs is memory."""
    node = "".join(
        f"Node 1 {name}: {size:14} kB\n"
        for name, size in {"MemTotal": 1000, "MemFree": 800, "Active(file)": 200, "Inactive(file)": 100}.items()
    )
    files = MEMINFO | {"/sys/devices/system/node/node1/meminfo": node}
    if status is not None:
        text = f"Node:      1\nStatus:    {status}\nAddress:   400000000000\nSize:      1800000000\n"
        files |= {"/proc/driver/nvidia/gpus/0009:01:00.0/numa_status": text}
    memory = HostMemory.of(machine(tmp_path, files))
    assert (memory.total, memory.limit, memory.available) == (limit, limit, available)


@pytest.mark.parametrize(("limit", "lockable"), [(8 << 20, 8 << 20), (resource.RLIM_INFINITY, None), (0, 0)])
def test_lockable_memory(monkeypatch, limit, lockable):
    monkeypatch.setattr(resource, "getrlimit", lambda which: (limit, resource.RLIM_INFINITY))
    assert lockable_bytes() == lockable


def test_a_machine_that_does_not_say(tmp_path):
    with pytest.raises(OSError, match="meminfo"):
        HostMemory.of(machine(tmp_path, {}))
    with pytest.raises(ValueError, match="no line MemAvailable, expected one"):
        HostMemory.of(machine(tmp_path, {"/proc/meminfo": "MemTotal: 4 kB"}))


GROUP_OF_5_GB = VERSION_2 | group(GROUP, 5_000_000_000, 2_000_000_000)


@pytest.mark.parametrize(
    ("files", "limit", "available"),
    [
        ({"/proc/meminfo": "MemTotal: 5000000 kB\nMemAvailable: 3000000 kB\n"}, 5_120_000_000, 3_072_000_000),
        ({"/proc/meminfo": "MemTotal: 9000000 kB\nMemAvailable: 8000000 kB\n"} | GROUP_OF_5_GB, 5 * 10**9, 3 * 10**9),
    ],
    ids=["physical memory", "control group"],
)
def test_only_real_limits_refuse(files, limit, available, tmp_path, caplog):
    """In both, less than the limit is available; that is an estimate, of what is still to come."""
    host = machine(tmp_path, files)
    HostNeeds(available).check(host)
    HostNeeds(limit, present=limit - available).check(host)
    assert not caplog.records
    HostNeeds(limit, present=limit - available - 1).check(host)
    HostNeeds(available + 1).check(host)
    assert len(caplog.records) == 2
    sentence = caplog.records[0].getMessage()
    assert f"needs about {(available + 1) / 1e9:.2f} GB more host memory, but by the system's estimate" in sentence
    assert f" {available / 1e9:.2f} GB are available" in sentence
    assert sentence.endswith("; allow this process more memory, train fewer parameters")
    assert "\n" not in sentence
    with pytest.raises(MemoryError) as caught:
        HostNeeds(limit + 1, present=limit + 1).check(host)
    too_many, most = (f"{size / 1e9:.2f} GB" for size in (limit + 1, limit))
    assert str(caught.value) == (
        f"training ({too_many} of state, 0.00 GB of gradients, 0.00 GB of new values and buckets under way) needs "
        f"about {too_many} of host memory, but this process can have {most} at most; allow this process more memory, "
        "train fewer parameters"
    )


def test_claims_of_processes_that_share_a_limit_count_together(tmp_path):
    """By directory of the control group, which may have the same path in another container."""
    boot = {"/proc/sys/kernel/random/boot_id": "one"}
    limited = MEMINFO | boot | VERSION_2 | group(GROUP, 5000, 4500, "inactive_file 700\nactive_file 800\nanon 900")
    host, container = machine(tmp_path / "a", limited), machine(tmp_path / "b", limited)
    elsewhere = machine(tmp_path / "c", MEMINFO | {"/proc/sys/kernel/random/boot_id": "two"})
    claim = Claim.of(host, 1500)
    assert sorted(claim.left.values()) == [2000, 3000 << 10]
    for others in ([], [Claim.of(container, 1500)], [Claim.of(host, 500)], [Claim.of(elsewhere, 4000 << 10)]):
        claim.check([claim, *others])
    for other in (Claim.of(host, 501), Claim.of(container, 3000 << 10)):
        with pytest.raises(MemoryError, match=r"^with those of other ranks 0\.00 GB, of which 0\.00 GB are left$"):
            claim.check([claim, other])
    alone = Claim.of(host, 2001)
    with pytest.raises(MemoryError, match=r"^of which 0\.00 GB are left$"):
        alone.check([alone])


def test_a_machine_that_does_not_say_refuses_nothing(tmp_path):
    HostNeeds(1 << 80).check(machine(tmp_path, {}))
    claim = Claim.of(machine(tmp_path, {}), 1 << 60)
    claim.check([claim])


def test_needs_are_summed():
    one, other = HostNeeds(1, 2, 3, 4, 5, 6, 7), HostNeeds(10, 20, 30, 40, 50, 3, 5)
    assert one + other == HostNeeds(11, 22, 33, 44, 55, 6, 12)  # buckets under way are the largest ones
    assert one.total == 1 + 2 + 3 + 4 + 5 + 4 * 6
    assert one.missing == one.total - 7
    assert HostNeeds(present=1).missing == 0


def test_groups_and_their_parents(tmp_path):
    assert groups_of(machine(tmp_path / "2", VERSION_2), "memory") == [Group(2, TOP), Group(2, PARENT), Group(2, GROUP)]
    one = machine(tmp_path / "1", {"/proc/self/cgroup": "4:cpu,cpuacct:/c\n3:memory:/a"})
    assert groups_of(one, "memory") == [Group(1, f"{TOP}/memory"), Group(1, f"{TOP}/memory/a")]
    mounts = [f"{TOP}/cpu,cpuacct", f"{TOP}/cpu,cpuacct/c", f"{TOP}/cpu", f"{TOP}/cpu/c"]
    assert groups_of(one, "cpu") == [Group(1, mount) for mount in mounts]
    assert groups_of(machine(tmp_path / "0", {}), "memory") == [Group(2, TOP)]


RANKS = {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "8"}


def test_ranks_that_do_not_fit_together_are_told(tmp_path, caplog):
    """Eight ranks of 65 GB on 512 GB, each of which would fit alone."""
    meminfo = {"/proc/meminfo": "MemTotal: 500000000 kB\nMemAvailable: 490000000 kB\n"}
    host = machine(tmp_path, meminfo, RANKS)
    needed = 65 * 10**9
    HostNeeds(needed).check(machine(tmp_path, meminfo))
    assert not caplog.records
    HostNeeds(needed).check(host)
    assert [record.message for record in caplog.records] == [
        "training (65.00 GB of state, 0.00 GB of gradients, 0.00 GB of new values and buckets under way) needs about "
        "65.00 GB of host memory, and 8 ranks on this machine need 520.00 GB if each needs as much, but they can have "
        "512.00 GB together at most; allow this process more memory, train fewer parameters, or start fewer ranks on "
        "this machine"
    ]
    caplog.clear()
    HostNeeds(64 * 10**9, present=2 * 10**9).check(host)
    assert not caplog.records
    HostNeeds(64 * 10**9, present=10**9).check(host)
    assert "needs about 504.00 GB more host memory on 8 ranks, but by the system's estimate" in caplog.text


def test_a_control_group_may_hold_one_rank_or_all(tmp_path, caplog):
    host = machine(tmp_path, MEMINFO | VERSION_2 | group(GROUP, 1_000_000), RANKS)
    HostNeeds(125_001).check(host)
    assert "8 ranks on this machine need 0.00 GB if each needs as much, but they can" in caplog.text
    with pytest.raises(MemoryError):
        HostNeeds(1_000_001).check(host)
