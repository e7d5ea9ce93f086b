"""A folder of checkpoints of one run: published in one step, and verified to the last byte before they are used.

    FOLDER/latest               name of the newest checkpoint, and the SHA-256 of its manifest
    FOLDER/save-00000007/       a checkpoint; manifest.json has the run's id, every file's size and SHA-256, and its own
    FOLDER/.save-*.part/        a save under way, or what is left of one that was killed
    FOLDER/.shared-*            by which ranks see that they share the folder, for a moment
    FOLDER/.lock                held by the one save that may be under way

A checkpoint is written under another name, synchronized, renamed, and only then named in `latest`. It is saved on top
of the one that it descends from: who has neither loaded nor saved the newest one may not add another.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import secrets
import shutil
import stat
from collections.abc import Collection
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, NamedTuple

from superadam.host import forks
from superadam.host.files import lock, replace_file, synchronize
from superadam.host.signals import THIS_THREAD

FORMAT = 2  # in every manifest; a later layout gets the next number

LOCK_SECONDS = 30.0
"""For which a save waits for the end of another one."""

_LATEST, _MANIFEST = "latest", "manifest.json"
_NAME = re.compile(r"save-(\d{8,})", re.ASCII)
_POINTER = re.compile(r"(save-\d{8,}) ([0-9a-f]{64})\n", re.ASCII)

Files = dict[str, tuple[int, str]]  # size in bytes and SHA-256 of each file of a checkpoint, but for its manifest


class CheckpointError(RuntimeError):
    """A checkpoint could not be saved or loaded; raised on every rank."""


class CheckpointFolder(NamedTuple):
    """What is in a folder of checkpoints.

    Attributes:
        newest: the checkpoint that `latest` names, or the only one if it is the first; else `latest` itself, which is
            missing or damaged.
        digest: SHA-256 of its manifest, if `latest` is intact.
        others: all other checkpoints, the newest first.
        state: the text of `latest`, or what a save that was killed would have written; None without a checkpoint.
    """

    newest: Path
    digest: str | None
    others: list[Path]
    state: str | None


def look(folder: Path) -> CheckpointFolder:
    """Return what is in a folder, which may be absent; raises OSError, and CheckpointError in that of a checkpoint."""
    path = Path(os.path.realpath(folder))
    if inside := [each for each in (path, *path.parents) if _run_of(each)]:  # with more files, it would be damaged
        kind = "is" if inside[0] == path else "lies in"
        raise CheckpointError(f"it {kind} a checkpoint, expected the folder that holds it: pass {inside[0].parent}")
    text = None
    with THIS_THREAD.without_handlers, suppress(FileNotFoundError):
        text = _read(folder / _LATEST).decode("ascii", "replace")
    if text is None:
        found = _checkpoints(folder)
        state = _pointer_to(found[0], sight(found[0])) if found else None
        is_first = [_number(path) for path in found] == [1]  # its save was killed before it was named
        return CheckpointFolder(found.pop() if is_first else folder / _LATEST, None, found, state)
    pointer = _POINTER.fullmatch(text)
    newest = folder / (pointer[1] if pointer else _LATEST)
    others = [path for path in _checkpoints(folder) if path != newest]
    return CheckpointFolder(newest, pointer and pointer[2], others, text)


def locate(path: Path) -> tuple[CheckpointFolder, bool]:
    """Return what a folder holds, and True; for an older checkpoint in it the same with that as newest, and False.

    Raises OSError.
    """
    is_checkpoint = (path / _MANIFEST).exists() or _NAME.fullmatch(path.name)
    if not is_checkpoint or (path / _LATEST).exists():
        return look(path), True
    if path.is_symlink():
        path = Path(os.path.realpath(path))
    there = look(path.parent)
    if path == there.newest:
        return there, True
    others = [other for other in (there.newest, *there.others) if other not in (path, path.parent / _LATEST)]
    return CheckpointFolder(path, None, others, there.state), False


def begin(folder: Path, stack: ExitStack, states: Collection[str | None]) -> Path:
    """Return the new folder to write the next checkpoint to; when `stack` ends, it was published or is deleted.

    Deletes what killed saves have left. Raises OSError, and CheckpointError where another process is saving there, or
    the folder has another state than the `states` in which it was loaded from or saved to.
    """
    look(folder)  # before anything is written there
    folder.mkdir(parents=True, exist_ok=True)
    try:
        lock(folder / ".lock", LOCK_SECONDS, stack)
    except BlockingIOError:
        raise CheckpointError(f"another process has been saving there for {LOCK_SECONDS:g} seconds") from None
    there = look(folder)
    if there.state is not None and there.state not in states:
        newest = there.newest if there.newest.name != _LATEST else [*there.others, there.newest][0]
        raise CheckpointError(
            f"it holds {newest.name}, which was neither loaded into this optimizer nor saved from it: end the job "
            "that saved it, or load it to continue its run, or choose another folder"
        )
    _delete_parts(folder)
    number = 1 + max(map(_number, _checkpoints(folder)), default=0)
    part = _part_of(folder / f"save-{number:08}")
    stack.callback(forks.call_in, os.getpid(), shutil.rmtree, part, True)
    part.mkdir()
    return part


def publish(part: Path, files: Files, keep: int, states: set[str | None]) -> tuple[Path, str]:
    """Make what was written, and is on the disk, the newest checkpoint, and delete all but `keep` of the run.

    Returns its folder, and the state of the folder that holds it, which `states` receives as soon as there is no way
    back. Raises OSError, and CheckpointError where these are not the files there.
    """
    _require_files(part, files)
    folder, path = part.parent, published(part)
    there = look(folder)
    run = next(filter(None, map(_run_of, (there.newest, *there.others))), secrets.token_hex(16))
    manifest = _sealed({"format": FORMAT, "run": run, "files": files})
    replace_file(part / _MANIFEST, lambda file: file.write(manifest))
    pointer = _pointer_to(path, hashlib.sha256(manifest).hexdigest())
    states.add(pointer)  # also if a save ends before the checkpoint is named
    os.rename(part, path)
    try:
        synchronize(folder)
        replace_file(folder / _LATEST, lambda file: file.write(pointer.encode()))
    except OSError:
        if (there := look(folder)).digest is None or there.state != pointer:
            os.rename(path, part)  # it was not named, and is deleted
        raise
    for older in [other for other in _checkpoints(folder) if _run_of(other) in (run, None)][keep:]:
        with THIS_THREAD.without_handlers, suppress(OSError):
            os.rename(older, _part_of(older))
    _delete_parts(folder)
    return path, pointer


def published(part: Path) -> Path:
    """Return the folder that a checkpoint under way will have once it is published."""
    return part.with_name(part.name.split(".")[1])


def sight(path: Path) -> str | None:
    """Return what only a process with the same folder sees: of a checkpoint the SHA-256 of its manifest.

    None where there is none, as where a folder has the name of `latest`.
    """
    with THIS_THREAD.without_handlers, suppress(FileNotFoundError, NotADirectoryError):
        return hashlib.sha256(_read(path / _MANIFEST)).hexdigest()
    return path.name if path.is_dir() and path.name != _LATEST else None


def verify(path: Path, digest: str | None, rank: int, world_size: int) -> None:
    """Raise OSError or CheckpointError unless a checkpoint is whole, and this rank's share of its files intact.

    Its manifest must have the SHA-256 `digest`, if one is given.
    """
    if path.name == _LATEST:
        raise CheckpointError(f"{path} is missing or damaged")
    with THIS_THREAD.without_handlers:
        try:
            text = _read(path / _MANIFEST)
            manifest = json.loads(text)
            is_intact = _sealed(manifest) == text
        except FileNotFoundError:
            raise CheckpointError(f"{path / _MANIFEST} is missing or damaged") from None
        except (ValueError, AttributeError, RecursionError):
            is_intact = False
    if not is_intact:
        raise CheckpointError(f"{path / _MANIFEST} is damaged")
    if digest not in (None, hashlib.sha256(text).hexdigest()):
        raise CheckpointError(f"{path / _MANIFEST} is not the one that {_LATEST} names, and one of both is damaged")
    if manifest["format"] != FORMAT:
        raise CheckpointError(f"{path} has format {manifest['format']!r}, expected {FORMAT}")
    files = manifest["files"]
    _require_files(path, files)
    for name in sorted(files)[rank::world_size]:
        if sha256(path / name) != files[name][1]:
            raise CheckpointError(f"{path / name} is damaged")


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file, in hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _read(path: Path) -> bytes:
    """Return what a small file holds; raises OSError, also where reading might never end, as of a pipe or device."""
    status = path.stat()
    if not stat.S_ISREG(status.st_mode) or status.st_size >= 2**30:
        raise FileNotFoundError(errno.ENOENT, "no file of a checkpoint", str(path))
    return path.read_bytes()


def _sealed(content: dict[str, Any]) -> bytes:
    """Return a manifest, which holds the SHA-256 of the rest of it."""
    body = {key: value for key, value in content.items() if key != "sha256"}
    digest = hashlib.sha256(json.dumps(body).encode()).hexdigest()
    return json.dumps({**body, "sha256": digest}, indent=1).encode()


def _require_files(path: Path, files: Files) -> None:
    """Raise CheckpointError unless these files, of these sizes, are all that is there besides the manifest."""
    expected = {name: size for name, (size, _) in files.items()}
    found = {entry.name: entry.stat().st_size for entry in os.scandir(path) if entry.name != _MANIFEST}
    if found != expected:
        name = min(name for name, _ in found.items() ^ expected.items())
        bytes_found, bytes_expected = (sizes.get(name, "none") for sizes in (found, expected))
        raise CheckpointError(f"{path / name} is damaged: its bytes are {bytes_found}, expected {bytes_expected}")


def _pointer_to(path: Path, digest: str | None) -> str:
    """Return the text of `latest` that names a checkpoint, whose manifest has this SHA-256."""
    return f"{path.name} {digest}\n"


def _number(path: Path) -> int:
    return int(path.name.split("-")[1])


def _checkpoints(folder: Path) -> list[Path]:
    """Return all checkpoints, the newest first; none where there is no folder."""
    names: list[str] = []
    with THIS_THREAD.without_handlers, suppress(FileNotFoundError, NotADirectoryError):
        names = os.listdir(folder)
    return sorted((folder / name for name in names if _NAME.fullmatch(name)), key=_number, reverse=True)


def _run_of(path: Path) -> str | None:
    """Return the id of a checkpoint's run; None where its manifest cannot be read."""
    with THIS_THREAD.without_handlers, suppress(OSError, ValueError, RecursionError):
        manifest = json.loads(_read(path / _MANIFEST))
        return manifest["run"] if isinstance(manifest, dict) and manifest.keys() >= {"format", "run", "files"} else None
    return None


def _part_of(path: Path) -> Path:
    """Return a name for an unfinished checkpoint that no rank of a killed save can still be writing to."""
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")


def _delete_parts(folder: Path) -> None:
    for part in folder.glob(".save-*.part"):
        shutil.rmtree(part, ignore_errors=True)
    for part in folder.glob(f".{_LATEST}.*.part"):
        part.unlink(missing_ok=True)
