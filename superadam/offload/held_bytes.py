"""A count of bytes whose holders become free one after the other."""

from __future__ import annotations

import collections
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any


class HeldBytes:
    """Bytes that are free again in about the order in which they were taken; those in between count until then.

    Stores running totals and subtracts nothing, so that no interrupt, error or finalizer can corrupt the size.
    An interrupt could leave a lock taken. There is none: threads that add at once count a little less for a while.
    """

    def __init__(self, is_free: Callable[[Any], bool]) -> None:
        self._is_free = is_free
        self._holders: collections.deque[tuple[Any, int, int]] = collections.deque()

    def add(self, holder: Any, size: int) -> None:
        """Count bytes until their holder is free."""
        begin = self._holders[-1][2] if self._holders else 0
        self._holders.append((holder, begin, begin + size))

    def oldest(self, number: int) -> Any:
        """Return the holder that came first; None where there are fewer than `number`, of which none is free."""
        return self._holders[0][0] if self.size and len(self._holders) >= number else None

    @property
    def size(self) -> int:
        """Bytes whose holders are not free."""
        while self._holders:
            first = self._holders[0]
            if not self._is_free(first[0]):
                return self._holders[-1][2] - first[1]
            with suppress(ValueError):  # another thread was here
                self._holders.remove(first)
        return 0


def is_gone(reference: weakref.ref[Any]) -> bool:
    """Whether a holder that is counted by a weak reference was freed."""
    return reference() is None
