"""No kernel touches one byte outside its arrays, at any length; and none writes to an array that its pass only reads.

Every array of a segment ends, or begins, exactly at an inaccessible page; arrays that a pass only reads are read-only.
The kernels run in a forked child, so that a violation is an exit code. (test_kernels_bits.py has canaries around arrays
at every byte offset.)
"""

import ctypes
import faulthandler
import mmap
import resource
import signal
from collections.abc import Iterator

import numpy as np
import pytest
from support.children import exit_code_of_child
from support.kernel_arrays import STATE, STORAGE, variants

from superadam.kernels import native
from superadam.kernels.native import Dtype, Flag, Pass

LENGTHS = [*range(71), *range(native.CHUNK - 2, native.CHUNK + 3), 2 * native.CHUNK - 1, 2 * native.CHUNK + 17]
ARRAYS = ("gradient", "accepted_gradient", *STATE, "out", "sums", "nonfinite")
WRITTEN = {
    Pass.NORM: (),
    Pass.SPECULATE: ("out",),
    Pass.COMMIT: STATE,
    Pass.COMMIT_AND_SPECULATE: (*STATE, "out"),
    Pass.UPDATE: (*STATE, "out"),
}
FILL = 0x3C  # such bytes are a small positive number in every dtype
NAN = 0xFF  # and such ones NaN
EACH_END = pytest.mark.parametrize("at_end", [True, False], ids=["ending at a guard", "beginning at a guard"])


_libc = ctypes.CDLL(None, use_errno=True)
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_NO_ACCESS = 0  # PROT_NONE


class GuardedMemory:
    """At least `size` bytes that can be made read-only, with an inaccessible page on either side.

    The first byte before or after it ends the process with SIGSEGV.
    """

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


def coefficient_table() -> np.ndarray:
    table = np.full(1, 0.5, native.COEFFICIENTS)
    table["flags"] = sum(Flag)  # every part of the formula
    return table


class Guards:
    """One guarded memory for each array of a segment."""

    def __init__(self) -> None:
        self._memories = {name: GuardedMemory(8 * max(LENGTHS)) for name in ARRAYS}

    def prepare(self, which: Pass, fill: int = FILL) -> None:
        for name, memory in self._memories.items():
            memory.set_read_only(False)
            memory.fill(fill)
            memory.set_read_only(name not in (*WRITTEN[which], "sums", "nonfinite"))

    def table(self, length: int, gradient: Dtype, out: Dtype, *, norm: bool, at_end: bool) -> np.ndarray:
        real = 8 if gradient is Dtype.FLOAT64 else 4
        sizes = {"gradient": np.dtype(STORAGE[gradient]).itemsize * length}
        sizes["accepted_gradient"] = sizes["gradient"]
        sizes |= dict.fromkeys(STATE, real * length)
        if out is not Dtype.NONE:
            sizes["out"] = np.dtype(STORAGE[out]).itemsize * length
        if norm:
            sizes["sums"] = sizes["nonfinite"] = 8 * native.chunk_count(length)
        table = np.zeros(1, native.SEGMENT)
        for name, size in sizes.items():
            table[name] = self._memories[name].address(size, at_end=at_end)
        table["length"], table["gradient_dtype"], table["out_dtype"] = length, gradient, out
        return table


def combinations(which: Pass) -> Iterator[tuple[Dtype, Dtype, bool]]:
    norms = [True] if which is Pass.NORM else [False, True]
    return ((gradient, out, norm) for gradient, out in variants(which) for norm in norms)


@EACH_END
@pytest.mark.parametrize(("which", "fill"), [*((which, FILL) for which in Pass), (Pass.NORM, NAN)])
def test_no_byte_outside_is_touched(isa, which, fill, at_end):
    """Chunks that have NaN are read a second time, to count them."""

    def work():
        guards = Guards()
        guards.prepare(which, fill)
        for gradient, out, norm in combinations(which):
            for length in LENGTHS:
                table = guards.table(length, gradient, out, norm=norm, at_end=at_end)
                native.run(which, table, coefficient_table(), isa=isa, threads=1)

    assert exit_code_of_child(work) == 0


@pytest.mark.parametrize(
    ("which", "prepared", "name", "change", "at_end"),
    [
        pytest.param(Pass.NORM, Pass.NORM, "length", 1, True, id="read beyond the end"),
        pytest.param(Pass.NORM, Pass.NORM, "gradient", -1, False, id="read before the beginning"),
        pytest.param(Pass.UPDATE, Pass.SPECULATE, "length", 0, True, id="write to a read-only array"),
    ],
)
def test_the_guards_catch(which, prepared, name, change, at_end):
    def work():
        faulthandler.disable()  # this crash is wanted: no report, no core file
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        guards = Guards()
        guards.prepare(prepared)
        out = Dtype.NONE if which is Pass.NORM else Dtype.BFLOAT16
        table = guards.table(33, Dtype.BFLOAT16, out, norm=which is Pass.NORM, at_end=at_end)
        table[name] = int(table[name][0]) + change
        native.run(which, table, coefficient_table(), isa="scalar", threads=1)

    assert exit_code_of_child(work) == -signal.SIGSEGV
