"""The share of a rank: of the CPUs of its node, and of those near its GPU; on made-up machines and on this one.

And threads that stay on it.
"""

import json
import os
import subprocess
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import combinations
from pathlib import Path
from unittest.mock import Mock

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.children import without_torch
from support.machines import GPUS, eight_gpus, machine, ranks

from superadam.host import cores
from superadam.host.local_ranks import LocalRank, local_rank, processes
from superadam.host.machine import Host, cpus_of


def hosts(
    root: Path, count: int, affinities: Sequence[frozenset[int]], files: dict[str, str] | None = None
) -> list[Host]:
    """Return one machine as each of its ranks sees it."""
    base = machine(root, files)
    return [
        Host(base.root, {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(count)}, allowed, base.run, 200 + rank)
        for rank, allowed in enumerate(affinities)
    ]


def are_disjoint(shares: Sequence[frozenset[int]]) -> bool:
    return all(one.isdisjoint(other) for one, other in combinations(shares, 2))


def listed(cpus: frozenset[int]) -> str:
    return ",".join(map(str, sorted(cpus)))


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, ()),
        ({"RANK": "3", "WORLD_SIZE": "8"}, ()),
        ({"LOCAL_RANK": "3"}, ()),
        ({"LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "8", "WORLD_SIZE": "16"}, (3, 8, "LOCAL_RANK")),
        ({"LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "8", "SLURM_LOCALID": "0"}, (3, 8, "LOCAL_RANK")),
        ({"LOCAL_RANK": "1", "LOCAL_SIZE": "4", "WORLD_SIZE": "16"}, (1, 4, "LOCAL_RANK")),
        ({"LOCAL_RANK": "1", "WORLD_SIZE": "4"}, (1, 4, "LOCAL_RANK")),
        ({"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "1", "WORLD_SIZE": "4"}, (1, 4, "LOCAL_RANK")),
        ({"OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, (1, 2, "OMPI_COMM_WORLD_LOCAL_RANK")),
        ({"SLURM_LOCALID": "1", "SLURM_STEP_TASKS_PER_NODE": "2"}, (1, 2, "SLURM_LOCALID")),
        ({"SLURM_LOCALID": "2", "SLURM_STEP_TASKS_PER_NODE": "2(x3),5", "SLURM_NODEID": "3"}, (2, 5, "SLURM_LOCALID")),
        ({"SLURM_LOCALID": "0", "SLURM_TASKS_PER_NODE": "8"}, ()),  # the batch script
    ],
)
def test_what_launchers_tell(environment, expected, tmp_path):
    assert local_rank(machine(tmp_path, environment=environment)) == LocalRank(*expected)


def test_nonsense_is_refused(tmp_path):
    numbers = [("8", "8"), ("-1", "8"), ("0", "0"), ("", "8"), ("0", ""), ("1", "two"), ("\u0661", "8"), ("0", "1" * 7)]
    told = "^LOCAL_RANK is '.*' and LOCAL_WORLD_SIZE is '.*', expected the number"
    cases = [({"LOCAL_RANK": number, "LOCAL_WORLD_SIZE": count}, told) for number, count in numbers]
    slurm, told = {"SLURM_LOCALID": "0", "SLURM_NODEID": "1"}, "SLURM_LOCALID is '0' and SLURM_STEP_TASKS_PER_NODE is "
    cases += [(slurm | {"SLURM_STEP_TASKS_PER_NODE": tasks}, told) for tasks in ("", "x", "2(x", "3(x1)")]
    for environment, words in cases:
        with pytest.raises(ValueError, match=words) as error:
            cores.share(machine(tmp_path, environment=environment))
        assert "\n" not in str(error.value)


@pytest.mark.parametrize("script", [False, True])
def test_processes_of_the_other_ranks(script, tmp_path):
    files = ranks({}, ["0-3"] * 3, script=script)
    files["/proc/400/stat"] = "400 (loader) S 201 1"  # of rank 1
    files["/proc/400/environ"] = "LOCAL_RANK=1\0"
    files["/proc/500/stat"] = "500 (python) S 9 1"  # of another job
    files["/proc/500/environ"] = "LOCAL_RANK=2\0"
    for rank, host in enumerate(hosts(tmp_path, 4, [frozenset(range(4))] * 4, files)[:3]):
        assert processes(host, local_rank(host)) == [200, 201, 202, None], rank


def test_ranks_that_cannot_be_seen_may_have_the_same_cpus(tmp_path):
    seen = [cores.share(one) for one in hosts(tmp_path, 3, [frozenset(range(9))] * 3)]
    assert seen == [{0, 1, 2}, {3, 4, 5}, {6, 7, 8}]


def test_what_a_launcher_gave_is_not_divided_again(tmp_path):
    """As `torchrun --numa-binding exclusive` and `node` do, and mpirun."""
    own = [frozenset(range(4 * rank, 4 * rank + 4)) for rank in range(4)]
    files = ranks(eight_gpus(), [listed(one) for one in own])
    assert [cores.share(one) for one in hosts(tmp_path / "own", 4, own, files)] == own
    for rank, host in enumerate(hosts(tmp_path / "own", 4, own)):
        assert cores.share(host, GPUS[rank]) == own[rank]
    of_node = [frozenset(range(72 * node, 72 * node + 72)) for node in (0, 0, 1, 1)]
    files = ranks(eight_gpus(), [listed(one) for one in of_node], script=True)
    seen = [cores.share(one) for one in hosts(tmp_path / "nodes", 4, of_node, files)]
    assert seen == [set(range(36)), set(range(36, 72)), set(range(72, 108)), set(range(108, 144))]


@pytest.mark.parametrize("siblings", [1, 2])
def test_eight_ranks_on_two_nodes(siblings, tmp_path):
    here = hosts(tmp_path, 8, [frozenset(range(144))] * 8, eight_gpus(siblings=siblings))
    found = [cores.share(host, GPUS[rank]) for rank, host in enumerate(here)]
    assert are_disjoint(found)
    assert [len(one) for one in found] == [18] * 8
    for rank, one in enumerate(found):
        assert one <= cpus_of((tmp_path / f"sys/devices/system/node/node{rank // 4}/cpulist").read_text())
        assert siblings == 1 or {(cpu + 72) % 144 for cpu in one} == one  # whole cores
    assert [len(cores.share(one)) for one in here] == [18] * 8


def test_ranks_with_some_of_the_gpus_take_cpus_near_them(tmp_path):
    """As if ranks were spread over the nodes as CPUs are."""
    here = hosts(tmp_path, 3, [frozenset(range(144))] * 3, eight_gpus())
    found = [cores.share(host, GPUS[gpu]) for host, gpu in zip(here, (0, 1, 7), strict=True)]
    assert found == [set(range(36)), set(range(36, 72)), set(range(72, 108))]


def test_a_cpuset_without_cpus_on_the_node_of_the_gpu(tmp_path):
    here = hosts(tmp_path, 8, [frozenset(range(80, 90))] * 8, eight_gpus())
    found = [cores.share(host, GPUS[rank]) for rank, host in enumerate(here)]
    assert all(found)
    assert are_disjoint(found[:4])
    assert are_disjoint(found[4:])


@pytest.mark.slow
@settings(max_examples=settings.default.max_examples // 2)
@given(
    st.integers(1, 12),
    st.frozensets(st.integers(0, 31), min_size=1),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([1, 2]),
    st.lists(st.integers(0, 7), min_size=12, max_size=12),
    st.booleans(),
)
@example(8, frozenset([0, 1]), 1, 1, [0] * 12, False)
def test_every_rank_gets_cpus_that_it_may_use(tmp_path_factory, count, allowed, siblings, nodes, gpus, is_bound):
    """Whatever GPUs ranks have, and wherever a launcher has bound them; without a GPU they share them evenly."""
    files = eight_gpus(nodes, 32, siblings)
    root = tmp_path_factory.mktemp("machine")
    numa = [cpus_of(files[f"/sys/devices/system/node/node{node}/cpulist"]) for node in range(nodes)]
    gpus = gpus[:count]
    affinities = [allowed & numa[gpu * nodes // 8] or allowed if is_bound else allowed for gpu in gpus]
    here = hosts(root, count, affinities, ranks(files, [listed(one) for one in affinities]))
    shares = [cores.share(one) for one in here]
    for found in (shares, [cores.share(one, GPUS[gpu]) for one, gpu in zip(here, gpus, strict=True)]):
        assert all(found)
        assert all(one <= bound for one, bound in zip(found, affinities, strict=True))
    assert cores.shares(here[0]) == shares
    if len(set(affinities)) == 1:
        assert frozenset.union(*shares) == affinities[0]
        core_of = {
            cpu: files.get(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list", cpu)
            for cpu in affinities[0]
        }
        has_whole_cores = len({*core_of.values()}) >= count
        sizes = [len({core_of[cpu] for cpu in one}) if has_whole_cores else len(one) for one in shares]
        assert max(sizes) - min(sizes) <= 1
        ranks_of = [sum(cpu in one for one in shares) for cpu in affinities[0]]
        assert max(ranks_of) == -(-count // len(affinities[0]))


PROGRAM = """
import json
from superadam.kernels import native
from superadam.host import cores
from superadam.host.machine import Host
for _ in sys.stdin:
    native._num_threads = None  # as in a new process
    print(json.dumps([native.get_num_threads(), *cores.share(Host())]), flush=True)
"""


@pytest.mark.slow
@pytest.mark.subprocess
def test_two_processes(monkeypatch):
    monkeypatch.delenv("SUPERADAM_THREADS", raising=False)
    environments = [os.environ | {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2"} for rank in range(2)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    ranks = [subprocess.Popen(without_torch(PROGRAM), env=one, **pipes) for one in environments]

    def told():
        for one in ranks:
            one.stdin.write("\n")
            one.stdin.flush()
        return [json.loads(one.stdout.readline()) for one in ranks]

    allowed = sorted(os.sched_getaffinity(0))
    (first, *here), (second, *there) = told()
    assert (first, second) == (len(here), len(there))
    if len(allowed) > 1:
        assert sorted([*here, *there]) == allowed
        for one, cpu in zip(ranks, allowed, strict=False):
            os.sched_setaffinity(one.pid, {cpu})
        assert told() == [[1, allowed[0]], [1, allowed[1]]]
    for one in ranks:
        one.communicate()


# -- CPUs near a GPU, and threads that stay on them --------------------------------------------------------------------

ADDRESS = "0000:1b:00.0"
NODE = f"/sys/bus/pci/devices/{ADDRESS}/numa_node"
CPULIST = "/sys/devices/system/node/node1/cpulist"
ALL = frozenset(range(8))


@pytest.mark.parametrize(
    ("files", "affinity", "expected"),
    [
        ({NODE: "1\n", CPULIST: "4-7,12-15\n"}, ALL, {4, 5, 6, 7}),
        ({NODE: "1\n", CPULIST: "4-7\n"}, frozenset({0, 5}), {5}),
        ({NODE: "-1\n", CPULIST: "4-7\n"}, ALL, ALL),
        ({}, ALL, ALL),
        ({NODE: "1\n"}, ALL, ALL),
        ({NODE: "1\n", CPULIST: ""}, ALL, ALL),  # a node of memory only
        ({NODE: "1\n", CPULIST: "4-7\n"}, frozenset({0, 1}), {0, 1}),  # the process was put elsewhere
    ],
)
def test_cpus_near_a_device(tmp_path, files, affinity, expected):
    assert cores.share(machine(tmp_path, files, affinity=affinity), ADDRESS) == expected


def test_a_bound_thread_binds_itself_and_its_children_alone():
    before = os.sched_getaffinity(0)
    with ThreadPoolExecutor(1, initializer=cores.bind_thread, initargs=({min(before)},)) as bound:
        child = bound.submit(lambda: ThreadPoolExecutor(1).submit(os.sched_getaffinity, 0).result())
        assert bound.submit(os.sched_getaffinity, 0).result() == child.result() == {min(before)}
    assert os.sched_getaffinity(0) == before


def test_a_call_near_leaves_its_caller_where_it_is(monkeypatch):
    before, seen = os.sched_getaffinity(0), []

    def work():
        seen.append((os.sched_getaffinity(0), os.sched_getaffinity(os.getpid())))
        return "result"

    assert cores.call_near({min(before)}, work) == "result"
    assert seen == [({min(before)}, before)]
    with pytest.raises(ZeroDivisionError):
        cores.call_near({min(before)}, lambda: 1 // 0)
    monkeypatch.setattr(threading.Thread, "start", Mock(side_effect=RuntimeError("can't start new thread")))
    assert cores.call_near({min(before)}, work) == "result"  # farther away
    assert seen[1:] == [(before, before)]


def test_a_thread_that_may_not_be_bound_goes_on():
    before = os.sched_getaffinity(0)
    cores.bind_thread({1 << 12})  # there is no such CPU
    assert os.sched_getaffinity(0) == before
