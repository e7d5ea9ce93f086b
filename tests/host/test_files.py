"""`superadam.host.files`: a file is there whole or as it was, whenever writing fails or the process is killed."""

import errno
import os
import signal
import stat
from contextlib import ExitStack
from pathlib import Path
from unittest.mock import Mock

import pytest
from support.children import exit_code_of_child, killed_at

from superadam.host.files import lock, replace_file


def test_file_is_readable_by_whom_the_mask_allows(tmp_path):
    path = tmp_path / "file"
    before = os.umask(0o027)
    try:
        replace_file(path, lambda file: file.write(b"x"))
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == 0o640


@pytest.mark.parametrize(
    ("call", "error"),
    [
        *(("write", error) for error in (ValueError("a fault"), KeyboardInterrupt(), OSError(errno.ENOSPC, "full"))),
        *((call, OSError("out of order")) for call in ("fsync", "replace")),
        ("replace", IsADirectoryError(errno.EISDIR, "is one", "a temporary name", None, "the name")),
    ],
)
def test_failure_leaves_the_older_file_and_no_rest(call, error, tmp_path, monkeypatch):
    path, fail = tmp_path / "file", Mock(side_effect=error)
    path.write_bytes(b"older")
    if call != "write":
        monkeypatch.setattr(os, call, fail)
    with pytest.raises(type(error)) as caught:
        replace_file(path, lambda file: file.write(b"half of the new") and call == "write" and fail())
    told = f"[Errno {error.errno}] {error.strerror}: '{path}'" if getattr(error, "errno", None) else str(error)
    assert str(caught.value) == told
    assert path.read_bytes() == b"older"
    assert os.listdir(tmp_path) == ["file"]


def test_content_is_on_the_disk_before_its_name_and_the_name_before_the_end(tmp_path, monkeypatch):
    calls = []
    fsync, replace = os.fsync, os.replace

    def synchronise(descriptor):
        kind = stat.S_IFMT(os.fstat(descriptor).st_mode)
        calls.append("content" if kind == stat.S_IFREG else "folder")
        assert kind == stat.S_IFDIR or os.fstat(descriptor).st_size == 5  # nothing is left in a buffer
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", synchronise)
    monkeypatch.setattr(os, "replace", lambda *names: calls.append("name") or replace(*names))
    replace_file(tmp_path / "file", lambda file: file.write(b"newer"))
    assert calls == ["content", "name", "folder"]


@pytest.mark.slow
def test_process_killed_at_any_call_leaves_the_older_file_or_the_new_one(tmp_path):
    path, found, code = tmp_path / "file", [], 1

    def replace():
        replace_file(path, lambda file: file.write(b"newer"))

    while code:
        path.write_bytes(b"older")
        code = exit_code_of_child(lambda: killed_at(len(found), replace))
        assert code in (0, -signal.SIGKILL)
        found.append(path.read_bytes())
    assert set(found) == {b"older", b"newer"}
    assert found == sorted(found, reverse=True)
    assert 2 < found.index(b"newer") < len(found) - 1  # killed before the renaming and after it


def test_file_that_is_replaced_while_it_is_replaced_has_all_of_one(tmp_path):
    path = tmp_path / "file"

    def write(file):
        file.write(b"ou")
        replace_file(path, lambda other: other.write(b"inner"))  # as another thread
        assert path.read_bytes() == b"inner"
        file.write(b"ter")

    replace_file(path, write)
    assert path.read_bytes() == b"outer"
    assert os.listdir(tmp_path) == ["file"]


def test_forked_child_that_leaves_the_call_deletes_nothing(tmp_path):
    process = os.getpid()

    def write(file):
        child = os.fork()
        if child == 0:
            raise KeyboardInterrupt
        assert os.waitpid(child, 0)[1] == 0
        file.write(b"newer")

    try:
        replace_file(tmp_path / "file", write)
    except KeyboardInterrupt:
        os._exit(os.getpid() == process)
    assert (tmp_path / "file").read_bytes() == b"newer"


def test_what_is_no_regular_file_is_not_replaced(tmp_path):
    path = tmp_path / "pipe"
    os.mkfifo(path)
    with pytest.raises(OSError, match="pipe is no regular file, expected one, or none; name another path"):
        replace_file(path, lambda file: file.write(b"x"))
    assert stat.S_ISFIFO(path.stat().st_mode)


def test_forked_child_holds_no_lock(tmp_path):
    (go, end), (forked, child) = os.pipe(), os.pipe()
    holder = os.fork()
    if holder == 0:
        with ExitStack() as stack:
            lock(tmp_path / ".lock", 0, stack)
            if os.fork() == 0:
                os.close(end)
                os.write(child, b"x")
                os.read(go, 1)  # outlives the holder
            else:
                os.read(forked, 1)
            os._exit(0)  # as if it was killed
    os.waitpid(holder, 0)
    with ExitStack() as stack:
        lock(tmp_path / ".lock", 0, stack)
    for descriptor in (end, go, forked, child):
        os.close(descriptor)


def test_lock_ends_although_a_child_that_python_did_not_fork_has_the_file(tmp_path):
    with ExitStack() as stack:
        lock(tmp_path / ".lock", 0, stack)
        ours = next(fd for fd in Path("/proc/self/fd").iterdir() if fd.exists() and fd.samefile(tmp_path / ".lock"))
        child = os.dup(int(ours.name))  # the open file that such a child would share
    with ExitStack() as stack:
        lock(tmp_path / ".lock", 0, stack)
    os.close(child)
