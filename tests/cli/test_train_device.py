"""`superadam.cli.train.device`: batches arrive as they left, and waiting means that the device is done."""

from __future__ import annotations

import pytest
import torch
from support.training_runs import DEVICES

from superadam.cli.train.device import moved, wait_for


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
