"""What processes of one user on this machine tell each other: names of open files without content.

Such a file ends with its process, and a forked process closes it at once: it has told nothing itself.
"""

from __future__ import annotations

import os
import re
import secrets
import weakref
from contextlib import suppress

from superadam.host.machine import Host


class Announcement:
    """Lets the others read `text`, of at most 200 ASCII characters, as of this kind, until it is closed."""

    def __init__(self, kind: str, text: str) -> None:
        self._file: int | None = None
        with suppress(OSError):  # others then know less
            self._file = os.memfd_create(f"superadam-{kind}-{secrets.token_hex(8)}-{text}")
        _open.add(self)

    def close(self) -> None:
        """Take it back."""
        file, self._file = self._file, None
        if file is not None:
            os.close(file)


_open: weakref.WeakSet[Announcement] = weakref.WeakSet()


def _close_in_child() -> None:
    for one in [*_open]:
        with suppress(OSError):  # closed by the child's own preparations
            one.close()


os.register_at_fork(after_in_child=_close_in_child)


def announced(host: Host, process: int, kind: str) -> dict[str, str]:
    """Return what a process has announced of a kind: texts by keys, which a child that Python did not fork repeats."""
    links = [host.link_or(path, "") for path in host.glob(f"/proc/{process}/fd/*")]
    found = [re.fullmatch(rf"/memfd:superadam-{kind}-([0-9a-f]+)-(\S*)(?: \(deleted\))?", link) for link in links]
    return {match[1]: match[2] for match in found if match}
