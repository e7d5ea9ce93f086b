"""What is under way when the placement changes."""

from __future__ import annotations

import pytest
import torch
from support.overlap import adam, loss_of, mlp, train

from superadam import OffloadScheduler
from superadam.testing import SimulatedDevice


@pytest.mark.parametrize("seed", range(4))
def test_nothing_is_under_way_where_the_placement_is_changed(seed: int) -> None:
    model = mlp(torch.bfloat16)
    optimizer = adam(model)
    device = SimulatedDevice(seed)
    with OffloadScheduler(optimizer, model, device=device, bucket_numel=64, gpu_buckets=2, num_threads=1) as scheduler:
        train(model, optimizer, range(2))
        loss_of(model, 2).backward()
        scheduler.place(gpu_buckets=1)
        assert scheduler._pipeline._worker.is_idle
        assert scheduler._bucketer.rest() == []
