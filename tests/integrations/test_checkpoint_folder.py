"""`superadam.integrations.checkpoint_folder`: the older or the new checkpoint is whole, and damage refused."""

import contextlib
import errno
import json
import mmap
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from support.children import exit_code_of_child
from support.interrupting import interrupt_at_each_line

from superadam.host import files as host_files
from superadam.integrations import checkpoint_folder
from superadam.integrations.checkpoint_folder import CheckpointError, begin, locate, look


@contextlib.contextmanager
def begun(folder: Path, states: Any = None) -> Iterator[Path]:
    """Return the part that a save writes to, by who has the folder's state, and end without publishing it."""
    with ExitStack() as stack:
        yield begin(folder, stack, {look(folder).state} if states is None else states)


def save(folder: Path, content: bytes = b"content", *, keep: int = 2, states: Any = None) -> Path:
    states = {look(folder).state} if states is None else states
    with begun(folder, states) as part:
        paths = part / "a", part / ".b"
        files = {path.name: (path.write_bytes(content), checkpoint_folder.sha256(path)) for path in paths}
        path, _ = checkpoint_folder.publish(part, files, keep, states)
        return path


def verify(folder: Path) -> Path:
    there, _ = locate(folder)
    for rank in range(3):
        checkpoint_folder.verify(there.newest, there.digest, rank, 3)
    return there.newest


def names(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("/dev/zero"), Path.mkdir])
def test_what_reading_might_wait_for_is_damage(tmp_path, make):
    """Also a file of a size that no manifest has."""
    older, newest = save(tmp_path, b"older"), save(tmp_path, b"newer")
    for path in (newest / "manifest.json", tmp_path / "latest"):
        os.truncate(path, 2**40)
        with pytest.raises(CheckpointError, match=f"{path.name} is missing or damaged"):
            verify(tmp_path)
        path.unlink()
        make(path)
        with pytest.raises(CheckpointError, match=f"{path.name} is missing or damaged"):
            verify(tmp_path)
        assert verify(older) == older
    (tmp_path / ".lock").unlink()
    os.mkfifo(tmp_path / ".lock")
    with pytest.raises(OSError, match=r"\.lock"):
        save(tmp_path)


def test_other_format_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint_folder, "FORMAT", 3)
    path = save(tmp_path)
    monkeypatch.undo()
    assert json.loads((path / "manifest.json").read_text())["format"] == 3
    with pytest.raises(CheckpointError, match=r"has format 3, expected 2$"):
        verify(tmp_path)


def test_files_that_rank_0_does_not_see_are_not_published(tmp_path):
    with (
        begun(tmp_path) as part,
        pytest.raises(CheckpointError, match="__1_0 is damaged: its bytes are none, expected 5"),
    ):
        checkpoint_folder.publish(part, {"__1_0": (5, "0" * 64)}, 1, set())
    assert names(tmp_path) == [".lock"]


def test_what_killed_saves_left_is_deleted_and_nothing_else(tmp_path):
    for name in [".save-00000001.0badcafe.part", ".save-.part"]:
        (tmp_path / name / "below").mkdir(parents=True)
    others = [".shared-marker", ".other.part", "save-1", "save-00000001.old", "mine", ".save-00000007.link.part"]
    for name in others[1:-1]:
        (tmp_path / name).mkdir()
    (tmp_path / others[0]).touch()
    (tmp_path / others[-1]).symlink_to("mine")  # cannot be deleted as a folder
    with begun(tmp_path) as part:  # which needs the space
        assert names(tmp_path) == sorted([*others, ".lock", part.name])
    with begun(tmp_path) as another:  # as ranks of a save whose rank 0 was killed may go on writing to theirs
        assert another != part
    save(tmp_path, keep=1)
    save(tmp_path, keep=1)
    assert names(tmp_path) == sorted([*others, ".lock", "latest", "save-00000002"])


def test_forked_child_that_leaves_a_save_of_its_parent_deletes_nothing(tmp_path):
    with ExitStack() as stack:
        part = begin(tmp_path, stack, {None})
        assert exit_code_of_child(stack.close) == 0
        assert part.exists()
    assert not part.exists()


def test_interrupt_at_any_line_leaves_no_lock(tmp_path, monkeypatch):
    """Also where the exception, and with it all its frames, is kept, as notebooks do."""
    monkeypatch.setattr(checkpoint_folder, "LOCK_SECONDS", 0)
    files = (checkpoint_folder.__file__, host_files.__file__, contextlib.__file__)

    def work() -> None:
        try:
            with ExitStack() as stack:
                begin(tmp_path, stack, {None})
                sys.settrace(None)
        finally:
            assert names(tmp_path) in ([], [".lock"])

    assert interrupt_at_each_line(work, lambda code: code.co_filename in files) > 50


def test_save_waits_for_the_end_of_another_one_and_is_refused_over_it(tmp_path):
    """Which is that of its process, though a child of it may still have the file open."""
    reading, writing = os.pipe()
    has_ended = mmap.mmap(-1, 1)  # which both processes see

    def save_slowly():
        with begun(tmp_path, ()) as part:
            child = os.fork()
            if child == 0:
                time.sleep(60)
            os.write(writing, str(child).encode())
            time.sleep(0.3)
            checkpoint_folder.publish(part, {}, 1, set())
            has_ended[0] = 1

    process = os.fork()  # by the main thread: a lock that another one held would never be released there
    if process == 0:
        try:
            save_slowly()
        finally:
            os._exit(0)
    child = int(os.read(reading, 10))
    try:
        with pytest.raises(CheckpointError, match="it holds save-00000001, which was neither loaded"):
            save(tmp_path)
        assert has_ended[0]
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(process, 0)
    assert names(tmp_path) == [".lock", "latest", "save-00000001"]


def test_checkpoint_of_another_run_is_never_deleted(tmp_path):
    """Even where somebody has copied it there."""
    theirs = save(tmp_path / "theirs")
    folder = tmp_path / "new" / "ours"
    for number in (1, 2, 3):
        assert save(folder, keep=2).name == f"save-{number:08}"
    assert names(folder) == [".lock", "latest", "save-00000002", "save-00000003"]
    for number in (1, 7):
        shutil.copytree(theirs, folder / f"save-{number:08}")
    for _ in range(3):
        save(folder, keep=1)
    assert names(folder) == [".lock", "latest", "save-00000001", "save-00000007", "save-00000010"]
    assert verify(folder).name == "save-00000010"


def test_one_whose_run_cannot_be_read_is_deleted_as_before(tmp_path):
    for content in (b"", b"[]", b"{", b"[" * 100_000):
        (save(tmp_path) / "manifest.json").write_bytes(content)
    save(tmp_path, keep=1)
    assert names(tmp_path) == [".lock", "latest", "save-00000005"]


def test_an_older_one_that_cannot_be_deleted_fails_no_save(tmp_path, monkeypatch):
    """As on a file system where somebody reads it."""
    rename = os.rename

    def busy(path: Path, target: Path) -> None:
        if path.name == "save-00000001":
            raise OSError(errno.EBUSY, "planted")
        rename(path, target)

    save(tmp_path)
    monkeypatch.setattr(os, "rename", busy)
    save(tmp_path, keep=1)
    assert save(tmp_path, keep=1).name == "save-00000003"
    assert names(tmp_path) == [".lock", "latest", "save-00000001", "save-00000003"]
    monkeypatch.undo()
    save(tmp_path, keep=1)
    assert names(tmp_path) == [".lock", "latest", "save-00000004"]
