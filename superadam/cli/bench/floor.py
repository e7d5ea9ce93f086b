"""The floor of a pass: its loads and stores without the arithmetic, by the variant that is the fastest in this run."""

from __future__ import annotations

import functools
from dataclasses import asdict, dataclass

from superadam.cli.bench.arrays import ALIGNMENT, PassArrays
from superadam.cli.bench.pairs import Action, fastest
from superadam.cli.traffic import OUT_WRITERS, STATE_WRITERS
from superadam.kernels import native
from superadam.kernels.native import Dtype, Format, Pass

ROUNDS = 5
"""Times that each variant runs when the fastest is looked for."""


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to move the memory of a pass.

    Attributes:
        burst: elements of one array that are touched before the next array is; kernels touch 16.
        prefetch: distance of the software prefetch in bytes, 0 for none.
        stream_out, stream_state: whether the working copy, or the state, is written past the caches.
    """

    burst: int
    prefetch: int
    stream_out: bool = False
    stream_state: bool = False


BURSTS = (32, 128)
PREFETCHES = (0, 1 << 10, 2 << 10, 4 << 10)


def variants(which: Pass, out_dtype: Dtype, format: Format) -> list[Variant]:
    """Return the variants that differ for a pass: one that stores nothing has none with stores past the caches.

    A burst is at least a line of each array.
    """
    has_bytes = bool(format & (Format.MOMENTS_8BIT | Format.MASTER_24BIT))
    bursts = [max(burst, ALIGNMENT) if has_bytes else burst for burst in BURSTS]
    writes_out = which in OUT_WRITERS and out_dtype is not Dtype.NONE
    streams = [(False, False)]
    if writes_out:
        streams.append((True, False))
    if which in STATE_WRITERS:
        streams.append((writes_out, True))
    return [Variant(burst, prefetch, *stream) for burst in bursts for prefetch in PREFETCHES for stream in streams]


def action(arrays: PassArrays, which: Pass, variant: Variant, threads: int) -> Action:
    """Return an action that moves the memory of a pass over these arrays once; only the working copy changes."""
    segments = arrays.segments(with_norm=False)
    return functools.partial(native.move_like, which, segments, threads=threads, **asdict(variant))


def find_floor(arrays: PassArrays, which: Pass, threads: int, before: Action, rounds: int = ROUNDS) -> Variant:
    """Return the fastest variant for a pass over these arrays, now.

    `threads` is a maximum; `before`, the pass itself, runs between the variants as it will in the comparison; `rounds`
    is the number of timed runs of each variant.
    """
    candidates = variants(which, arrays.out_dtype, arrays.format)
    return candidates[fastest([action(arrays, which, variant, threads) for variant in candidates], rounds, before)]
