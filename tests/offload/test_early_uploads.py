"""New values go to the device before the verdict, and have all arrived when that is asked for."""

from __future__ import annotations

import pytest
import torch
from measures.paced_device import PacedDevice, Rates
from support.overlap import adam, loss_of, mlp, train
from torch import Tensor

from superadam import OffloadScheduler
from superadam.devices import Stream
from superadam.testing import SimulatedDevice


def test_new_values_go_up_before_the_verdict() -> None:
    model = mlp(torch.bfloat16)
    optimizer = adam(model, max_grad_norm=None)
    with OffloadScheduler(optimizer, model, device=SimulatedDevice(1), bucket_numel=64, num_threads=1) as scheduler:
        train(model, optimizer, range(2))
        before = scheduler.statistics.uploaded_bytes
        loss_of(model, 2).backward()
        scheduler._catch_up()
        padded = sum(2 * 64 * -(-one.numel() // 64) for one in model.parameters())
        assert scheduler.statistics.uploaded_bytes - before == padded
        assert scheduler._transfers._reused.size == padded  # of the gradients' memory, until the values are published


def test_synchronize_waits_for_what_was_published() -> None:
    model = mlp(torch.bfloat16)
    optimizer = adam(model, max_grad_norm=None)
    device = PacedDevice(Rates(download=1e9, upload=1e9, memory=1e5))
    with OffloadScheduler(optimizer, model, device=device, gpu_buckets=0, num_threads=1) as scheduler:
        train(model, optimizer, range(2))
        scheduler.synchronize()
        (published,) = [one for one in device.busy if one.name == "publish"][-1:]
        assert published.end <= device.now()


@pytest.mark.parametrize("is_short", [False, True], ids=["on the device", "on the host"])
def test_memory_of_what_is_published_is_kept_for_the_stream_that_reads_it(
    is_short: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, device, recorded = mlp(torch.bfloat16), SimulatedDevice(1), []
    optimizer, record_stream = adam(model, max_grad_norm=None), device.record_stream

    def noted(buffer: Tensor, stream: Stream) -> None:
        recorded.append((device.is_host(buffer), stream))
        record_stream(buffer, stream)

    monkeypatch.setattr(device, "record_stream", noted)
    with OffloadScheduler(optimizer, model, device=device, bucket_numel=64, num_threads=1) as scheduler:
        scheduler._transfers.is_short = is_short
        train(model, optimizer, range(3))
    assert {is_host for is_host, stream in recorded if stream is Stream.CURRENT} == {is_short}
    assert ((False, Stream.UPLOAD) in recorded) is not is_short  # should the step be dropped
