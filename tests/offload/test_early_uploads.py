"""New values go to the device before the verdict, and have all arrived when that is asked for."""

from __future__ import annotations

import torch
from overlap import adam, loss_of, mlp, train

from superadam import OffloadScheduler
from superadam.devices.paced import PacedDevice, Rates
from superadam.devices.simulated import SimulatedDevice


def test_new_values_go_up_before_the_verdict() -> None:
    model = mlp(torch.bfloat16)
    optimizer = adam(model, max_grad_norm=None)
    with OffloadScheduler(optimizer, model, device=SimulatedDevice(1), bucket_numel=64, num_threads=1) as scheduler:
        train(model, optimizer, range(2))
        before = scheduler.statistics.uploaded_bytes
        loss_of(model, 2).backward()
        scheduler.catch_up()
        padded = sum(2 * 64 * -(-one.numel() // 64) for one in model.parameters())
        assert scheduler.statistics.uploaded_bytes - before == padded


def test_synchronize_waits_for_what_was_published() -> None:
    model = mlp(torch.bfloat16)
    optimizer = adam(model, max_grad_norm=None)
    device = PacedDevice(Rates(download=1e9, upload=1e9, memory=1e5))
    with OffloadScheduler(optimizer, model, device=device, gpu_buckets=0, num_threads=1) as scheduler:
        train(model, optimizer, range(2))
        scheduler.synchronize()
        (published,) = [one for one in device.busy if one.name == "publish"][-1:]
        assert published.end <= device.now()
