"""A first-fit free list over the bytes of one block of memory.

What is freed joins its neighbours, so that buffers of a few recurring sizes find their places again at every step.
"""

from __future__ import annotations


class Gaps:
    """The free ranges of `size` bytes: sorted pairs of first byte and end, no two of which touch."""

    def __init__(self, size: int) -> None:
        self.ranges = [(0, size)] if size else []

    def allocate(self, size: int) -> int | None:
        """Return the first byte of a range that was free; None where no gap has `size` bytes."""
        for index, (begin, end) in enumerate(self.ranges):
            if end - begin >= size:
                self.ranges[index : index + 1] = [(begin + size, end)] if end - begin > size else []
                return begin
        return None

    def free(self, begin: int, size: int) -> None:
        """Make a range free that `allocate` returned."""
        joined: list[tuple[int, int]] = []
        for first, end in sorted([*self.ranges, (begin, begin + size)]):
            if joined and joined[-1][1] == first:
                first = joined.pop()[0]
            joined.append((first, end))
        self.ranges = joined
