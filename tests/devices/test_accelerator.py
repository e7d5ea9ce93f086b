"""An accelerator beside a model in host memory: it is asked for an event only once something has used it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from superadam.devices import PlainDevice, Stream
from superadam.devices.interface import AllEvents
from superadam.testing import SimulatedDevice

PARAMETER = nn.Parameter(torch.zeros(3))


class Module:
    """Stands for `torch.cuda`: writes what was asked of it, and with which current device."""

    def __init__(self) -> None:
        self.log: list[tuple[Any, ...]] = []
        self.is_used = False
        self.current = 3

    def is_initialized(self) -> bool:
        return self.is_used

    def current_device(self) -> int:
        return self.current

    @contextmanager
    def device(self, index: int) -> Iterator[None]:
        before, self.current = self.current, index
        yield
        self.current = before

    def Event(self, **options: bool) -> SimpleNamespace:  # noqa: N802
        def noted(name: str) -> Callable[[], bool]:
            return lambda: self.log.append((name, self.current)) is not None

        self.log.append(("make", options))
        return SimpleNamespace(**{name: noted(name) for name in ("record", "query", "synchronize")})


def test_nothing_is_recorded_where_torch_was_built_without_one(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: None)
    assert PlainDevice().mark_ready(PARAMETER) is None


@pytest.mark.parametrize(("kind", "options"), [("cuda", {"blocking": True}), ("xpu", {})])
def test_events_are_torch_s_own_and_belong_to_the_device_of_the_thread_that_records_them(kind, options, monkeypatch):
    module = Module()
    monkeypatch.setattr(torch.accelerator, "current_accelerator", functools.partial(torch.device, kind))
    monkeypatch.setattr(torch, kind, module)
    device = PlainDevice()
    assert device.mark_ready(PARAMETER) is None  # recording would make a context
    module.is_used = True
    event = device.mark_ready(PARAMETER)
    module.current = 0  # of the worker's thread
    assert event.query() is False
    event.synchronize()
    assert module.log == [("make", options), ("record", 3), ("query", 3), ("synchronize", 3)]
    assert module.current == 0


def test_several_events_pass_with_the_last():
    device = SimulatedDevice(0, 0.0)
    events = AllEvents((device.record(Stream.UPLOAD), device.record(Stream.DOWNLOAD)))
    assert not events.query()
    events.events[0].synchronize()
    assert events.query() is events.events[1].query()
    events.synchronize()
    assert events.query()
    assert all(event.query() for event in events.events)
    assert AllEvents().query()
