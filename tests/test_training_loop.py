"""`superadam.training.loop`: speculation changes no bit of a run, and a skipped step changes nothing but the batch."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from training_runs import are_same, one_torch_thread, tiny_trainer

from superadam import StepKind


@pytest.fixture(autouse=True, scope="module")
def _one_torch_thread() -> Iterator[None]:
    with one_torch_thread():
        yield


@given(
    nan_steps=st.sets(st.integers(0, 5), max_size=3),
    dtype=st.sampled_from(["bf16", "fp32"]),
    max_grad_norm=st.sampled_from([0.1, 0.75, math.inf]),
)
def test_speculative_and_plain_runs_are_the_same_run(nan_steps: set[int], dtype: str, max_grad_norm: float) -> None:
    runs = [tiny_trainer(dtype=dtype, max_grad_norm=max_grad_norm, is_plain=is_plain) for is_plain in (False, True)]
    for number in range(6):
        first, second = (run.step(inject_nan=number in nan_steps) for run in runs)
        assert are_same([first.loss, first.grad_norm, first.lr], [second.loss, second.grad_norm, second.lr])
        assert first.kind is second.kind
    speculative, plain = runs
    assert are_same(speculative.model.state_dict(), plain.model.state_dict())
    assert are_same(speculative.optimizer.state_dict(), plain.optimizer.state_dict())


@pytest.mark.parametrize("is_plain", [False, True])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_skipped_step_leaves_model_state_and_learning_rate(dtype: str, is_plain: bool) -> None:
    trainer = tiny_trainer(dtype=dtype, is_plain=is_plain)
    trainer.step()

    def snapshot() -> object:
        model = {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}
        state = trainer.optimizer.state_dict()["state"]
        moments = {index: {key: value.clone() for key, value in entry.items()} for index, entry in state.items()}
        return [model, moments, trainer.optimizer.param_groups[0]["lr"]]

    before = snapshot()
    record = trainer.step(inject_nan=True)
    assert record.kind is StepKind.SKIPPED
    assert math.isnan(record.grad_norm)
    assert are_same(before, snapshot())
    following = trainer.step()
    assert following.kind is not StepKind.SKIPPED
    assert following.lr == record.lr


def test_history_tells_what_the_optimizer_counted() -> None:
    trainer = tiny_trainer()
    for number in range(6):
        trainer.step(inject_nan=number == 3)
    history, statistics = trainer.history, trainer.optimizer.statistics
    kinds = (StepKind.COMMITTED, StepKind.CLIPPED, StepKind.SKIPPED)
    assert [history.count(kind) for kind in kinds] == [statistics.committed, statistics.clipped, statistics.skipped]
    assert (history.respeculated, history.dropped) == (statistics.respeculated, statistics.dropped)
    assert history.dropped == len(list(trainer.model.parameters()))
    assert history.updates == 5
    assert 0.0 < history.optimizer_seconds < history.seconds


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_training_learns(dtype: str) -> None:
    trainer = tiny_trainer(steps=60, dtype=dtype, batch=4)
    before = trainer.measure_held_out()
    for _ in range(60):
        trainer.step()
    assert trainer.measure_held_out() < 0.75 * before
    assert sorted(trainer.history.held_out) == [0, 60]


def test_no_scheduler_warning(recwarn: pytest.WarningsRecorder) -> None:
    trainer = tiny_trainer()
    trainer.step()
    trainer.step()
    assert not [str(warning.message) for warning in recwarn]


def test_seed_makes_the_run() -> None:
    def model(seed: int) -> dict[str, torch.Tensor]:
        trainer = tiny_trainer(seed=seed)
        trainer.step()
        return trainer.model.state_dict()

    assert are_same(model(1), model(1))
    assert not are_same(model(1), model(2))
