"""Machines that are made up: what their files, their environment and their programs say."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from superadam.host.machine import Host


def machine(
    root: Path,
    files: Mapping[str, str] | None = None,
    environment: dict[str, str] | None = None,
    affinity: frozenset[int] = frozenset(range(8)),
    programs: Mapping[str, str] | None = None,
) -> Host:
    """Return a machine of these files below `root`; `programs` maps a word of a command line to what is printed."""
    for path, text in (files or {}).items():
        target = root / path.lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)

    def run(words: Sequence[str]) -> str:
        for word, output in (programs or {}).items():
            if any(word in given for given in words):
                return output
        raise FileNotFoundError(words[0])

    return Host(root, environment or {}, affinity, run)
