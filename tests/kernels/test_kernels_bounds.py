"""No kernel touches one byte outside its arrays, at any length; and none writes to an array that its pass only reads.

Every array of a segment ends, or begins, exactly at an inaccessible page; arrays that a pass only reads are read-only.
The kernels run in a forked child, so that a violation is an exit code. (test_kernels_bits.py has canaries around arrays
at every byte offset.)
"""

import ctypes
import faulthandler
import itertools
import mmap
import resource
import signal

import numpy as np
import pytest
from support.children import exit_code_of_child, in_child
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

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_NO_ACCESS = 0  # PROT_NONE


def protect(address: int, size: int, protection: int) -> None:
    if _libc.mprotect(address, size, protection) != 0:
        raise OSError(ctypes.get_errno(), "mprotect failed")


def coefficient_table() -> np.ndarray:
    table = np.full(1, 0.5, native.COEFFICIENTS)
    table["flags"] = sum(Flag)  # every part of the formula
    return table


class Guards:
    """Memory for each array of a segment, which is read-only if the pass only reads it, between two inaccessible pages.

    The first byte before or after it ends the process with SIGSEGV.
    """

    def __init__(self, which: Pass, fill: int = FILL) -> None:
        page = mmap.PAGESIZE
        self._size = -(-8 * max(LENGTHS) // page) * page
        self._memories = {name: mmap.mmap(-1, self._size + 2 * page) for name in ARRAYS}
        self._begins = {}
        for name, memory in self._memories.items():
            begin = self._begins[name] = ctypes.addressof(ctypes.c_char.from_buffer(memory)) + page
            ctypes.memset(begin, fill, self._size)
            for outside in (begin - page, begin + self._size):
                protect(outside, page, _NO_ACCESS)
            if name not in (*WRITTEN[which], "sums", "nonfinite"):
                protect(begin, self._size, mmap.PROT_READ)

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
            table[name] = self._begins[name] + (self._size - size if at_end else 0)
        table["length"], table["gradient_dtype"], table["out_dtype"] = length, gradient, out
        return table


@pytest.mark.parametrize("at_end", [True, False], ids=["ending at a guard", "beginning at a guard"])
@pytest.mark.parametrize(("which", "fill"), [*((which, FILL) for which in Pass), (Pass.NORM, NAN)])
@in_child
def test_no_byte_outside_is_touched(isa, which, fill, at_end):
    """Chunks that have NaN are read a second time, to count them."""
    guards = Guards(which, fill)
    for (gradient, out), norm, length in itertools.product(variants(which), {True, which is Pass.NORM}, LENGTHS):
        table = guards.table(length, gradient, out, norm=norm, at_end=at_end)
        native.run(which, table, coefficient_table(), isa=isa, threads=1)


@pytest.mark.parametrize("at_end", [True, False], ids=["ending at a guard", "beginning at a guard"])
@in_child
def test_no_byte_outside_is_compared_or_copied(at_end):
    guards = Guards(Pass.SPECULATE)
    for out, length in itertools.product((Dtype.BFLOAT16, Dtype.FLOAT16), LENGTHS):
        table = guards.table(length, out, out, norm=False, at_end=at_end)
        for everything in (False, True):
            native.differing(table, np.zeros(1, np.int64), everything=everything)
        native.copy(table["out"].copy(), table["gradient"].copy(), 2 * table["length"])


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
        guards = Guards(prepared)
        out = Dtype.NONE if which is Pass.NORM else Dtype.BFLOAT16
        table = guards.table(33, Dtype.BFLOAT16, out, norm=which is Pass.NORM, at_end=at_end)
        table[name] = int(table[name][0]) + change
        native.run(which, table, coefficient_table(), isa="scalar", threads=1)

    assert exit_code_of_child(work) == -signal.SIGSEGV
