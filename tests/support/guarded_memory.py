"""Memory between two inaccessible pages: the first byte before or after it ends the process with SIGSEGV."""

from __future__ import annotations

import ctypes
import mmap

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_NO_ACCESS = 0  # PROT_NONE


class GuardedMemory:
    """At least `size` bytes that can be made read-only, with an inaccessible page on either side."""

    def __init__(self, size: int) -> None:
        page = mmap.PAGESIZE
        self.size = -(-size // page) * page
        self._memory = mmap.mmap(-1, self.size + 2 * page)
        self._begin = ctypes.addressof(ctypes.c_char.from_buffer(self._memory)) + page
        _protect(self._begin - page, page, _NO_ACCESS)
        _protect(self._begin + self.size, page, _NO_ACCESS)

    def fill(self, byte: int) -> None:
        ctypes.memset(self._begin, byte, self.size)

    def set_read_only(self, read_only: bool) -> None:
        _protect(self._begin, self.size, mmap.PROT_READ if read_only else mmap.PROT_READ | mmap.PROT_WRITE)

    def address(self, size: int, *, at_end: bool) -> int:
        """Return where `size` bytes lie that end, or begin, exactly at an inaccessible page."""
        return self._begin + self.size - size if at_end else self._begin


def _protect(address: int, size: int, protection: int) -> None:
    if _libc.mprotect(address, size, protection) != 0:
        raise OSError(ctypes.get_errno(), "mprotect failed")
