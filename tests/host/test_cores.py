"""CPUs near a GPU, and threads that stay on them."""

from __future__ import annotations

import os
import threading

import pytest
from support.machines import machine

from superadam.host import cores

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


def in_thread(work: threading.Thread) -> None:
    work.start()
    work.join()


def test_a_bound_thread_binds_itself_and_its_children_alone():
    before, seen = os.sched_getaffinity(0), []
    one = {min(before)}

    def bind():
        cores.bind_thread(one)
        seen.append(os.sched_getaffinity(0))
        in_thread(threading.Thread(target=lambda: seen.append(os.sched_getaffinity(0))))

    in_thread(threading.Thread(target=bind))
    assert seen == [one, one]
    assert os.sched_getaffinity(0) == before


def test_a_call_near_leaves_its_caller_where_it_is():
    before, seen = os.sched_getaffinity(0), []

    def work():
        seen.append((os.sched_getaffinity(0), os.sched_getaffinity(os.getpid())))
        return "result"

    assert cores.call_near({min(before)}, work) == "result"
    assert seen == [({min(before)}, before)]
    with pytest.raises(ZeroDivisionError):
        cores.call_near({min(before)}, lambda: 1 // 0)


def test_a_thread_that_may_not_be_bound_goes_on():
    before = os.sched_getaffinity(0)
    cores.bind_thread({1 << 12})  # there is no such CPU
    assert os.sched_getaffinity(0) == before
