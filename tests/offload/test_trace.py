"""The trace file: JSON that Chrome and Perfetto read, whole or not there."""

from __future__ import annotations

import copy
import dataclasses
import errno
import json
import math
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.overlap import ThreadDevice, adam, mlp, train

from superadam import OffloadScheduler
from superadam.offload import trace
from superadam.offload.trace import TRACKS, Trace


def refuse(constant: str) -> None:
    raise AssertionError(f"{constant} is no JSON")


def events_of(path: Path) -> list[dict[str, Any]]:
    content = json.loads(path.read_text(), parse_constant=refuse)
    events: list[dict[str, Any]] = content["traceEvents"]
    return events


def test_every_track_has_a_name_and_every_span_is_complete(tmp_path: Path) -> None:
    one = Trace()
    for track in TRACKS:
        one.add("work", track, 1.0, 2.0, elements=7)
    one.write(tmp_path / "trace.json")
    events = events_of(tmp_path / "trace.json")
    names = {event["tid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    assert list(names.values()) == list(TRACKS)
    spans = [event for event in events if event["ph"] == "X"]
    assert [names[span["tid"]] for span in spans] == list(TRACKS)
    for span in spans:
        assert {"name", "ts", "dur", "pid", "tid", "args"} <= set(span)
        assert span["args"] == {"elements": 7}


@given(
    st.lists(
        st.tuples(st.text(), st.sampled_from(TRACKS), st.floats(0, 1e6), st.floats(0, 1e3), st.floats()), max_size=6
    )
)
def test_times_are_microseconds_from_the_first_and_any_value_is_json(
    tmp_path_factory: pytest.TempPathFactory, drawn: list[tuple[str, str, float, float, float]]
) -> None:
    one = Trace()
    for name, track, begin, length, value in drawn:
        one.add(name, track, begin, begin + length, value=value)
    path = tmp_path_factory.mktemp("trace") / "trace.json"
    one.write(path)
    spans = [event for event in events_of(path) if event["ph"] == "X"][: len(drawn)]
    first = min((begin for _, _, begin, _, _ in drawn), default=0.0)
    assert len(spans) == len(drawn)
    for span, (name, _, begin, length, value) in zip(spans, drawn, strict=True):
        assert span["name"] == name
        assert span["ts"] == (begin - first) * 1e6
        assert span["dur"] == ((begin + length) - begin) * 1e6
        assert span["args"]["value"] == (value if math.isfinite(value) else str(value))


def test_the_oldest_spans_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace, "SPANS_KEPT", 3)
    one = Trace()
    for i in range(5):
        one.add(str(i), "worker", i, i + 1)
    assert [span.name for span in one.spans] == ["2", "3", "4"]


@pytest.mark.slow
def test_trace_and_statistics_are_looked_at_from_other_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While backward, steps and the worker add to them, with a full trace, from which each span drops another."""
    monkeypatch.setattr(trace, "SPANS_KEPT", 2000)
    model = mlp()
    optimizer, errors, stop = adam(model), [], threading.Event()
    with OffloadScheduler(optimizer, model, bucket_numel=16, device=ThreadDevice()) as scheduler:
        for number in range(2000):
            scheduler.trace.add("before", "model", number, number + 1)

        def look_again(look: Callable[[], object]) -> None:
            try:
                while not stop.is_set():
                    look()
            except Exception as error:
                errors.append(error)

        def look_at_each() -> None:
            assert sum(span.end >= span.begin for span in scheduler.trace.spans) == 2000
            assert 0 <= copy.copy(scheduler.statistics).hidden_share <= 1
            dataclasses.asdict(scheduler.statistics)

        looks = [look_at_each, lambda: scheduler.export_trace(tmp_path / "trace.json")]
        readers = [threading.Thread(target=look_again, args=(look,)) for look in looks]
        for reader in readers:
            reader.start()
        train(model, optimizer, range(20))
        stop.set()
        for reader in readers:
            reader.join()
    assert errors == []


def test_file_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text("the old one")
    one = Trace()
    one.add("work", "worker", 0.0, 1.0, thing=object())
    with pytest.raises(TypeError):
        one.write(path)
    assert path.read_text() == "the old one"

    def fill_the_disk(path: Path, text: str) -> None:
        path.touch()
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Path, "write_text", fill_the_disk)
        with pytest.raises(OSError, match="No space left"):
            Trace().write(path)
    assert path.read_text() == "the old one"
    assert list(tmp_path.iterdir()) == [path]
    Trace().write(path)
    assert [event["ph"] for event in events_of(path)] == ["M"] * len(TRACKS)


def test_a_profiler_shows_the_parts_of_the_optimizer() -> None:
    model = mlp()
    optimizer = adam(model, max_grad_norm=1.0)
    with OffloadScheduler(optimizer, model, device=ThreadDevice()):
        train(model, optimizer, range(2))
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
            train(model, optimizer, range(2, 4))
            optimizer.state_dict()
    names = {event.name for event in profiler.events()}
    assert {"superadam: step", "superadam: commit"} <= names
