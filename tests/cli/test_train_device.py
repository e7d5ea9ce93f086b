"""`superadam.cli.train.device`: batches arrive as they left, waiting means that the device is done, peaks are bytes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from support.training_runs import DEVICES

from superadam.cli.train.device import moved, peak_device_bytes, peak_host_bytes, wait_for


@pytest.mark.parametrize("name", DEVICES)
def test_batch_arrives_as_it_left(name: str) -> None:
    device = torch.device(name)
    for number in range(20):
        batch = torch.full((1 << 16,), number)
        arrived = moved(batch, device)
        del batch
        assert arrived.device.type == name
        assert bool((arrived == number).all())


@pytest.mark.parametrize("name", DEVICES)
def test_nothing_is_left_to_do_after_waiting(name: str) -> None:
    device = torch.device(name)
    total = torch.eye(512, device=device)
    for _ in range(20):
        total = total @ total
    wait_for(device)
    if device.type == "cuda":
        assert torch.cuda.current_stream(device).query()
    assert torch.equal(total.cpu(), torch.eye(512))


def test_peak_is_in_bytes() -> None:
    status = Path("/proc/self/status").read_text()
    high_water = next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM:"))
    # The two are counted at different moments; the peak also remembers the program that started this one.
    assert 0.9 * high_water < peak_host_bytes() < os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert peak_device_bytes(torch.device("cpu")) is None
