"""The trace file: JSON that Chrome and Perfetto read, whole or not there."""

from __future__ import annotations

import errno
import json
import math
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


@given(
    st.lists(
        st.tuples(st.text(), st.sampled_from(TRACKS), st.floats(0, 1e6), st.floats(0, 1e3), st.floats()), max_size=6
    )
)
def test_spans_are_complete_with_times_in_microseconds_from_the_first_and_any_value_is_json(
    tmp_path_factory: pytest.TempPathFactory, drawn: list[tuple[str, str, float, float, float]]
) -> None:
    one = Trace()
    for name, track, begin, length, value in drawn:
        one.add(name, track, begin, begin + length, value=value)
    path = tmp_path_factory.mktemp("trace") / "trace.json"
    one.write(path)
    events = events_of(path)
    tracks = {event["tid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    assert list(tracks.values()) == list(TRACKS)
    spans = [event for event in events if event["ph"] == "X"]
    first = min((begin for _, _, begin, _, _ in drawn), default=0.0)
    for span, (name, track, begin, length, value) in zip(spans, drawn, strict=True):
        times = {"ts": (begin - first) * 1e6, "dur": ((begin + length) - begin) * 1e6}
        args = {"value": value if math.isfinite(value) else str(value)}
        assert span.items() >= {"name": name, **times, "args": args}.items()
        assert tracks[span["tid"]] == track
        assert "pid" in span


def test_the_oldest_spans_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace, "SPANS_KEPT", 3)
    one = Trace()
    for i in range(5):
        one.add(str(i), "worker", i, i + 1)
    assert [span.name for span in one.spans] == ["2", "3", "4"]


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
