"""The training text, as bytes: what is read, what is held out, and how windows are drawn.

The same files and the same seed give the same windows on every machine.
"""

from __future__ import annotations

import hashlib
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from superadam.cli.usage import UsageError

HELD_OUT_SHARE = 16
"""The last 1/16 of the text is never trained on."""

_EXCLUDED_FOLDERS = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__", "__phello__"}
)


@dataclass(frozen=True, slots=True)
class Text:
    """Bytes to train on and bytes to evaluate on.

    Attributes:
        name: for people.
        training, held_out: uint8, 1-D, disjoint.
        sha256: hexadecimal digest of all bytes.
    """

    name: str
    training: Tensor
    held_out: Tensor
    sha256: str

    @staticmethod
    def of_bytes(name: str, content: bytes, seq: int) -> Text:
        """Split `content` into a training and a held-out part.

        Raises:
            UsageError: either part is too short for one window of `seq` bytes and the byte after it.
        """
        needed = (seq + 1) * HELD_OUT_SHARE
        if len(content) < needed:
            raise UsageError(
                f"{name} holds {len(content)} bytes; expected at least {needed} for --seq {seq}: "
                "give a longer text with --text, or a shorter --seq"
            )
        values = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        boundary = len(content) - len(content) // HELD_OUT_SHARE
        return Text(name, values[:boundary], values[boundary:], hashlib.sha256(content).hexdigest())

    @staticmethod
    def read(path: str | None, seq: int) -> Text:
        """Return the text in file `path`, or the sources of Python's standard library for None.

        Raises:
            UsageError: the file cannot be read or is too short, or this Python has no sources.
        """
        if path is None:
            return Text.of_bytes("Python's standard library", _standard_library(), seq)
        try:
            content = Path(path).read_bytes()
        except OSError as error:
            raise UsageError(f"cannot read --text {path}: {error.strerror}; expected a readable file") from error
        return Text.of_bytes(path, content, seq)

    def draw(self, batch: int, seq: int, generator: torch.Generator) -> Tensor:
        """Return int64 `(batch, seq + 1)`: windows of the training part at positions that `generator` draws."""
        starts = torch.randint(len(self.training) - seq, (batch, 1), generator=generator, device="cpu")
        return self.training[starts + torch.arange(seq + 1, device="cpu")].long()

    def held_out_windows(self, batch: int, seq: int) -> Tensor:
        """Return int64 `(batch, seq + 1)`: windows evenly spaced over the held-out part, always the same."""
        starts = torch.linspace(0, len(self.held_out) - seq - 1, batch, dtype=torch.float64, device="cpu")
        return self.held_out[starts.long().unsqueeze(1) + torch.arange(seq + 1, device="cpu")].long()


def _standard_library() -> bytes:
    """Return the sources of the standard library without tests and installed packages, concatenated.

    Files come in the order of their paths' digests: a fixed shuffle, so that the held-out end is like the rest.
    """
    root = Path(sysconfig.get_path("stdlib"))
    relative = [path.relative_to(root) for path in root.rglob("*.py")]
    chosen = [path for path in relative if _EXCLUDED_FOLDERS.isdisjoint(path.parts[:-1])]
    chosen.sort(key=lambda path: hashlib.sha256(path.as_posix().encode()).digest())
    if not chosen:
        raise UsageError(f"there are no Python sources in {root}; give a text with --text FILE")
    return b"".join((root / path).read_bytes() for path in chosen)
