"""`superadam.cli.train.history`: the records survive a checkpoint and count right."""

from __future__ import annotations

import dataclasses

from hypothesis import given
from hypothesis import strategies as st
from support.training_runs import are_same

from superadam import OverlapStatistics, StepKind
from superadam.cli.train.history import History, StepRecord

FLOATS = st.floats(width=64)
SECONDS = st.floats(0.0, 1e6)
COUNTS = st.integers(0, 2**40)
OVERLAPS = st.builds(
    OverlapStatistics,
    **{f.name: SECONDS if f.name.endswith("_seconds") else COUNTS for f in dataclasses.fields(OverlapStatistics)},
)
RECORDS = st.builds(StepRecord, FLOATS, FLOATS, FLOATS, FLOATS, st.sampled_from(StepKind))


@given(
    steps=st.lists(RECORDS, max_size=20),
    held_out=st.dictionaries(st.integers(0, 20), FLOATS, max_size=4),
    counts=st.tuples(COUNTS, COUNTS, COUNTS),
    overlap=OVERLAPS,
)
def test_plain_values_hold_everything(
    steps: list[StepRecord], held_out: dict[int, float], counts: tuple[int, int, int], overlap: OverlapStatistics
) -> None:
    held_out = {number: loss for number, loss in held_out.items() if number <= len(steps)}
    history = History(steps, held_out, *counts, 2.5, 0.5, overlap, peak_device_bytes=7, sessions=3)
    copied = History.of_plain(history.to_plain())
    assert are_same(history.to_plain(), copied.to_plain())
    assert copied.sessions == 3
    assert copied.overlap == overlap
    assert sum(copied.count(kind) for kind in StepKind) == len(steps)
    assert copied.updates == copied.count(StepKind.COMMITTED) + copied.count(StepKind.CLIPPED)


@given(sessions=st.lists(OVERLAPS, max_size=4), update=SECONDS)
def test_sessions_add_up_and_the_hidden_share_is_one(sessions: list[OverlapStatistics], update: float) -> None:
    history = History(update_seconds=update)
    for session in sessions:
        history.add_overlap(session, OverlapStatistics())
    assert history.overlap.buckets == sum(session.buckets for session in sessions)
    assert history.overlap.uploaded_bytes == sum(session.uploaded_bytes for session in sessions)
    assert history.overlap.worker_seconds == sum(session.worker_seconds for session in sessions)
    assert history.overlap.shadow_bytes == max((session.shadow_bytes for session in sessions), default=0)
    assert 0.0 <= history.hidden_share <= 1.0
    assert 0.0 <= history.hidden_seconds <= history.overlap.worker_seconds
    assert history.optimizer_seconds >= update


def test_hidden_share_counts_step_and_hooks_as_seen() -> None:
    overlap = OverlapStatistics(worker_seconds=4.0, waited_seconds=1.0, hook_seconds=0.25)
    history = History(update_seconds=1.75, overlap=overlap)  # 1 s of it waited for the worker
    assert (history.optimizer_seconds, history.hidden_seconds, history.hidden_share) == (2.0, 3.0, 0.6)


def test_peaks_are_the_largest_of_all_sessions() -> None:
    history = History()
    history.add_memory(5, None)
    assert (history.peak_host_bytes, history.peak_device_bytes) == (5, None)
    history.add_memory(3, 4)
    history.add_memory(4, 2)
    assert (history.peak_host_bytes, history.peak_device_bytes) == (5, 4)
