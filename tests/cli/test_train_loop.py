"""`superadam.cli.train.loop`: overlap changes no bit of a run, and a skipped step changes nothing but the batch."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.training_runs import BUCKETS, DEVICES, are_same, tiny_trainer

from superadam import StepKind
from superadam.cli.train import loop
from superadam.cli.train.verification import Reference
from superadam.devices import PlainDevice

pytestmark = pytest.mark.usefixtures("one_torch_thread")


@pytest.mark.slow
@settings(max_examples=settings().max_examples // 3)
@given(
    nan_steps=st.sets(st.integers(0, 5), max_size=3),
    dtype=st.sampled_from(["bf16", "fp32"]),
    max_grad_norm=st.sampled_from([0.1, 1.3, math.inf]),
    buckets=st.sampled_from([1, 8, 10_000]),
)
def test_overlapped_run_is_the_run_without_overlap(
    nan_steps: set[int], dtype: str, max_grad_norm: float, buckets: int
) -> None:
    changes = {"dtype": dtype, "max_grad_norm": max_grad_norm}
    with (
        mock.patch.object(loop, "LEAST_BUCKETS", buckets),
        tiny_trainer(**changes) as overlapped,
        tiny_trainer(overlap=False, **changes) as plain,
    ):
        for number in range(6):
            first, second = (run.step(inject_nan=number in nan_steps) for run in (overlapped, plain))
            assert are_same(first, second)
        assert overlapped.measure_held_out() == plain.measure_held_out()
    assert are_same(overlapped.model.state_dict(), plain.model.state_dict())
    assert are_same(overlapped.optimizer.state_dict(), plain.optimizer.state_dict())
    assert plain.history.overlap.buckets == plain.history.overlap.hidden_seconds == 0
    assert overlapped.history.overlap.buckets >= 6


@pytest.mark.parametrize("device", DEVICES)
def test_step_lasts_as_long_as_the_device_works(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[str] = []
    monkeypatch.setattr(loop, "wait_for", lambda device: waited.append(device.type))
    with tiny_trainer(device=device) as trainer:
        trainer.optimizer.register_step_pre_hook(lambda *_: waited.append("step"))
        trainer.step()
    assert waited == [device, "step", device]


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_skipped_step_leaves_model_state_and_learning_rate(dtype: str, overlap: bool) -> None:
    with tiny_trainer(dtype=dtype, overlap=overlap) as trainer:
        trainer.step()

        def snapshot() -> object:
            model = {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}
            state = trainer.optimizer.state_dict()["state"]
            moments = {index: {key: value.clone() for key, value in entry.items()} for index, entry in state.items()}
            return [model, moments, trainer.settings.lr_of(trainer.history.updates)]

        before = snapshot()
        record = trainer.step(inject_nan=True)
        assert record.kind is StepKind.SKIPPED
        assert math.isnan(record.grad_norm)
        assert are_same(before, snapshot())
        following = trainer.step()
        assert following.kind is not StepKind.SKIPPED
        assert trainer.optimizer.param_groups[0]["lr"] == before[2]  # type: ignore[index]


@pytest.mark.parametrize("idle_cores", [0, 1])
def test_optimizer_works_before_backward_has_ended_and_nothing_shows(
    idle_cores: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PlainDevice, "idle_cores", lambda device: idle_cores)
    trainer = tiny_trainer(max_grad_norm=math.inf)
    assert trainer.shares_cores is (idle_cores == 0)
    seen = []

    def look(gradient: torch.Tensor) -> None:
        """Wait, in the middle of backward, for the worker to speculate on the parameters whose gradients came first."""
        before = trainer.model.norm.weight.detach().clone()
        deadline = time.monotonic() + 60.0
        while trainer.optimizer.statistics.speculate_seconds == speculated and time.monotonic() < deadline:
            time.sleep(0.001)
        assert trainer.scheduler is not None
        is_unchanged = torch.equal(trainer.model.norm.weight, before)
        seen.append((time.monotonic() < deadline, is_unchanged, trainer.scheduler.statistics.buckets))

    with trainer:
        trainer.step()  # the first one makes the state, and is not speculated on
        trainer.optimizer.commit()
        speculated = trainer.optimizer.statistics.speculate_seconds
        before = trainer.model.norm.weight.detach().clone()
        trainer.model.tokens.weight.register_hook(look)  # type: ignore[no-untyped-call]
        trainer.step()
    assert seen == [(True, True, BUCKETS + 2)]
    assert not torch.equal(trainer.model.norm.weight, before)
    overlap = trainer.history.overlap
    assert (overlap.waiting_buckets, overlap.speculated_buckets, overlap.buckets) == (BUCKETS, BUCKETS, 2 * BUCKETS)
    assert overlap.worker_seconds > 0.0


def test_history_tells_what_optimizer_and_scheduler_counted() -> None:
    with tiny_trainer() as trainer:
        for number in range(6):
            trainer.step(inject_nan=number == 3)
        assert trainer.scheduler is not None
        history, statistics, overlap = trainer.history, trainer.optimizer.statistics, trainer.scheduler.statistics
    kinds = (StepKind.COMMITTED, StepKind.CLIPPED, StepKind.SKIPPED)
    assert [history.count(kind) for kind in kinds] == [statistics.committed, statistics.clipped, statistics.skipped]
    fates = (history.accepted, history.respeculated, history.dropped)
    assert fates == (statistics.accepted, statistics.respeculated, statistics.dropped)
    assert history.updates == 5
    counted = history.overlap
    assert (counted.buckets, counted.waiting_buckets) == (overlap.buckets, overlap.waiting_buckets)
    assert counted.buckets == 6 * BUCKETS
    assert counted.waiting_buckets + counted.speculated_buckets == counted.buckets
    assert all(fates)
    assert (counted.downloaded_bytes, counted.uploaded_bytes) == (0, 0)  # of a model in host memory
    assert 0.0 < history.optimizer_seconds < history.seconds
    assert 0.0 <= history.overlap.hidden_share < 1.0
    assert 0.0 < counted.step_seconds < history.update_seconds
    assert history.peak_host_bytes > 10_000_000  # Python and torch alone take more
    assert history.peak_device_bytes is None


def test_reference_is_no_part_of_the_runs_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Reference, "take_hook_seconds", lambda reference: 1000.0)
    with tiny_trainer(is_verified=True) as trainer:
        trainer.step()
    assert -1000.0 < trainer.history.seconds < -900.0


def worker_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "superadam-worker"]


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_interrupted_backward_ends_the_overlap_and_leaves_the_last_step(dtype: str) -> None:
    def interrupt(gradient: torch.Tensor) -> None:
        raise KeyboardInterrupt

    trainer, expected = tiny_trainer(dtype=dtype, is_verified=True), tiny_trainer(dtype=dtype, overlap=False)
    before = worker_threads()  # others may have left some
    with contextlib.suppress(KeyboardInterrupt), trainer:
        trainer.step()
        assert len(worker_threads()) == len(before) + 1
        trainer.model.tokens.weight.register_hook(interrupt)  # type: ignore[no-untyped-call]
        trainer.step()
        pytest.fail("the second step was not interrupted")
    assert worker_threads() == before
    assert trainer.scheduler is None
    assert not any(parameter._post_accumulate_grad_hooks for parameter in trainer.model.parameters())
    with expected:
        expected.step()
    assert are_same(trainer.model.state_dict(), expected.model.state_dict())
    assert are_same(trainer.optimizer.state_dict()["state"], expected.optimizer.state_dict()["state"])


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_training_learns(dtype: str) -> None:
    with tiny_trainer(steps=60, dtype=dtype, batch=4) as trainer:
        before = trainer.measure_held_out()
        for _ in range(60):
            trainer.step()
        assert trainer.measure_held_out() < 0.75 * before
    assert sorted(trainer.history.held_out) == [0, 60]


@pytest.mark.parametrize("overlap", [True, False])
def test_no_scheduler_warning(overlap: bool, recwarn: pytest.WarningsRecorder) -> None:
    with tiny_trainer(overlap=overlap) as trainer:
        trainer.step()
        trainer.step()
    assert not [str(warning.message) for warning in recwarn]


def test_seed_makes_the_run() -> None:
    def model(seed: int) -> dict[str, torch.Tensor]:
        with tiny_trainer(seed=seed) as trainer:
            trainer.step()
        return trainer.model.state_dict()

    assert are_same(model(1), model(1))
    assert not are_same(model(1), model(2))
