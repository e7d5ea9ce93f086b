"""`superadam.training.files`: a file is there whole or as it was, and what cannot be written is known beforehand."""

from __future__ import annotations

import os
from pathlib import Path
from typing import IO

import pytest

from superadam.training.files import replace_file, require_writable_folder
from superadam.usage import UsageError


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
