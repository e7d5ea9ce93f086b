"""Sums on the host add what has arrived, each once and in order, whichever thread waits first."""

import threading

import torch
from support.visible import bits

from superadam.handles.taken_gradient import HostSum
from superadam.testing import SimulatedDevice


def test_parts_are_added_once_they_have_arrived_and_the_first_one_replaces_what_was_there() -> None:
    device = SimulatedDevice(0, 0.0)
    total = HostSum(torch.full((3,), torch.nan), is_empty=True)
    for values in ([-0.0, 0.0, 0.0], [-0.0, 1e-8, 1e-8], [-0.0, 1.0, 1.0]):
        part = device.late(torch.tensor(values, dtype=torch.bfloat16), on_host=True)
        total.add(part, device.accelerator.current_stream().end())
        assert not total.query()
    added = torch.tensor(1e-8, dtype=torch.bfloat16).item() + 1
    for _ in range(2):  # each part is added once
        total.synchronize()
        assert total.query()
        assert bits(total.total) == bits(torch.tensor([-0.0, added, added]))


def test_threads_that_wait_together_add_each_part_once() -> None:
    total = HostSum(torch.zeros(100), is_empty=False)
    passed = SimulatedDevice(0, 1.0).accelerator.first.end()
    for _ in range(300):
        total.add(torch.ones(100), passed)
    threads = [threading.Thread(target=total.synchronize) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert torch.equal(total.total, torch.full((100,), 300.0))
