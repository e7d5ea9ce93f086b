"""`cli.train.checkpoint`: a continued run is the run that never stopped, and nothing else is taken for one."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import errno
import hashlib
import io
import itertools
import math
import os
import resource
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from support.children import exit_code_of_child
from support.training_runs import OPTIONS, SENTENCES, TINY, TINY_SHAPE, are_same, tiny_trainer, train, write_text

from superadam import OverlapStatistics, StepKind
from superadam.cli.train import checkpoint, files
from superadam.cli.train.loop import Trainer
from superadam.cli.train.presets import Shape
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


def content_of(trainer: Trainer, folder: Path) -> dict[str, object]:
    """Return what a checkpoint of the run holds, but for what depends on how its sessions went."""
    checkpoint.save(trainer, folder)
    content = checkpoint.read(folder)
    for key in OF_A_SESSION:
        content["history"].pop(key)
    for key in ("overlap", "checkpointing"):
        content["settings"].pop(key)
    return content


@pytest.mark.slow
@settings(max_examples=settings().max_examples // 3)
@given(
    stops=st.sets(st.integers(1, STEPS - 1), max_size=3),
    nan_steps=st.sets(st.integers(1, STEPS), max_size=2),
    dtype=st.sampled_from(["bf16", "fp32"]),
    shape=st.sampled_from([None, TINY_SHAPE]),
    overlaps=st.lists(st.booleans(), min_size=5, max_size=5),
)
def test_continued_run_is_the_run_that_never_stopped(
    stops: set[int],
    nan_steps: set[int],
    dtype: str,
    shape: Shape | None,
    overlaps: list[bool],
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folder = tmp_path_factory.mktemp("run")
    whole, stopped = (tiny_trainer(steps=STEPS, dtype=dtype, shape=shape, overlap=overlap) for overlap in overlaps[:2])
    with whole:
        for number in range(1, STEPS + 1):
            whole.step(inject_nan=number in nan_steps)
        expected = content_of(whole, folder)
    ends = [*sorted(stops), STEPS]
    for begin, end, overlap in zip([0, *ends], ends, overlaps[1:], strict=False):
        if begin:
            content = checkpoint.read(folder)
            changes = {"overlap": overlap, "checkpointing": not overlap}
            stopped = Trainer(checkpoint.settings_of(content, folder).continued(changes), stopped.text)
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


@pytest.fixture(scope="module")
def stepped() -> Iterator[Trainer]:
    """A run that stands after two steps."""
    with tiny_trainer() as trainer:
        trainer.step()
        trainer.step()
        yield trainer


@pytest.fixture(scope="module")
def two_files(stepped: Trainer, tmp_path_factory: pytest.TempPathFactory) -> list[bytes]:
    """Two checkpoints as they are on disk, of other weights but about as long."""
    folder = tmp_path_factory.mktemp("two")
    return [checkpoint.save(trainer, folder).read_bytes() for trainer in (stepped, tiny_trainer(seed=1))]


SPLICES = st.tuples(
    st.floats(0, 1),
    st.sampled_from([0, 1, 8, 4096, 10**9]),
    st.one_of(st.binary(max_size=8), st.sampled_from([1, 4096]).map(bytes), st.none()),
)
"""Where in a file how many bytes make room for which others; None for those of another file at the same place."""


@given(splices=st.lists(SPLICES, min_size=1, max_size=3))
def test_file_that_was_changed_anywhere_is_refused(
    splices: list[tuple[float, int, bytes | None]], two_files: list[bytes], tmp_path_factory: pytest.TempPathFactory
) -> None:
    content, other = two_files
    for share, removed, added in splices:
        at = int(share * len(content))
        content = content[:at] + (other[at : at + removed] if added is None else added) + content[at + removed :]
    assume(content not in two_files)
    folder = tmp_path_factory.mktemp("run")
    (folder / checkpoint.FILE_NAME).write_bytes(content)
    with pytest.raises(UsageError, match=r"is damaged, changed or no checkpoint of 'superadam train'; give"):
        checkpoint.read(folder)
    assert (folder / checkpoint.FILE_NAME).read_bytes() == content


def test_file_that_was_edited_is_refused(two_files: list[bytes], tmp_path: Path) -> None:
    path = tmp_path / checkpoint.FILE_NAME
    path.write_bytes(two_files[0])
    content = checkpoint.read(tmp_path)
    content["settings"]["lr"] = 1.0
    torch.save(content, path)
    with pytest.raises(UsageError, match="is damaged, changed or no checkpoint"):
        checkpoint.read(tmp_path)


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04", bytes(1000)])
def test_foreign_file_that_ends_with_its_digest_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / checkpoint.FILE_NAME).write_bytes(content + hashlib.sha256(content).digest())
    with pytest.raises(UsageError, match="no checkpoint of 'superadam train'"):
        checkpoint.read(tmp_path)


@given(share=st.floats(0, 1, exclude_max=True))
def test_full_disk_is_a_sentence_and_leaves_the_older_checkpoint(
    share: float, stepped: Trainer, two_files: list[bytes], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("run")
    path = folder / checkpoint.FILE_NAME
    path.write_bytes(two_files[1])
    room, most = int(share * len(two_files[0])), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, most[1]))  # the kernel takes this many bytes of a file and no more
    try:
        with pytest.raises(UsageError, match=r"cannot write .*: File too large; free some space"):
            checkpoint.save(stepped, folder)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, most)
    assert os.listdir(folder) == [path.name]
    assert path.read_bytes() == two_files[1]


def test_disk_that_fails_once_has_failed(tmp_path: Path) -> None:
    numbers = itertools.count()

    class Failing(io.BytesIO):
        def write(self, data: Any) -> int:
            if next(numbers) == failing:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return super().write(data)

    failing = -1
    checkpoint._write({"numbers": torch.arange(100)}, Failing())
    for failing in range(next(numbers)):  # noqa: B007 - read by Failing
        numbers = itertools.count()
        with pytest.raises(OSError, match="No space left"):
            checkpoint._write({"numbers": torch.arange(100)}, Failing())


@pytest.mark.slow
def test_process_killed_while_it_saves_leaves_the_older_checkpoint_or_the_new_one(tmp_path: Path) -> None:
    path = checkpoint.save(tiny_trainer(seed=1), tmp_path)
    older, trainer = path.read_bytes(), tiny_trainer(seed=2)
    models = [tiny_trainer(seed=seed).model.state_dict() for seed in (1, 2)]
    found = []
    code, line = 1, 0
    while code:
        path.write_bytes(older)
        code = exit_code_of_child(lambda at=line: killed_at_line(at, lambda: checkpoint.save(trainer, tmp_path)))  # type: ignore[misc]
        assert code in (0, -signal.SIGKILL)
        found.append([are_same(checkpoint.read(tmp_path)["model"], model) for model in models])
        line += 1
    is_new = [new for _, new in found]
    assert all(older is not new for older, new in found)
    assert is_new == sorted(is_new)
    assert 10 < is_new.index(True) < len(is_new) - 1  # killed before the renaming and after it
    checkpoint.save(trainer, tmp_path)
    assert os.listdir(tmp_path) == [path.name]  # the rest of none of the killed ones


def killed_at_line(number: int, work: Callable[[], object]) -> None:
    """Call `work`, and kill this process where it runs another line of the modules that write checkpoints."""
    times: Counter[tuple[str, int]] = Counter()
    reached = itertools.count()

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        if frame.f_code.co_filename not in (checkpoint.__file__, files.__file__):
            return None
        place = (frame.f_code.co_filename, frame.f_lineno)
        times[place] += event == "line"
        if event == "line" and times[place] in (1, 10) and next(reached) == number:
            os.kill(os.getpid(), signal.SIGKILL)
        return trace

    sys.settrace(trace)
    work()


def test_file_of_another_layout_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "FORMAT", "superadam train, 1")
    checkpoint.save(tiny_trainer(), tmp_path)
    monkeypatch.undo()
    with pytest.raises(UsageError, match="has the layout 'superadam train, 1', expected 'superadam train, 6'"):
        checkpoint.read(tmp_path)


def test_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=f"holds no {checkpoint.FILE_NAME}"):
        checkpoint.read(tmp_path / "nowhere")


@pytest.mark.parametrize("key", ["model", "optimizer", "batches", "random", "history"])
@pytest.mark.parametrize("value", [None, {}, {"state": 1}, "text"])
def test_damaged_part_is_refused(key: str, value: object, tmp_path: Path) -> None:
    with tiny_trainer() as trainer:
        trainer.step()
    checkpoint.save(trainer, tmp_path)
    content = checkpoint.read(tmp_path)
    content[key] = value
    with pytest.raises(UsageError, match="is damaged"):
        checkpoint.restore(tiny_trainer(), content, tmp_path)


@pytest.mark.parametrize("value", [None, 5, 10**400, [], {}, "text", torch.ones(3)], ids=str)
def test_damaged_marks_are_refused(value: object, stepped: Trainer, tmp_path: Path) -> None:
    checkpoint.save(stepped, tmp_path)
    content = checkpoint.read(tmp_path)
    with pytest.raises(UsageError, match="was trained on other bytes"):
        checkpoint.restore(tiny_trainer(), {**content, "text_sha256": value}, tmp_path)
    with open(tmp_path / checkpoint.FILE_NAME, "w+b") as file:
        checkpoint._write({**content, "format": value}, file)
    with pytest.raises(UsageError, match=r"has the layout 'text'|no checkpoint of 'superadam train'"):
        checkpoint.read(tmp_path)


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


def places(value: object, path: tuple[object, ...] = ()) -> Iterator[tuple[object, ...]]:
    """Yield the keys that lead to each value of a nest of dicts and lists."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list | tuple) else ()
    for key, item in items:
        yield (*path, key)
        yield from places(item, (*path, key))


def damaged(value: Any, path: tuple[object, ...], change: Callable[[Any], Any]) -> Any:
    """Return a copy of a nest in which one value is changed, or left out where `change` returns `LEFT_OUT`."""
    if not path:
        return change(value)
    items = dict(value) if isinstance(value, dict) else dict(enumerate(value))
    items[path[0]] = damaged(items[path[0]], path[1:], change)
    if items[path[0]] is LEFT_OUT:
        del items[path[0]]
    return items if isinstance(value, dict) else type(value)(items.values())


LEFT_OUT = object()

OTHERS: list[Any] = [
    *(None, True, -1, 0, 1, 7, 2**62, 10**400, -0.5, 0.0, math.nan, math.inf, 1e308, 1e-320, "", "\0", "auto", b"x"),
    *([], {}, (), [1], {"a": 1}, {0: 0.5}, (0.5,), [[[]]], StepKind.SKIPPED.value),
    *(torch.zeros(0), torch.ones(3), torch.tensor(2), torch.ones((), dtype=torch.complex64)),
    *(torch.ones(1).expand(10**6, 10**6), torch.eye(2).to_sparse(), torch.zeros(2, device="meta")),
]

CHANGES_OF_TENSORS: list[Callable[[torch.Tensor], object]] = [
    lambda t: t[:-1],
    lambda t: t[:1].expand(t.shape),
    lambda t: t * math.nan,
    lambda t: t.to("meta"),
    *(torch.zeros_like, torch.Tensor.double, torch.Tensor.half, torch.Tensor.long, torch.Tensor.numpy),
    *(torch.Tensor.clone, torch.Tensor.neg, torch.Tensor.flatten, torch.Tensor.t, torch.Tensor.to_sparse),
    torch.nn.Parameter,
]


def changed(value: Any, data: st.DataObject) -> Any:
    """Draw another value, or none, for the place of this one."""
    if isinstance(value, torch.Tensor) and data.draw(st.booleans()):
        with contextlib.suppress(RuntimeError, TypeError, IndexError):
            return data.draw(st.sampled_from(CHANGES_OF_TENSORS))(value)
    if type(value) in (int, float) and data.draw(st.booleans()):
        return data.draw(st.sampled_from([-value, value + 1, value - 1, 2 * value, type(value)(1) if value else 1e-3]))
    if isinstance(value, list | tuple | dict) and value and data.draw(st.booleans()):
        return {**value, "more": 1} if isinstance(value, dict) else [*value, value[-1]]
    return data.draw(st.sampled_from([LEFT_OUT, *OTHERS]))


@pytest.fixture(scope="module", params=[None, 2], ids=["applied", "skipped"])
def whole(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The content of a checkpoint after two steps, of a run that can be resumed from a command line."""
    folder = tmp_path_factory.mktemp("whole")
    options = () if request.param is None else ("--inject-nan", 1, "--inject-nan", request.param)
    with contextlib.redirect_stdout(io.StringIO()):
        assert train(*OPTIONS, "--text", write_text(folder), "--out", folder, "--stop-at", 2, *options) == 0
    return checkpoint.read(folder)


@pytest.mark.slow
@given(data=st.data())
def test_hand_made_content_is_resumed_right_or_refused_in_a_sentence(
    data: st.DataObject, whole: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> None:
    content: Any = whole
    for _ in range(data.draw(st.sampled_from([1, 1, 2]))):
        part = data.draw(st.sampled_from(sorted(content.keys() - {"format", "text_sha256"})))
        below = [(part,), *((part, *path) for path in places(content[part]))]
        content = damaged(content, data.draw(st.sampled_from(below)), lambda value: changed(value, data))
    folder = tmp_path_factory.mktemp("run")
    with open(folder / checkpoint.FILE_NAME, "w+b") as file:
        checkpoint._write(content, file)
    before = (folder / checkpoint.FILE_NAME).read_bytes()
    with contextlib.redirect_stderr(io.StringIO()) as words, contextlib.redirect_stdout(io.StringIO()):
        status = train(
            "--resume", folder, "--stop-at", 3, "--verify", "--out", folder / "next", "--report", folder / "report.json"
        )
    assert status in (0, 2)
    if status:
        assert words.getvalue().startswith("superadam: ")
        assert words.getvalue().count("\n") == 1
        assert os.listdir(folder) == [checkpoint.FILE_NAME]
    assert (folder / checkpoint.FILE_NAME).read_bytes() == before
