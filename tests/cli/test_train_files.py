"""`superadam.cli.train.files`: a file is there whole or as it was, and what cannot be written is known beforehand."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import IO

import pytest

from superadam.cli.train.files import replace_file, require_writable_folder
from superadam.cli.usage import UsageError


def test_file_appears_whole_in_a_new_folder(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b" / "file"
    replace_file(path, lambda file: file.write(b"first"))
    replace_file(path, lambda file: file.write(b"second"))
    assert path.read_bytes() == b"second"
    assert os.listdir(path.parent) == ["file"]


def test_file_is_readable_by_whom_the_mask_allows(tmp_path: Path) -> None:
    path = tmp_path / "file"
    before = os.umask(0o027)
    try:
        replace_file(path, lambda file: file.write(b"x"))
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == 0o640


@pytest.mark.parametrize("error", [ValueError("a fault"), KeyboardInterrupt()])
def test_failure_leaves_the_older_file_and_no_rest(error: BaseException, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"older")

    def fail(file: IO[bytes]) -> None:
        file.write(b"half of the new")
        raise error

    with pytest.raises(type(error)):
        replace_file(path, fail)
    assert path.read_bytes() == b"older"
    assert os.listdir(tmp_path) == ["file"]


def test_full_disk_is_a_sentence(tmp_path: Path) -> None:
    def fail(file: IO[bytes]) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(UsageError, match="No space left on device; free some space"):
        replace_file(tmp_path / "file", fail)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_disk_that_refuses_is_a_sentence(call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> None:
        raise OSError("out of order")  # without a number, as libraries raise it

    path = tmp_path / "file"
    path.write_bytes(b"older")
    monkeypatch.setattr(os, call, refuse)
    with pytest.raises(UsageError, match=r"cannot write .*: out of order; free some space"):
        replace_file(path, lambda file: file.write(b"newer"))
    assert path.read_bytes() == b"older"
    assert os.listdir(tmp_path) == ["file"]


def test_content_is_on_the_disk_before_its_name_and_the_name_before_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    fsync, replace = os.fsync, os.replace

    def synchronise(descriptor: int) -> None:
        kind = stat.S_IFMT(os.fstat(descriptor).st_mode)
        calls.append("content" if kind == stat.S_IFREG else "folder")
        assert kind == stat.S_IFDIR or os.fstat(descriptor).st_size == 5  # nothing is left in a buffer
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", synchronise)
    monkeypatch.setattr(os, "replace", lambda *names: calls.append("name") or replace(*names))
    replace_file(tmp_path / "file", lambda file: file.write(b"newer"))
    assert calls == ["content", "name", "folder"]


def test_rest_of_a_killed_process_is_removed_and_nothing_else(tmp_path: Path) -> None:
    other = [".file.1.part", ".file.old.part", ".files.999999999.part", "file.part"]  # process 1 lives
    for name in [*other, ".file.999999999.part", f".file.{os.getpid()}.part"]:
        (tmp_path / name).write_bytes(b"rest")
    replace_file(tmp_path / "file", lambda file: file.write(b"newer"))
    assert sorted(os.listdir(tmp_path)) == sorted([*other, "file"])


def test_folder_below_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(UsageError, match=r"--out .* is not a folder"):
        require_writable_folder(tmp_path / "file" / "below" / "it", "--out")


def test_folder_without_write_permission_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # permissions do not bind root, who may run this test
    with pytest.raises(UsageError, match=r"--report .* is not writable"):
        require_writable_folder(tmp_path / "new", "--report")


def test_asking_writes_nothing(tmp_path: Path) -> None:
    require_writable_folder(tmp_path / "new" / "folder", "--out")
    assert os.listdir(tmp_path) == []


def test_what_is_no_regular_file_is_not_replaced(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    with pytest.raises(UsageError, match="pipe: it is no regular file"):
        replace_file(path, lambda file: file.write(b"x"))
    assert stat.S_ISFIFO(path.stat().st_mode)
