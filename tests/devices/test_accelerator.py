"""An accelerator beside a model in host memory: it is asked for an event only once something has used it."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.late_gradients import beside
from support.overlap import ThreadDevice
from torch import nn

from superadam.devices import PlainDevice, Stream
from superadam.devices.accelerator import Accelerator
from superadam.devices.interface import AllEvents
from superadam.testing import SimulatedDevice

PARAMETER = nn.Parameter(torch.zeros(3))


class Event:
    """An event of torch's, which knows how it was made."""

    def __init__(self, **options: Any) -> None:
        self.options = options
        self.is_recorded = False

    def record(self) -> None:
        self.is_recorded = True


@pytest.fixture
def module() -> SimpleNamespace:
    """Return what stands for `torch.cuda`, which nothing has used."""
    return SimpleNamespace(is_initialized=lambda: False, Event=Event)


def test_nothing_is_recorded_where_torch_was_built_without_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: None)
    assert Accelerator.of_torch() is None
    device = PlainDevice()
    device.accelerator = None
    assert device.mark_ready(PARAMETER) is None


@pytest.mark.parametrize(("kind", "options"), [("cuda", {"blocking": True}), ("xpu", {})])
def test_events_are_of_torch_s_own_module_and_waiting_for_those_of_cuda_sleeps(
    kind: str, options: dict[str, bool], module: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", functools.partial(torch.device, kind))
    monkeypatch.setattr(torch, kind, module)
    accelerator = Accelerator.of_torch()
    assert accelerator is not None
    device = PlainDevice()
    device.accelerator = accelerator
    assert device.mark_ready(PARAMETER) is None  # recording would make a context
    module.is_initialized = lambda: True
    event = device.mark_ready(PARAMETER)
    assert isinstance(event, Event)
    assert event.is_recorded
    assert event.options == options
    assert device.mark_ready(PARAMETER) is not event


def test_streams_of_the_host_are_the_thread_that_waits() -> None:
    streams = SimulatedDevice(0, 0.0)
    device = beside(ThreadDevice(), streams)
    gradient = streams.late(torch.ones(3))
    event = device.mark_ready(PARAMETER)
    assert event is not None
    assert gradient.isnan().all()
    assert device.record(Stream.CURRENT).query()
    device.wait(Stream.CURRENT, event)
    assert gradient.tolist() == [1.0] * 3


def test_several_events_pass_with_the_last() -> None:
    device = SimulatedDevice(0, 0.0)
    events = AllEvents((device.record(Stream.UPLOAD), device.record(Stream.DOWNLOAD)))
    assert not events.query()
    events.events[0].synchronize()
    assert events.query() is events.events[1].query()
    events.synchronize()
    assert events.query()
    assert all(event.query() for event in events.events)
    assert AllEvents().query()
