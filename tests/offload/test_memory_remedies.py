"""A run that the host cannot hold is told the arguments with which it would, and none that cannot suffice."""

from __future__ import annotations

import pytest
import torch
from measures.paced_device import PRESETS, PacedDevice

from superadam import OffloadScheduler, SpeculativeCPUAdam
from superadam.devices import PlainDevice
from superadam.host.memory import HostMemory
from superadam.offload.needs import needs_of_run
from superadam.offload.placement import Placement

PLACED = Placement(gpu_buckets=0, bucket_numel=1 << 20, transfer_dtype=None, num_threads=1)
BF16, LESS, LEAST = "make the optimizer with moments='bf16'", "moments='bf16' and master='24bit'", "moments='8bit' and"


def make(dtype: torch.dtype, **storage: str) -> tuple[torch.nn.Module, SpeculativeCPUAdam]:
    model = torch.nn.Linear(512, 2048, bias=False, dtype=dtype)
    return model, SpeculativeCPUAdam(model.parameters(), **storage)


def refused(model: torch.nn.Module, optimizer: SpeculativeCPUAdam, limit: int, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the sentence of a host that can have so many bytes."""
    monkeypatch.setattr(HostMemory, "of", lambda host: HostMemory(10**13, limit, 10**13))
    device = PacedDevice(PRESETS["h200"])
    with pytest.raises(MemoryError) as caught:
        OffloadScheduler(optimizer, model, device=device, bucket_numel=1 << 20, num_threads=1)
    return str(caught.value)


@pytest.mark.parametrize(
    ("excess", "named", "others"),
    [
        (1, [BF16, LESS, LEAST], []),
        (5 << 20, [LESS, LEAST], [BF16]),  # bytes, of 1 Mi parameters
        (6 << 20, [LEAST], [BF16, LESS]),
        (9 << 20, [], [BF16, LESS, LEAST]),
    ],
)
def test_only_formats_of_state_that_suffice_are_named(excess, named, others, monkeypatch):
    model, optimizer = make(torch.bfloat16)
    total = needs_of_run(optimizer, PacedDevice(PRESETS["h200"]), PLACED).total
    sentence = refused(model, optimizer, total - excess, monkeypatch)
    assert all(words in sentence for words in named)
    assert not any(words in sentence for words in [*others, "transfer_dtype"])
    assert "allow this process more memory, train fewer parameters" in sentence


def test_a_narrower_link_is_named_where_gradients_are_wide(monkeypatch):
    model, optimizer = make(torch.float32)
    total = needs_of_run(optimizer, PacedDevice(PRESETS["h200"]), PLACED).total
    assert "transfer_dtype=torch.bfloat16" in refused(model, optimizer, total - 1, monkeypatch)


@pytest.mark.parametrize(
    ("words", "storage"),
    [(BF16, {"moments": "bf16"}), (f"with {LESS}", {"moments": "bf16", "master": "24bit"})],
)
def test_the_bytes_of_a_remedy_are_those_of_a_run_with_its_arguments(words, storage):
    (_, plain), (_, smaller) = make(torch.bfloat16), make(torch.bfloat16, **storage)
    changes = needs_of_run(plain, PlainDevice(), PLACED).changes()
    assert changes[words] == needs_of_run(smaller, PlainDevice(), PLACED).total


def test_the_smallest_state_has_no_smaller_one():
    _, optimizer = make(torch.bfloat16, moments="8bit", master="24bit")
    assert not needs_of_run(optimizer, PlainDevice(), PLACED).changes()
