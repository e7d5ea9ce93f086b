"""`cli.train.checkpoint`: a continued run is the run that never stopped, and nothing else is taken for one."""

from __future__ import annotations

import copy
import dataclasses
import errno
import io
import itertools
import math
import os
import resource
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from support.training_runs import BUCKETS, SENTENCES, TINY, are_same, tiny_trainer

from superadam import OverlapStatistics
from superadam.cli.train import checkpoint
from superadam.cli.train.loop import Trainer
from superadam.cli.train.text import Text
from superadam.cli.usage import UsageError

pytestmark = pytest.mark.usefixtures("one_torch_thread")

STEPS = 6

OF_A_SESSION = (
    *("seconds", "update_seconds", "sessions", "peak_host_bytes"),
    *(
        "overlap",
        "accepted",
        "respeculated",
        "dropped",
    ),  # what is worth speculating on is learned again in each session
)


def saved(trainer: Trainer, folder: Path) -> Path:
    path = folder / checkpoint.FILE_NAME
    checkpoint.save(trainer, path)
    return path


def content_of(trainer: Trainer, folder: Path) -> dict[str, Any]:
    """Return what a checkpoint of the run holds, but for what depends on how its sessions went."""
    saved(trainer, folder)
    _, content = checkpoint.read(folder)
    for key in OF_A_SESSION:
        content["history"].pop(key)
    content["settings"].pop("overlap")
    return content


@pytest.mark.slow
@settings(max_examples=settings().max_examples // 3)
@given(
    stops=st.sets(st.integers(1, STEPS - 1), max_size=3),
    nan_steps=st.sets(st.integers(1, STEPS), max_size=2),
    dtype=st.sampled_from(["bf16", "fp32"]),
    overlaps=st.lists(st.booleans(), min_size=5, max_size=5),
)
def test_continued_run_is_the_run_that_never_stopped(
    stops: set[int], nan_steps: set[int], dtype: str, overlaps: list[bool], tmp_path_factory: pytest.TempPathFactory
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
            found, content = checkpoint.read(folder)
            stopped = Trainer(found.continued({"overlap": overlap}), stopped.text)
            checkpoint.restore(stopped, content, folder)
        with stopped:
            for number in range(begin + 1, end + 1):
                stopped.step(inject_nan=number in nan_steps)
            saved(stopped, folder)
    assert are_same(expected, content_of(stopped, folder))
    assert stopped.history.sessions == 1 + len(stops)


def test_figures_are_those_of_all_sessions(tmp_path: Path) -> None:
    sessions: list[OverlapStatistics] = []
    accepted = 0
    for number in range(3):
        trainer = tiny_trainer()
        if number:
            checkpoint.restore(trainer, checkpoint.read(tmp_path)[1], tmp_path)
        before = trainer.history.seconds
        with trainer:
            trainer.step()
            trainer.step()
            trainer.step(inject_nan=True)  # after which the worker has nothing to do
            assert trainer.scheduler is not None
            sessions.append(copy.copy(trainer.scheduler.statistics))
            accepted += trainer.optimizer.statistics.accepted
            saved(trainer, tmp_path)
        assert trainer.history.seconds > before
    history = checkpoint.read(tmp_path)[1]["history"]
    for field in dataclasses.fields(OverlapStatistics):
        of_sessions = [getattr(session, field.name) for session in sessions]
        expected = max(of_sessions) if field.name == "shadow_bytes" else sum(of_sessions)
        assert history["overlap"][field.name] == pytest.approx(expected, rel=1e-12)  # seconds are rounded
    assert history["overlap"]["buckets"] == 3 * 3 * BUCKETS
    assert history["accepted"] == accepted > 0


def test_saving_does_not_disturb_the_run(tmp_path: Path) -> None:
    with tiny_trainer() as disturbed, tiny_trainer() as untouched:
        for _ in range(3):
            disturbed.step()
            saved(disturbed, tmp_path)
            untouched.step()
        assert are_same(content_of(disturbed, tmp_path), content_of(untouched, tmp_path))


def test_checkpoint_loads_with_weights_only_and_keeps_infinity(tmp_path: Path) -> None:
    with tiny_trainer(max_grad_norm=math.inf) as trainer:
        trainer.step(inject_nan=True)
        path = saved(trainer, tmp_path)
    content = torch.load(path, weights_only=True)
    assert content["model"]["tokens.weight"].dtype == torch.bfloat16
    assert checkpoint.read(tmp_path)[0] == trainer.settings


@pytest.fixture(scope="module")
def two_files(tmp_path_factory: pytest.TempPathFactory) -> list[bytes]:
    """Two checkpoints as they are on disk, of other weights but about as long."""
    folder = tmp_path_factory.mktemp("two")
    with tiny_trainer() as trainer:
        trainer.step()
        trainer.step()
        return [saved(one, folder).read_bytes() for one in (trainer, tiny_trainer(seed=1))]


def content_or_words(folder: Path) -> object:
    try:
        return checkpoint.read(folder)[1]
    except UsageError as error:
        return str(error)


SPLICES = st.tuples(
    st.floats(0, 1),
    st.sampled_from([0, 1, 8, 4096, 10**9]),
    st.one_of(st.binary(max_size=8), st.sampled_from([1, 4096]).map(bytes), st.none()),
)
"""Where in a file how many bytes make room for which others; None for those of another file at the same place."""


@given(splices=st.lists(SPLICES, min_size=1, max_size=3))
def test_file_that_was_changed_anywhere_is_refused_or_as_it_was(
    splices: list[tuple[float, int, bytes | None]], two_files: list[bytes], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Bytes between the entries of a zip archive mean nothing."""
    folder = tmp_path_factory.mktemp("run")
    path, content = folder / checkpoint.FILE_NAME, two_files[0]
    path.write_bytes(content)
    _, expected = checkpoint.read(folder)
    for share, removed, added in splices:
        at = int(share * len(content))
        content = content[:at] + (two_files[1][at : at + removed] if added is None else added) + content[at + removed :]
    assume(content not in two_files)
    path.write_bytes(content)
    found = content_or_words(folder)
    assert are_same(found, expected) or "is damaged or no checkpoint of 'superadam train'; give" in str(found)
    assert path.read_bytes() == content


def test_one_bit_of_a_weight_is_noticed(two_files: list[bytes], tmp_path: Path) -> None:
    path, content = tmp_path / checkpoint.FILE_NAME, bytearray(two_files[0])
    weights = tiny_trainer().model.tokens.weight
    path.write_bytes(content)
    stored = checkpoint.read(tmp_path)[1]["model"]["tokens.weight"].view(torch.uint8).numpy().tobytes()
    content[content.index(stored) + 2 * weights.numel() - 1] ^= 1
    path.write_bytes(content)
    torch.load(path, weights_only=True)  # which notices nothing
    with pytest.raises(UsageError, match="is damaged"):
        checkpoint.read(tmp_path)


def test_full_disk_leaves_the_older_checkpoint(two_files: list[bytes], tmp_path: Path) -> None:
    path, most = tmp_path / checkpoint.FILE_NAME, resource.getrlimit(resource.RLIMIT_FSIZE)
    path.write_bytes(two_files[1])
    trainer = tiny_trainer()
    for share in (0.0, 0.3, 0.6, 0.99):  # the kernel takes this much of a file and no more
        resource.setrlimit(resource.RLIMIT_FSIZE, (int(share * len(two_files[1])), most[1]))
        try:
            with pytest.raises(OSError, match="File too large"):
                checkpoint.save(trainer, path)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, most)
        assert os.listdir(tmp_path) == [path.name]
        assert path.read_bytes() == two_files[1]


@pytest.mark.slow
def test_disk_that_fails_at_any_write_is_told_by_its_own_error(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers, trainer, failing = itertools.count(), tiny_trainer(), -1

    class Failing(io.BytesIO):
        def write(self, data: Any) -> int:
            if next(numbers) == failing:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return super().write(data)

    monkeypatch.setattr(checkpoint, "replace_file", lambda path, write: write(Failing()))
    checkpoint.save(trainer, Path())
    for failing in range(next(numbers)):  # noqa: B007 - read by Failing
        numbers = itertools.count()
        with pytest.raises(OSError, match="No space left"):
            checkpoint.save(trainer, Path())


def test_file_of_another_layout_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "FORMAT", "superadam train, 1")
    saved(tiny_trainer(), tmp_path)
    monkeypatch.undo()
    with pytest.raises(UsageError, match=r"has the layout 'superadam train, 1', expected 'superadam train, 8'"):
        checkpoint.read(tmp_path)


@pytest.mark.parametrize("content", [None, b"", b"PK\x03\x04", bytes(1000)])
def test_missing_and_foreign_files_are_refused(content: bytes | None, tmp_path: Path) -> None:
    if content is None:
        words = f"holds no {checkpoint.FILE_NAME} that can be read .No such file or directory"
    else:
        (tmp_path / checkpoint.FILE_NAME).write_bytes(content)
        words = "is damaged or no checkpoint of 'superadam train'"
    with pytest.raises(UsageError, match=words):
        checkpoint.read(tmp_path)


def test_checkpoint_of_another_text_is_refused(tmp_path: Path) -> None:
    saved(tiny_trainer(), tmp_path)
    other = Trainer(TINY, Text.of_bytes("others", SENTENCES[1:], TINY.seq))
    with pytest.raises(UsageError, match="other bytes than others holds"):
        checkpoint.restore(other, checkpoint.read(tmp_path)[1], tmp_path)
