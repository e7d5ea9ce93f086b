"""`superadam.training.history`: the records survive a checkpoint and count right."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from training_runs import are_same

from superadam import Statistics, StepKind
from superadam.training.history import History, StepRecord, optimizer_seconds

FLOATS = st.floats(width=64)
RECORDS = st.builds(StepRecord, FLOATS, FLOATS, FLOATS, FLOATS, st.sampled_from(StepKind))


@given(
    steps=st.lists(RECORDS, max_size=20),
    held_out=st.dictionaries(st.integers(0, 20), FLOATS, max_size=4),
    respeculated=st.integers(0),
    dropped=st.integers(0),
)
def test_plain_values_hold_everything(
    steps: list[StepRecord], held_out: dict[int, float], respeculated: int, dropped: int
) -> None:
    history = History(steps, held_out, respeculated, dropped, seconds=2.5, optimizer_seconds=0.5, sessions=3)
    copied = History.of_plain(history.to_plain())
    assert are_same(history.to_plain(), copied.to_plain())
    assert copied.sessions == 3
    assert sum(copied.count(kind) for kind in StepKind) == len(steps)
    assert copied.updates == copied.count(StepKind.COMMITTED) + copied.count(StepKind.CLIPPED)


def test_optimizer_seconds_are_those_of_all_phases() -> None:
    phases = [name for name in Statistics.__dataclass_fields__ if name.endswith("_seconds")]
    assert optimizer_seconds(Statistics(**dict.fromkeys(phases, 1.0))) == len(phases)
