"""Where shards lie, by the free memory of the device."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy

from superadam.integrations.fsdp2 import FREE_SHARE, offload_policy

NEEDED = 2 * (500 * 2 + 34 * 2)
"""Bytes of a rank's weights and gradients in bf16, of which the last of three ranks' is padded."""


@pytest.fixture
def parameters() -> list[nn.Parameter]:
    return [nn.Parameter(torch.empty(size, dtype=torch.bfloat16, device="meta")) for size in (1500, 100)]


def with_free(monkeypatch: pytest.MonkeyPatch, free: float) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (round(free), 1 << 40))


@pytest.mark.parametrize("reserved", [0, 1000])
def test_shards_stay_where_they_fit(
    parameters: list[nn.Parameter], reserved: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "superadam")
    with_free(monkeypatch, (NEEDED + reserved) / FREE_SHARE + 1)
    assert type(offload_policy(parameters, ranks=3, reserved_bytes=reserved)) is OffloadPolicy
    assert caplog.messages[-1].startswith("shards lie on the device: ")
    with_free(monkeypatch, (NEEDED + reserved) / FREE_SHARE - 1)
    policy = offload_policy(parameters, ranks=3, reserved_bytes=reserved, pin_memory=False)
    assert isinstance(policy, CPUOffloadPolicy)
    assert not policy.pin_memory
    assert caplog.messages[-1].startswith("shards lie in host memory: ")


def test_without_ranks_a_shard_is_all(parameters: list[nn.Parameter], monkeypatch: pytest.MonkeyPatch) -> None:
    with_free(monkeypatch, 2 * 3200 / FREE_SHARE + 1)
    assert type(offload_policy(parameters)) is OffloadPolicy
    with_free(monkeypatch, 2 * 3200 / FREE_SHARE - 1)
    assert isinstance(offload_policy(parameters), CPUOffloadPolicy)


def test_on_a_cpu_there_is_nothing_to_choose(parameters: list[nn.Parameter]) -> None:
    assert type(offload_policy(parameters, device="cpu", reserved_bytes=1 << 60)) is OffloadPolicy


@pytest.mark.parametrize("wrong", [{"ranks": 0}, {"reserved_bytes": -1}])
def test_wrong_numbers_are_refused(parameters: list[nn.Parameter], wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=r"^ranks is .*, expected at least 1 and at least 0; give "):
        offload_policy(parameters, **wrong)  # type: ignore[arg-type]
