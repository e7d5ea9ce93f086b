"""Memory that maps files, as of a checkpoint that is loaded with `mmap=True`: what was read can be given back."""

from __future__ import annotations

import bisect
import ctypes
import mmap

from torch import Tensor

from superadam.host.machine import Host

_PAGE_OUT = 21  # MADV_PAGEOUT of Linux 5.4: drops clean pages, and loses nothing of others


class MappedFiles:
    """The mapped files of this process, as they are when this is made."""

    def __init__(self) -> None:
        self._ranges: list[tuple[int, int]] = []  # begin and end of each, in order
        for line in filter(None, Host().read_or("/proc/self/maps", "").split("\n")):  # of which names hold none
            addresses, _, _, _, inode, *_ = line.split(maxsplit=5)
            if inode != "0":
                begin, end = (int(address, 16) for address in addresses.split("-"))
                self._ranges.append((begin, end))

    def release(self, tensor: Tensor) -> None:
        """Give back the memory of a tensor's whole pages, if it maps a file; they are read again when needed."""
        if not tensor.is_cpu or not tensor.is_contiguous():
            return
        address, size = tensor.data_ptr(), tensor.nbytes
        place = bisect.bisect_right(self._ranges, (address, 1 << 64)) - 1
        if place < 0 or address + size > self._ranges[place][1]:
            return
        begin, end = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE, (address + size) // mmap.PAGESIZE * mmap.PAGESIZE
        if begin < end:  # a kernel that cannot leaves the pages where they are, to be reclaimed when memory is short
            madvise(begin, end - begin, _PAGE_OUT)


madvise = ctypes.CDLL(None).madvise
madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
