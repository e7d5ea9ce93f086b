"""`superadam.training.checkpoint`: a continued run is the run that never stopped, and nothing else is taken for one."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from training_runs import SENTENCES, TINY, TINY_SHAPE, are_same, one_torch_thread, tiny_trainer

from superadam import OverlapStatistics
from superadam.training import checkpoint
from superadam.training.loop import Trainer
from superadam.training.text import Text
from superadam.usage import UsageError


@pytest.fixture(autouse=True, scope="module")
def _one_torch_thread() -> Iterator[None]:
    with one_torch_thread():
        yield


STEPS = 6


OF_A_SESSION = (
    *("seconds", "update_seconds", "sessions", "peak_host_bytes"),
    *("overlap", "respeculated", "dropped"),  # what is worth speculating on is learnt anew in each session
)


def content_of(trainer: Trainer, folder: Path) -> dict[str, object]:
    """Return what a checkpoint of the run holds, but for what depends on how its sessions went."""
    checkpoint.save(trainer, folder)
    content = checkpoint.read(folder)
    for key in OF_A_SESSION:
        content["history"].pop(key)
    content["settings"].pop("overlap")
    return content


@settings(max_examples=settings().max_examples // 3)
@given(
    stops=st.sets(st.integers(1, STEPS - 1), max_size=3),
    nan_steps=st.sets(st.integers(1, STEPS), max_size=2),
    dtype=st.sampled_from(["bf16", "fp32"]),
    overlaps=st.lists(st.booleans(), min_size=5, max_size=5),
)
def test_continued_run_is_the_run_that_never_stopped(
    stops: set[int],
    nan_steps: set[int],
    dtype: str,
    overlaps: list[bool],
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folder = tmp_path_factory.mktemp("run")
    whole, stopped = (tiny_trainer(steps=STEPS, dtype=dtype, overlap=overlap) for overlap in overlaps[:2])
    with whole:
        for number in range(1, STEPS + 1):
            whole.step(inject_nan=number in nan_steps)
        expected = content_of(whole, folder)
    ends = [*sorted(stops), STEPS]
    for begin, end, overlap in zip([0, *ends], ends, overlaps[1:], strict=False):
        if begin:
            content = checkpoint.read(folder)
            settings = checkpoint.settings_of(content, folder).continued({"overlap": overlap})
            stopped = Trainer(settings, stopped.text)
            checkpoint.restore(stopped, content, folder)
        with stopped:
            for number in range(begin + 1, end + 1):
                stopped.step(inject_nan=number in nan_steps)
            checkpoint.save(stopped, folder)
    assert are_same(expected, content_of(stopped, folder))
    assert stopped.history.sessions == 1 + len(stops)


def test_figures_are_those_of_all_sessions(tmp_path: Path) -> None:
    sessions: list[OverlapStatistics] = []
    for number in range(3):
        trainer = tiny_trainer()
        if number:
            checkpoint.restore(trainer, checkpoint.read(tmp_path), tmp_path)
        before = trainer.history.seconds
        with trainer:
            trainer.step()
            trainer.step(inject_nan=True)
            assert trainer.scheduler is not None
            sessions.append(copy.copy(trainer.scheduler.statistics))
            checkpoint.save(trainer, tmp_path)
        assert trainer.history.seconds > before
    total = checkpoint.read(tmp_path)["history"]["overlap"]
    for field in dataclasses.fields(OverlapStatistics):
        of_sessions = [getattr(session, field.name) for session in sessions]
        expected = max(of_sessions) if field.name == "shadow_bytes" else sum(of_sessions)
        assert total[field.name] == pytest.approx(expected, rel=1e-12)  # sums of seconds are rounded in another order
    assert total["buckets"] == 3 * 2 * 3


@pytest.mark.parametrize("overlap", [True, False])
def test_verified_run_can_be_continued(overlap: bool, tmp_path: Path) -> None:
    with tiny_trainer(overlap=not overlap) as first:
        first.step()
        checkpoint.save(first, tmp_path)
    second = tiny_trainer(overlap=overlap)
    checkpoint.restore(second, checkpoint.read(tmp_path), tmp_path)
    reference = second.verify()
    with second:
        second.step(inject_nan=True)
        second.step()
        found = reference.compare()
    assert found.elements_differing + found.parameters_differing + found.verdicts_differing == 0


def test_saving_does_not_disturb_the_run(tmp_path: Path) -> None:
    with tiny_trainer() as saved, tiny_trainer() as untouched:
        for _ in range(3):
            saved.step()
            checkpoint.save(saved, tmp_path)
            untouched.step()
        assert are_same(content_of(saved, tmp_path), content_of(untouched, tmp_path))


def test_checkpoint_loads_with_weights_only_and_keeps_infinity(tmp_path: Path) -> None:
    with tiny_trainer(max_grad_norm=math.inf) as trainer:
        trainer.step(inject_nan=True)
        path = checkpoint.save(trainer, tmp_path)
    content = torch.load(path, weights_only=True)
    assert content["settings"]["max_grad_norm"] == math.inf
    assert content["model"]["head.weight"].dtype == torch.bfloat16
    assert checkpoint.settings_of(content, tmp_path) == trainer.settings


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.99])
def test_damaged_file_is_refused(share: float, tmp_path: Path) -> None:
    path = checkpoint.save(tiny_trainer(), tmp_path)
    content = path.read_bytes()
    path.write_bytes(content[: int(share * len(content))])
    with pytest.raises(UsageError, match="damaged or no checkpoint"):
        checkpoint.read(tmp_path)


def test_foreign_file_is_refused(tmp_path: Path) -> None:
    torch.save({"model": torch.zeros(3)}, tmp_path / checkpoint.FILE_NAME)
    with pytest.raises(UsageError, match="not a checkpoint of 'superadam train'"):
        checkpoint.read(tmp_path)


def test_file_of_another_layout_is_refused(tmp_path: Path) -> None:
    path = checkpoint.save(tiny_trainer(), tmp_path)
    torch.save({**checkpoint.read(tmp_path), "format": "superadam train, 1"}, path)
    with pytest.raises(UsageError, match="has the layout 'superadam train, 1', expected 'superadam train, 3'"):
        checkpoint.read(tmp_path)


def test_run_from_before_presets_goes_on(tmp_path: Path) -> None:
    with tiny_trainer() as first:
        first.step()
        path = checkpoint.save(first, tmp_path)
    content = checkpoint.read(tmp_path)
    for name in ("shape", "checkpointing"):
        del content["settings"][name]
    torch.save({**content, "format": "superadam train, 2"}, path)
    content = checkpoint.read(tmp_path)
    assert checkpoint.settings_of(content, tmp_path) == first.settings
    checkpoint.restore(second := tiny_trainer(), content, tmp_path)
    assert are_same(second.model.state_dict(), first.model.state_dict())


@pytest.mark.parametrize("checkpointing", [False, True])
def test_run_of_a_shape_goes_on_as_if_it_had_never_stopped(checkpointing: bool, tmp_path: Path) -> None:
    whole = tiny_trainer(shape=TINY_SHAPE, checkpointing=checkpointing)
    with whole:
        for _ in range(4):
            whole.step()
    with tiny_trainer(shape=TINY_SHAPE) as stopped:
        stopped.step()
        stopped.step()
        checkpoint.save(stopped, tmp_path)
    content = checkpoint.read(tmp_path)
    settings = checkpoint.settings_of(content, tmp_path).continued({"checkpointing": checkpointing})
    assert settings == whole.settings
    with Trainer(settings, stopped.text) as again:
        checkpoint.restore(again, content, tmp_path)
        again.step()
        again.step()
    assert are_same(again.model.state_dict(), whole.model.state_dict())
    assert are_same(again.optimizer.state_dict(), whole.optimizer.state_dict())


def test_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=f"holds no {checkpoint.FILE_NAME}"):
        checkpoint.read(tmp_path / "nowhere")


@pytest.mark.parametrize("key", ["model", "optimizer", "schedule", "batches", "random", "history"])
@pytest.mark.parametrize("value", [None, {}, {"state": 1}, "text"])
def test_damaged_part_is_refused(key: str, value: object, tmp_path: Path) -> None:
    with tiny_trainer() as trainer:
        trainer.step()
    checkpoint.save(trainer, tmp_path)
    content = checkpoint.read(tmp_path)
    content[key] = value
    with pytest.raises(UsageError, match="is damaged"):
        checkpoint.restore(tiny_trainer(), content, tmp_path)


@pytest.mark.parametrize(
    "value",
    [
        None,
        {"wings": 2},
        {"steps": "many"},
        {"shape": "round"},
        {"shape": {"name": "round"}},
        {"shape": {**dataclasses.asdict(TINY_SHAPE), "heads": 3}},
    ],
)
def test_damaged_settings_are_refused(value: object, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="damaged settings"):
        checkpoint.settings_of({"settings": value}, tmp_path)


def test_checkpoint_of_another_shape_is_refused(tmp_path: Path) -> None:
    checkpoint.save(tiny_trainer(layers=2), tmp_path)
    with pytest.raises(UsageError, match="does not fit the model"):
        checkpoint.restore(tiny_trainer(), checkpoint.read(tmp_path), tmp_path)


def test_checkpoint_of_another_text_is_refused(tmp_path: Path) -> None:
    checkpoint.save(tiny_trainer(), tmp_path)
    other = Trainer(TINY, Text.of_bytes("others", SENTENCES[1:], TINY.seq))
    with pytest.raises(UsageError, match="other bytes than others holds"):
        checkpoint.restore(other, checkpoint.read(tmp_path), tmp_path)
