"""Which parts of a stretch of memory are free.

Owns numbers only: no memory, no threads. The lowest gap that is large enough is taken, and what is given back joins its
neighbours, so that buffers of a few recurring sizes find their places again at every step.
"""

from __future__ import annotations

from bisect import bisect_right


class Gaps:
    """The free ranges of `size` bytes, sorted; no two of them touch.

    Args:
        size: bytes of the whole stretch, all free.
    """

    def __init__(self, size: int) -> None:
        self._begins = [0] if size else []
        self._ends = [size] if size else []

    def take(self, size: int) -> int | None:
        """Return the first byte of a range that is no longer free; None where no gap has `size` bytes."""
        for index, (begin, end) in enumerate(zip(self._begins, self._ends, strict=True)):
            if end - begin > size:
                self._begins[index] = begin + size
                return begin
            if end - begin == size:
                del self._begins[index], self._ends[index]
                return begin
        return None

    def give_back(self, begin: int, size: int) -> None:
        """Make a range free that `take` returned."""
        end = begin + size
        index = bisect_right(self._begins, begin)
        touches_before = index > 0 and self._ends[index - 1] == begin
        touches_after = index < len(self._begins) and self._begins[index] == end
        if touches_before and touches_after:
            self._ends[index - 1] = self._ends[index]
            del self._begins[index], self._ends[index]
        elif touches_before:
            self._ends[index - 1] = end
        elif touches_after:
            self._begins[index] = begin
        else:
            self._begins.insert(index, begin)
            self._ends.insert(index, end)

    @property
    def ranges(self) -> list[tuple[int, int]]:
        """First byte, and the byte after the last, of every gap."""
        return list(zip(self._begins, self._ends, strict=True))
