"""`superadam.training.memory`: the peaks are those of the operating system, in bytes."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from superadam.training.memory import peak_device_bytes, peak_host_bytes


def test_peak_is_in_bytes() -> None:
    status = Path("/proc/self/status").read_text()
    high_water = next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM:"))
    # The two are counted at different moments; the peak also remembers the program that started this one.
    assert 0.9 * high_water < peak_host_bytes() < os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def test_host_is_no_device() -> None:
    assert peak_device_bytes(torch.device("cpu")) is None
