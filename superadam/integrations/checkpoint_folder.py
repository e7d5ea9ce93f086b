"""A folder of checkpoints: published in one step, and verified to the last byte before they are used.

    FOLDER/latest               name of the newest checkpoint, and the SHA-256 of its manifest
    FOLDER/save-00000007/       a checkpoint, with manifest.json: the size and SHA-256 of every file, and of itself
    FOLDER/.save-*.part/        a save under way, or what is left of one that was killed
    FOLDER/.lock                held by the one save that may be under way

A checkpoint is written under another name, synchronized, renamed, and only then named in `latest`.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import secrets
import shutil
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from superadam.host.files import replace_file, synchronize

FORMAT = 1  # in every manifest; a later layout gets the next number

_LATEST, _MANIFEST = "latest", "manifest.json"
_NAME = re.compile(r"save-(\d{8,})", re.ASCII)
_POINTER = re.compile(r"(save-\d{8,}) ([0-9a-f]{64})\n", re.ASCII)

Files = dict[str, tuple[int, str]]  # size in bytes and SHA-256 of each file of a checkpoint, but for its manifest


class CheckpointError(RuntimeError):
    """A checkpoint could not be saved or loaded; raised on every rank."""


def begin(folder: Path, stack: ExitStack) -> Path:
    """Return the new folder to write the next checkpoint to; when `stack` ends, it was published or is deleted.

    Deletes what killed saves have left. Raises OSError, or CheckpointError where another process is saving there.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lock = stack.enter_context((folder / ".lock").open("a"))
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise CheckpointError("another process is saving there") from None
    _delete_parts(folder)
    number = 1 + max(map(_number, _checkpoints(folder)), default=0)
    part = _part_of(folder / f"save-{number:08}")
    part.mkdir()
    stack.callback(shutil.rmtree, part, ignore_errors=True)
    return part


def publish(part: Path, files: Files, world_size: int, keep: int) -> Path:
    """Make what was written, and is on the disk, the newest checkpoint, and delete all but `keep`; return its folder.

    Raises OSError or CheckpointError where these are not the files there, or writing failed.
    """
    _require_files(part, files)
    path = part.with_name(part.name.split(".")[1])
    manifest = _sealed({"format": FORMAT, "world_size": world_size, "files": files})
    replace_file(part / _MANIFEST, lambda file: file.write(manifest))
    os.rename(part, path)
    synchronize(path.parent)
    pointer = f"{path.name} {hashlib.sha256(manifest).hexdigest()}\n"
    replace_file(path.parent / _LATEST, lambda file: file.write(pointer.encode()))
    for older in _checkpoints(path.parent)[keep:]:
        with suppress(OSError):
            os.rename(older, _part_of(older))
    _delete_parts(path.parent)
    return path


def locate(folder: Path) -> tuple[Path, str | None, list[Path]]:
    """Return the newest checkpoint, the SHA-256 of its manifest, and the other ones; or `folder` if it is one."""
    if (folder / _MANIFEST).exists():
        return folder, None, []
    try:
        pointer = _POINTER.fullmatch((folder / _LATEST).read_text("ascii"))
    except (OSError, UnicodeError):
        pointer = None
    path = folder / (pointer[1] if pointer else _LATEST)
    return path, pointer and pointer[2], [other for other in _checkpoints(folder) if other != path]


def verify(path: Path, digest: str | None, rank: int, world_size: int) -> None:
    """Raise OSError or CheckpointError unless a checkpoint is whole, and this rank's share of its files intact.

    Its manifest must have the SHA-256 `digest`, if one is given.
    """
    if path.name == _LATEST:
        raise CheckpointError(f"{path} is missing or damaged")
    text = (path / _MANIFEST).read_bytes()
    try:
        manifest = json.loads(text)
        is_intact = _sealed(manifest) == text
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


def _number(path: Path) -> int:
    return int(path.name.split("-")[1])


def _checkpoints(folder: Path) -> list[Path]:
    return sorted((path for path in folder.iterdir() if _NAME.fullmatch(path.name)), key=_number, reverse=True)


def _part_of(path: Path) -> Path:
    """Return a name for an unfinished checkpoint that no rank of a killed save can still be writing to."""
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")


def _delete_parts(folder: Path) -> None:
    for part in folder.glob(".save-*.part"):
        shutil.rmtree(part, ignore_errors=True)
