"""Sums on the host add what has arrived, each once and in order, whichever thread waits first."""

import threading

import torch

from superadam.handles.taken_gradient import HostSum
from superadam.testing import SimulatedDevice


def test_parts_are_added_once_they_have_arrived_and_the_first_one_replaces_what_was_there() -> None:
    device = SimulatedDevice(0, 0.0)
    total = HostSum(torch.full((3,), torch.nan), is_empty=True)
    for value in (-0.0, 1e-8, 1.0):
        part = device.late(torch.full((3,), value, dtype=torch.bfloat16), on_host=True)
        total.add(part, device.accelerator.current_stream().end())
        assert not total.query()
    total.synchronize()
    expected = torch.full((3,), 1e-8, dtype=torch.bfloat16).float() + 1
    assert torch.equal(total.total, expected)
    assert total.query()
    total.synchronize()
    assert torch.equal(total.total, expected)


def test_zeros_keep_their_sign() -> None:
    total = HostSum(torch.zeros(1), is_empty=True)
    total.add(torch.tensor([-0.0]), SimulatedDevice(0).accelerator.first.end())
    total.synchronize()
    assert total.total.signbit().all()


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
