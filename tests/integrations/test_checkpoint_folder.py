"""`superadam.integrations.checkpoint_folder`: the older or the new checkpoint is whole, and damage refused."""

from __future__ import annotations

import json
import os
import stat
from contextlib import ExitStack
from pathlib import Path

import pytest

from superadam.integrations import checkpoint_folder
from superadam.integrations.checkpoint_folder import CheckpointError


def save(folder: Path, content: bytes = b"content", *, keep: int = 2, world_size: int = 1) -> Path:
    with ExitStack() as stack:
        part = checkpoint_folder.begin(folder, stack)
        files = {}
        for name in ("a", ".b"):
            (part / name).write_bytes(content)
            files[name] = (len(content), checkpoint_folder.sha256(part / name))
        return checkpoint_folder.publish(part, files, world_size, keep)


def verify(folder: Path) -> Path:
    path, digest, _ = checkpoint_folder.locate(folder)
    for rank in range(3):
        checkpoint_folder.verify(path, digest, rank, 3)
    return path


def names(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


def test_newest_is_found_and_the_older_ones_beyond_keep_are_deleted(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "folder"
    for number in range(1, 5):
        assert save(folder, str(number).encode()).name == f"save-{number:08}"
        assert (verify(folder) / "a").read_text() == str(number)
    assert names(folder) == [".lock", "latest", "save-00000003", "save-00000004"]
    path, _, others = checkpoint_folder.locate(folder)
    assert (path.name, [other.name for other in others]) == ("save-00000004", ["save-00000003"])


def test_checkpoint_is_loaded_from_its_own_folder(tmp_path: Path) -> None:
    older = save(tmp_path)
    save(tmp_path)
    assert verify(older) == older


def test_flipped_bit_in_any_byte_is_refused(tmp_path: Path) -> None:
    older = save(tmp_path, b"older")
    newest = save(tmp_path, b"newer")
    for path in [tmp_path / "latest", *newest.iterdir()]:
        intact = path.read_bytes()
        for position in range(len(intact)):
            damaged = bytearray(intact)
            damaged[position] ^= 1 << position % 8
            path.write_bytes(damaged)
            with pytest.raises((CheckpointError, FileNotFoundError)) as error:
                verify(tmp_path)
            assert path.name == "latest" or str(error.value).startswith(f"{path} is damaged")
        path.write_bytes(intact)
    assert verify(tmp_path) == newest
    assert checkpoint_folder.locate(tmp_path)[2] == [older]


@pytest.mark.parametrize("name", ["a", ".b", "manifest.json", "../latest"])
@pytest.mark.parametrize("change", ["missing", "shorter", "longer", "empty"])
def test_missing_and_resized_files_are_refused(name: str, change: str, tmp_path: Path) -> None:
    path = save(tmp_path) / name
    content = path.read_bytes()
    path.unlink()
    if change != "missing":
        path.write_bytes({"shorter": content[:-1], "longer": content + b"\n", "empty": b""}[change])
    with pytest.raises((CheckpointError, FileNotFoundError), match=path.name):
        verify(tmp_path)


def test_additional_file_is_refused(tmp_path: Path) -> None:
    path = save(tmp_path)
    (path / "c").mkdir()
    with pytest.raises(CheckpointError, match=r"/c is damaged: its bytes are .*, expected none"):
        verify(tmp_path)


def test_files_of_another_checkpoint_are_refused(tmp_path: Path) -> None:
    """Also where all of them are intact: `latest` knows the manifest."""
    older, newest = save(tmp_path, b"older"), save(tmp_path, b"newer")
    for path in older.iterdir():
        path.replace(newest / path.name)
    with pytest.raises(CheckpointError, match=r"manifest\.json is not the one that latest names"):
        verify(tmp_path)


def test_other_format_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as context:
        context.setattr(checkpoint_folder, "FORMAT", 2)
        path = save(tmp_path)
    assert json.loads((path / "manifest.json").read_text())["format"] == 2
    with pytest.raises(CheckpointError, match="has format 2, expected 1"):
        verify(tmp_path)


def test_failed_save_leaves_nothing_and_the_older_one(tmp_path: Path) -> None:
    save(tmp_path)
    before = names(tmp_path)
    with ExitStack() as stack:
        (checkpoint_folder.begin(tmp_path, stack) / "a").write_bytes(b"half")
    assert names(tmp_path) == before
    verify(tmp_path)


def test_files_that_rank_0_does_not_see_are_not_published(tmp_path: Path) -> None:
    with ExitStack() as stack:
        part = checkpoint_folder.begin(tmp_path, stack)
        with pytest.raises(CheckpointError, match="__1_0 is damaged: its bytes are none, expected 5"):
            checkpoint_folder.publish(part, {"__1_0": (5, "0" * 64)}, 2, 1)
    assert names(tmp_path) == [".lock"]


def test_what_killed_saves_left_is_deleted_and_nothing_else(tmp_path: Path) -> None:
    for name in [".save-00000001.0badcafe.part", ".save-.part"]:
        (tmp_path / name / "below").mkdir(parents=True)
    others = [".other.part", "save-1", "save-00000001.old", "mine", ".save-00000007.link.part"]
    for name in others[:-1]:
        (tmp_path / name).mkdir()
    (tmp_path / others[-1]).symlink_to("mine")  # cannot be deleted as a folder
    with ExitStack() as stack:
        part = checkpoint_folder.begin(tmp_path, stack)  # which needs the space
        assert names(tmp_path) == sorted([*others, ".lock", part.name])
    save(tmp_path, keep=1)
    save(tmp_path, keep=1)
    assert names(tmp_path) == sorted([*others, ".lock", "latest", "save-00000002"])


def test_save_under_way_is_left_alone(tmp_path: Path) -> None:
    with ExitStack() as stack:
        part = checkpoint_folder.begin(tmp_path, stack)
        with pytest.raises(CheckpointError, match="another process is saving there"), ExitStack() as other:
            checkpoint_folder.begin(tmp_path, other)
        assert part.is_dir()
    save(tmp_path)


def test_unfinished_one_is_never_written_to_again(tmp_path: Path) -> None:
    """Ranks of a save whose rank 0 was killed may go on writing."""
    parts = set()
    for _ in range(3):
        with ExitStack() as stack:
            parts.add(checkpoint_folder.begin(tmp_path, stack))
    assert len(parts) == 3


def test_content_is_on_the_disk_before_its_name_and_the_name_before_it_is_latest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, keep=1)
    calls: list[str] = []
    fsync, rename, replace = os.fsync, os.rename, os.replace

    def synchronize(descriptor: int) -> None:
        kind = stat.S_IFMT(os.fstat(descriptor).st_mode)
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        calls.append(f"{'file' if kind == stat.S_IFREG else 'names'} {'in part' if 'save' in str(path) else 'here'}")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", synchronize)
    monkeypatch.setattr(os, "rename", lambda *paths: calls.append(f"rename to {paths[1].suffix}") or rename(*paths))
    monkeypatch.setattr(os, "replace", lambda *paths: calls.append(f"replace {paths[1].name}") or replace(*paths))
    save(tmp_path, keep=1)
    assert calls == [
        *("file in part", "replace manifest.json", "names in part"),
        *("rename to ", "names here"),
        *("file here", "replace latest", "names here"),
        "rename to .part",
    ]
