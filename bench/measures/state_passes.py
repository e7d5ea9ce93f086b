"""Time of passes over state in each format, against the same pass over fp32 state, and where a format is faster.

A pass takes the longer of two times: that of its arithmetic, measured over arrays that stay in a core's second cache,
and that of its bytes at the rate at which memory reaches a core. From both follows the rate below which a format is
faster.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from superadam.cli.bench.arrays import PassArrays
from superadam.cli.bench.pairs import Action, Comparison, compare
from superadam.kernels import native
from superadam.kernels.native import Dtype, Format, Pass
from superadam.kernels.traffic import bytes_per_element

PASSES = (Pass.SPECULATE, Pass.COMMIT, Pass.COMMIT_AND_SPECULATE, Pass.UPDATE)

FORMATS = {
    "fp32": Format.PLAIN,
    "bf16": Format.MOMENTS_BFLOAT16,
    "8bit": Format.MOMENTS_8BIT,
    "24bit": Format.MASTER_24BIT,
    "bf16+24bit": Format.MOMENTS_BFLOAT16 | Format.MASTER_24BIT,
    "8bit+24bit": Format.MOMENTS_8BIT | Format.MASTER_24BIT,
}
"""Moments and master by name; the first is what the others are compared with."""

_CACHED = 2 * native.CHUNK
"""Elements whose arrays fit into a core's second cache."""

_REPEATED = 64
"""Segments of a job over these elements: so long that its begin and end do not count."""


@dataclass(frozen=True, slots=True)
class FormatPass:
    """One row: a pass over state in a format.

    Attributes:
        bytes_per_element: what it loads and stores, a bf16 gradient and a bf16 working copy included.
        comparison: its time against that of the pass over fp32 state, over as many elements.
    """

    which: Pass
    format: str
    threads: int
    numel: int
    bytes_per_element: float
    comparison: Comparison


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """What a pass takes on one core where memory does not limit it.

    Attributes:
        seconds_per_element: the shortest of many measurements.
        bytes_per_element: as of `FormatPass`.
        limit: bytes per second and core below which it takes as long as its bytes.
        crossing: below which it is faster than over fp32 state; infinite where it is faster anyway.
        ratio: of its bytes to those of fp32 state: of the times below `limit`.
    """

    which: Pass
    format: str
    seconds_per_element: float
    bytes_per_element: float
    limit: float
    crossing: float
    ratio: float


def arrays_of(numel: int, name: str) -> PassArrays:
    """Return the arrays of a pass with a bf16 gradient and working copy, and state in a format."""
    return PassArrays(numel, Dtype.BFLOAT16, Dtype.BFLOAT16, FORMATS[name])


def pass_bytes(which: Pass, name: str) -> float:
    """Return what a pass loads and stores for one element of these."""
    return bytes_per_element(which, Dtype.BFLOAT16, Dtype.BFLOAT16, FORMATS[name])


def action(arrays: PassArrays, which: Pass, threads: int) -> Action:
    """Return an action that runs a pass over these arrays once."""
    table = arrays.segments(with_norm=False)
    return functools.partial(native.run, which, table, arrays.coefficients, threads=threads)


def measure(
    numel: int,
    threads: Sequence[int],
    formats: Sequence[str],
    pairs: int,
    *,
    clock: Callable[[], float] = time.perf_counter,
) -> Iterator[FormatPass]:
    """Yield one row for each format, number of threads and pass, over this many pairs; `numel` becomes whole chunks."""
    numel = native.chunk_count(numel) * native.CHUNK
    plain = arrays_of(numel, "fp32")
    for name in formats:
        arrays = arrays_of(numel, name)
        for count in threads:
            for which in PASSES:
                found = compare(action(arrays, which, count), action(plain, which, count), pairs, clock=clock)
                yield FormatPass(which, name, count, numel, pass_bytes(which, name), found)


def arithmetic(formats: Sequence[str], rounds: int) -> list[Arithmetic]:
    """Return a row for each pass and format, measured in interleaved rounds on one thread.

    The shortest of the rounds counts, because what other processes add says nothing about the pass.
    """
    names = list(dict.fromkeys(["fp32", *formats]))
    keys = [(which, name) for which in PASSES for name in names]
    arrays = {name: arrays_of(_CACHED, name) for name in names}
    seconds = dict.fromkeys(keys, float("inf"))
    for turn in range(rounds + 1):
        for which, name in keys if turn % 2 else reversed(keys):
            table = np.repeat(arrays[name].segments(with_norm=False), _REPEATED)  # one thread: one after the other
            native.run(which, table[:1], arrays[name].coefficients, threads=1)
            began = time.perf_counter()
            native.run(which, table, arrays[name].coefficients, threads=1)
            taken = time.perf_counter() - began
            seconds[which, name] = min(seconds[which, name], taken / (_CACHED * _REPEATED))
    return [_judged(which, name, seconds[which, name], seconds[which, "fp32"]) for which, name in keys]


def _judged(which: Pass, name: str, seconds: float, plain_seconds: float) -> Arithmetic:
    """Return a row: with memory at a rate r, fp32 takes max(plain_seconds, its bytes / r), the format likewise."""
    narrow, plain = pass_bytes(which, name), pass_bytes(which, "fp32")
    crossing = float("inf") if seconds <= plain_seconds else plain / seconds
    return Arithmetic(which, name, seconds, narrow, narrow / seconds, crossing, narrow / plain)
