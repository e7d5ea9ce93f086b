"""Values that are computed with the verdict, and whose state follows after the step."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from offload.test_clipped_speculation import (
    ACTIONS,
    DEVICES,
    PATCHED,
    RECIPES,
    Training,
    devices_of,
    expected_of,
    state_of,
)
from support.visible import bits

from superadam.kernels.hyperparameters import Interval
from superadam.offload.late_commits import (
    MOST_TRUSTED,
    SETTLING_STEPS,
    TRIED_STEPS,
    TRUSTED_STEPS,
    LateCommits,
)
from superadam.offload.prediction import Prediction, Predictor
from superadam.state.parameter import Phase
from superadam.testing import SimulatedDevice

pytestmark = pytest.mark.timeout(240)

# ---- the bits ------------------------------------------------------------------------------------------------------


@pytest.fixture
def _late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every new value wait for the verdict, and its state follow late, from the second step on."""
    monkeypatch.setattr(LateCommits, "is_on", True)
    monkeypatch.setattr(LateCommits, "add_step", lambda *_: None)
    monkeypatch.setattr(Predictor, "predict", lambda *_: None)
    monkeypatch.setattr(Predictor, "revised", lambda *_: None)


def trained_on(device: str, recipe: str = "always", **options: Any) -> Training:
    made = DEVICES[device]()
    if isinstance(made, SimulatedDevice):
        options = {"gpu_buckets": 0, **options}
    return Training(RECIPES[recipe], made, **{"bucket_numel": 1000, **options})


MULTIPLIED_BY_TORCH = (
    "by both",
    "unscaled",
    "unscaled, then clipped by torch",
    "by torch, fp16, whose products count as torch rounds them",
)
"""Recipes in which the steps, or some of them, are made with products that torch has rounded."""


@pytest.mark.usefixtures("_late")
@pytest.mark.parametrize(
    ("recipe", "device"), [(one, device) for number, one in enumerate(RECIPES) for device in devices_of(number + 1)]
)
def test_late_training(recipe: str, device: str) -> None:
    ours = trained_on(device, recipe, bucket_numel=[1, 1000, 10**6][len(recipe) % 3])
    assert ours.scheduler is not None
    with ours.scheduler:
        ours.run()
        assert ours.seen() == expected_of(recipe)
    counts, is_own_master = ours.optimizer.statistics, RECIPES[recipe].dtype == torch.float32
    is_own_master &= not isinstance(ours.device, SimulatedDevice)
    if recipe not in MULTIPLIED_BY_TORCH:
        assert (counts.late > 0) is (device != "deferred" and not is_own_master)
    assert counts.accepted == counts.respeculated == counts.dropped == 0


def test_what_misses_is_late_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LateCommits, "is_on", True)
    monkeypatch.setattr(LateCommits, "add_step", lambda *_: None)
    monkeypatch.setattr(Predictor, "revised", lambda *_: None)  # or nothing would miss
    for device in DEVICES:
        if device == "deferred":
            continue
        ours = trained_on(device, "half of the steps")
        assert ours.scheduler is not None
        with ours.scheduler:
            ours.run()
            assert ours.seen() == expected_of("half of the steps")
        assert ours.optimizer.statistics.late > 0
        assert ours.optimizer.statistics.accepted > 0


def test_lists_of_what_misses_are_released(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LateCommits, "is_on", True)
    monkeypatch.setattr(LateCommits, "add_step", lambda *_: None)
    monkeypatch.setattr(Predictor, "predict", lambda *_: Prediction(0.875, Interval(0.75, 1.0)))
    monkeypatch.setattr(Predictor, "revised", lambda *_: None)
    ours = trained_on("immediate")
    with ours.scheduler or torch.no_grad():
        ours.run(range(4))
        transaction = ours.optimizer._binding._transaction
        assert transaction is not None
        records = [state.pending for state in transaction.in_phase(Phase.ACCEPTED)]
        assert len(records) == PATCHED
        assert ours.optimizer.statistics.respeculated > 0
        for record in records:
            assert record is not None
            assert record.listed is record.interval is record.slot is None


@pytest.mark.usefixtures("_late")
def test_of_a_step_what_was_computed_with_the_verdict_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not the elements of resident buckets, which the host does not compute."""
    counted: list[tuple[int, int]] = []
    monkeypatch.setattr(
        LateCommits, "add_step", lambda _, computed, elements, seconds: counted.append((computed, elements))
    )
    ours = trained_on("usual", gpu_buckets=1)
    with ours.scheduler or torch.no_grad():
        ours.run(range(5))
    numel = sum(parameter.numel() for parameter in ours.model.parameters())
    later = counted[1:]  # than the first step, which makes the state
    assert later
    assert all(0 < computed < elements == numel for computed, elements in later), later


@pytest.mark.usefixtures("_late")
def test_what_is_stepped_on_the_device_is_not_late() -> None:
    ours = trained_on("usual", gpu_buckets=10**6)
    with ours.scheduler or torch.no_grad():
        ours.run(range(5))
        transaction = ours.optimizer._binding._transaction
        assert transaction is not None
        assert transaction.applied is not None
        assert transaction.applied.computed == 0
        before = ours.optimizer.statistics.late
        ours.run(range(5, 7))
        assert ours.optimizer.statistics.late == before


Look = Callable[[Training], object]


def state_dict(ours: Training) -> object:
    return ours.optimizer.state_dict()


def gradients_edited(ours: Training) -> None:
    """Which no longer matter."""
    for parameter in ours.model.parameters():
        assert parameter.grad is not None
        parameter.grad.mul_(7.0)
        parameter.grad.add_(1.0)


def gradients_read_bare(ours: Training) -> None:
    for parameter in ours.model.parameters():
        assert parameter.grad is not None
        parameter.grad.data_ptr()


def parameter_written(ours: Training) -> None:
    with torch.no_grad():
        ours.model.dense.mul_(1.5)


def master_written(ours: Training) -> None:
    state_of(ours)["master"].mul_(1.001)


def loaded(ours: Training) -> None:
    ours.optimizer.load_state_dict(copy.deepcopy(ours.optimizer.state_dict()))


def group_changed(ours: Training) -> None:
    for group in ours.optimizer.param_groups:
        group.update(lr=3e-5, betas=(0.5, 0.7), amsgrad=True)


def step_skipped(ours: Training) -> None:
    ours.optimizer.zero_grad()
    ours.backward(40)
    assert ours.model.other.grad is not None
    ours.model.other.grad[3] = math.nan
    ours.optimizer.step()


def another_parameter(ours: Training) -> None:
    extra = torch.nn.Parameter(torch.ones(5, dtype=torch.bfloat16))
    extra.grad = torch.ones_like(extra)
    ours.optimizer.add_param_group({"params": [extra]})


def model_moved(ours: Training) -> None:
    for parameter in ours.model.parameters():
        parameter.data = parameter.data.clone()


LOOKS: list[Look] = [
    state_dict,
    gradients_edited,
    gradients_read_bare,
    parameter_written,
    master_written,
    loaded,
    group_changed,
    step_skipped,
    another_parameter,
    model_moved,
]


def check_bits(device: str, done: Callable[[Training], None]) -> None:
    """Check that something done on a device, in part late, and two more steps have the bits of the plain run."""
    seen = []
    for ours in (Training(RECIPES["always"], None), trained_on(device)):
        ours.run(range(2))
        ours.backward(2)
        done(ours)
        ours.optimizer.zero_grad()
        ours.run(range(4, 7))
        seen.append(ours.seen())
        if ours.scheduler is not None:
            ours.scheduler.close()
            assert ours.optimizer.statistics.late > 0
    assert seen[0] == seen[1]


@pytest.mark.usefixtures("_late")
@pytest.mark.parametrize("look", LOOKS, ids=lambda one: one.__name__)
@pytest.mark.parametrize("device", ["immediate", "thread", "usual"])
def test_what_is_done_before_the_state_follows(device: str, look: Look) -> None:
    def step_and_look(ours: Training) -> None:
        ours.step()
        look(ours)

    check_bits(device, step_and_look)


@pytest.mark.usefixtures("_late")
@pytest.mark.parametrize("device", ["immediate", "usual"])
def test_the_state_follows_when_the_worker_is_idle(device: str) -> None:
    ours = trained_on(device)
    with ours.scheduler or torch.no_grad():
        pipeline = ours.scheduler._pipeline  # type: ignore[union-attr]
        ours.run(range(2))
        transaction = ours.optimizer._binding._transaction
        assert transaction is not None
        assert pipeline is not None
        pipeline.wake = lambda: None  # type: ignore[method-assign]
        ours.backward(2)
        ours.step()
        late = transaction.in_phase(Phase.ACCEPTED)
        assert len(late) == PATCHED
        before = [bits(state.exp_avg) for state in late]
        while pipeline._idle():
            pass
        assert transaction.in_phase(Phase.ACCEPTED) == []
        now = [bits(state.exp_avg) for state in late]
        assert sum(one != other for one, other in zip(before, now, strict=True)) == PATCHED - 1  # one is empty


@pytest.mark.usefixtures("_late")
@pytest.mark.parametrize("action", ACTIONS)
def test_what_is_done_between_backward_and_a_late_step(action: str) -> None:
    def act_and_step(ours: Training) -> None:
        ACTIONS[action][1](ours)
        ours.step()

    check_bits("immediate", act_and_step)


# ---- the choice ----------------------------------------------------------------------------------------------------

TRIAL = SETTLING_STEPS + TRIED_STEPS


def times(commits: LateCommits, steps: int, now: float, late: float) -> list[bool]:
    """Let steps take so long, by the choice; return the choices."""
    choices = []
    for _ in range(steps):
        choices.append(commits.is_on)
        commits.add_step(100, 100, late if commits.is_on else now)
    return choices


def test_both_are_tried_and_the_faster_is_taken() -> None:
    for late, is_better in ((0.5, True), (0.99, False), (2.0, False)):
        commits = LateCommits()
        tried = times(commits, 2 * TRIAL, now=1.0, late=late)
        assert tried == [False] * TRIAL + [True] * TRIAL
        assert times(commits, 20, now=1.0, late=late) == [is_better] * 20


def test_the_other_is_tried_again() -> None:
    commits = LateCommits()
    times(commits, 2 * TRIAL, now=1.0, late=2.0)
    times(commits, TRUSTED_STEPS, now=1.0, late=2.0)
    assert commits.is_on
    times(commits, TRIAL, now=1.0, late=0.5)  # it has become better meanwhile
    assert times(commits, 20, now=1.0, late=0.5) == [True] * 20


def test_the_other_is_tried_less_and_less_often() -> None:
    commits = LateCommits()
    choices = times(commits, 10_000, now=1.0, late=2.0)
    begins = [step for step, (before, now) in enumerate(itertools.pairwise(choices)) if now and not before]
    gaps = [after - before for before, after in itertools.pairwise(begins)]
    assert gaps == sorted(gaps)
    assert gaps[0] < 2 * TRUSTED_STEPS
    assert TRUSTED_STEPS < MOST_TRUSTED <= gaps[-1] < MOST_TRUSTED + 2 * TRIAL


def test_the_first_steps_of_a_choice_do_not_count() -> None:
    commits = LateCommits()
    times(commits, TRIAL, now=1.0, late=0.5)
    times(commits, SETTLING_STEPS, now=1.0, late=50.0)
    times(commits, TRIED_STEPS, now=1.0, late=0.5)
    assert commits.is_on


def test_steps_of_which_little_waited_do_not_count() -> None:
    commits = LateCommits()
    for computed in (1, 24):
        for _ in range(3 * TRIAL):
            commits.add_step(computed, 100, 1.0)
    assert times(commits, TRIAL, now=1.0, late=1.0) == [False] * TRIAL
    assert commits.is_on


def test_times_are_of_an_element() -> None:
    commits = LateCommits()
    times(commits, TRIAL, now=1.0, late=1.0)
    for _ in range(TRIAL):
        commits.add_step(50, 100, 0.9)  # half of the elements take nearly as long
    assert not commits.is_on


@pytest.mark.parametrize("device", ["immediate", "thread"])
def test_the_scheduler_tries_both(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Predictor, "predict", lambda *_: None)
    monkeypatch.setattr(Predictor, "revised", lambda *_: None)
    ours = trained_on(device)
    seen: list[tuple[int, int, bool]] = []
    add_step = LateCommits.add_step

    def noting(self: LateCommits, computed: int, elements: int, seconds: float) -> None:
        seen.append((computed, elements, 0.0 < seconds < 60.0))
        add_step(self, computed, elements, seconds)

    monkeypatch.setattr(LateCommits, "add_step", noting)
    with ours.scheduler or torch.no_grad():
        ours.run(range(1 + 2 * TRIAL))
    numel = sum(one.numel() for one in ours.model.parameters())
    assert seen == [(numel, numel, True)] * (1 + 2 * TRIAL)
    assert 0 < ours.optimizer.statistics.late <= PATCHED * (1 + TRIAL)
