"""`superadam.cli.train.history`: the records survive a checkpoint and count right."""

from __future__ import annotations

import dataclasses

from hypothesis import given
from hypothesis import strategies as st
from support.training_runs import are_same

from superadam import OverlapStatistics, Statistics, StepKind
from superadam.cli.train.history import History, StepRecord

FLOATS = st.floats(width=64)
SECONDS = st.floats(0.0, 1e6)
COUNTS = st.integers(0, 2**40)
OVERLAPS = st.builds(
    OverlapStatistics,
    **{f.name: SECONDS if f.name.endswith("_seconds") else COUNTS for f in dataclasses.fields(OverlapStatistics)},
)
RECORDS = st.builds(StepRecord, FLOATS, FLOATS, st.sampled_from(StepKind))


@given(
    steps=st.lists(RECORDS, max_size=20),
    held_out=st.dictionaries(st.integers(0, 20), FLOATS, max_size=4),
    counts=st.tuples(COUNTS, COUNTS, COUNTS),
    overlap=OVERLAPS,
)
def test_plain_values_hold_everything(
    steps: list[StepRecord], held_out: dict[int, float], counts: tuple[int, int, int], overlap: OverlapStatistics
) -> None:
    history = History(steps, held_out, *counts, 2.5, 0.5, overlap, peak_device_bytes=7, sessions=3)
    copied = History.of_plain(history.to_plain())
    assert are_same(dataclasses.asdict(history), dataclasses.asdict(copied))
    assert copied.overlap == overlap
    assert sum(copied.count(kind) for kind in StepKind) == len(steps)
    assert copied.updates == copied.count(StepKind.COMMITTED) + copied.count(StepKind.CLIPPED)


@given(earlier=OVERLAPS, overlap=OVERLAPS, counts=st.tuples(COUNTS, COUNTS), update=SECONDS)
def test_sessions_add_up(
    earlier: OverlapStatistics, overlap: OverlapStatistics, counts: tuple[int, int], update: float
) -> None:
    history, before = History(update_seconds=update), History(accepted=counts[0], overlap=earlier)
    for _ in range(2):  # it sets, and adds nothing to what it set before
        history.set_counts(before, Statistics(accepted=counts[1]), overlap)
    assert history.accepted == sum(counts)
    assert history.overlap.buckets == earlier.buckets + overlap.buckets
    assert history.overlap.worker_seconds == earlier.worker_seconds + overlap.worker_seconds
    assert history.overlap.shadow_bytes == max(earlier.shadow_bytes, overlap.shadow_bytes)
    assert history.overlap.step_seconds == earlier.step_seconds + overlap.step_seconds
    assert history.optimizer_seconds == update + history.overlap.hook_seconds


def test_final_loss_is_the_mean_of_the_last_tenth() -> None:
    records = [StepRecord(float(number), 1.0, StepKind.COMMITTED) for number in range(25)]
    assert History(records).final_loss == 23.5
    assert History(records[:3]).final_loss == 2.0
