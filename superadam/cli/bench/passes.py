"""The passes of the kernels against the floor of their traffic.

Each row compares `superadam.kernels.native.run` with `superadam.kernels.native.move_like` over the same arrays.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass

from superadam.cli.bench import floor
from superadam.cli.bench.arrays import PassArrays
from superadam.cli.bench.floor import Variant
from superadam.cli.bench.pairs import Action, Comparison, compare
from superadam.cli.traffic import PLAIN, bytes_per_element
from superadam.kernels import native
from superadam.kernels.native import Dtype, Pass
from superadam.state.storage import Storage

PASSES = (
    (Pass.NORM, True),
    (Pass.SPECULATE, False),
    (Pass.SPECULATE, True),
    (Pass.COMMIT, False),
    (Pass.COMMIT_AND_SPECULATE, False),
    (Pass.COMMIT_AND_SPECULATE, True),
    (Pass.UPDATE, False),
    (Pass.UPDATE, True),
)
"""What is measured, each without or with the norm; `commit` never needs one, its gradient was summed before."""


DTYPES = (Dtype.BFLOAT16, Dtype.BFLOAT16)
"""Of gradients and of the working copy."""


@dataclass(frozen=True, slots=True)
class Setting:
    """Where a pass runs, with `threads` at most, and over which state."""

    isa: str
    threads: int
    storage: Storage = PLAIN


@dataclass(frozen=True, slots=True)
class PassResult:
    """One row: a pass, with or without the norm, in a setting.

    Attributes:
        bytes_per_element: what it loads and stores.
        floor: the fastest way to move the same memory.
        comparison: the pass against that.
    """

    which: Pass
    with_norm: bool
    setting: Setting
    numel: int
    bytes_per_element: float
    floor: Variant
    comparison: Comparison

    @property
    def name(self) -> str:
        """The pass in words, as tables show it."""
        name = self.which.name.lower().replace("_and_", "+")
        return f"{name}, norm" if self.with_norm and self.which is not Pass.NORM else name

    @property
    def bytes_per_second(self) -> float:
        """What the pass moved, by its median time."""
        return self.numel * self.bytes_per_element / self.comparison.seconds.median


def action(arrays: PassArrays, which: Pass, setting: Setting, *, with_norm: bool) -> Action:
    """Return an action that runs a pass over these arrays once."""
    return functools.partial(
        native.run,
        which,
        arrays.segments(with_norm=with_norm),
        arrays.coefficients,
        isa=setting.isa,
        threads=setting.threads,
    )


def measure(numel: int, setting: Setting, pairs: int) -> Iterator[PassResult]:
    """Yield one row for each pass as it is measured, over this many pairs of runs.

    `numel` is rounded up to whole chunks.
    """
    arrays = PassArrays(native.chunk_count(numel) * native.CHUNK, *DTYPES, setting.storage.format)
    floors: dict[Pass, Variant] = {}
    for which, with_norm in PASSES:
        kernel = action(arrays, which, setting, with_norm=with_norm)
        if which not in floors:
            floors[which] = floor.find_floor(arrays, which, setting.threads, kernel)
        yield PassResult(
            which,
            with_norm,
            setting,
            arrays.numel,
            bytes_per_element(which, *DTYPES, setting.storage),
            floors[which],
            compare(kernel, floor.action(arrays, which, floors[which], setting.threads), pairs),
        )
