"""Paired timing of two actions, warmed and run alike: interleaved, so that ratios survive a machine that drifts."""

from __future__ import annotations

import gc
import math
import time
import timeit
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

Action = Callable[[], object]
"""What is timed: it does the whole work once, and may be done again and again."""

WARM_UPS = 2
"""Untimed runs of each action: the first touches memory and starts threads, the second finds all that done."""


@dataclass(frozen=True, slots=True)
class Spread:
    """Median and quartiles of some measurements."""

    median: float
    lower: float
    upper: float

    @staticmethod
    def of(values: Sequence[float]) -> Spread:
        """Return the spread of at least one value; quartiles interpolate linearly and lie within the values."""
        lower, median, upper = np.quantile(values, (0.25, 0.5, 0.75)).tolist()
        return Spread(median, lower, upper)


@dataclass(frozen=True, slots=True)
class Comparison:
    """Result of timing one action against another.

    Attributes:
        pairs: number of runs of each.
        ratio: time of the one over that of the other in the same pair; below 1 where the one is faster.
        seconds, against_seconds: of a run of each.
    """

    pairs: int
    ratio: Spread
    seconds: Spread
    against_seconds: Spread


def compare(
    first: Action,
    second: Action,
    pairs: int,
    *,
    before: tuple[Action, Action] = (bool, bool),  # which do nothing
    clock: Callable[[], float] = time.perf_counter,
) -> Comparison:
    """Time two actions in `pairs` pairs: first-second, second-first, first-second, ...

    The order alternates, so that neither always finds the caches as the other left them. `before` has what runs untimed
    before every run of each.
    """
    actions = (first, second)
    seconds: tuple[list[float], list[float]] = ([], [])
    for _ in range(WARM_UPS):
        for prepare, action in zip(before, actions, strict=True):
            prepare()
            action()
    was_collecting = gc.isenabled()
    gc.disable()
    try:
        for pair in range(pairs):
            for index in (0, 1) if pair % 2 == 0 else (1, 0):
                before[index]()
                start = clock()
                actions[index]()
                seconds[index].append(clock() - start)
    finally:
        if was_collecting:
            gc.enable()
    ratios = [first / other for first, other in zip(*seconds, strict=True)]
    return Comparison(pairs, Spread.of(ratios), Spread.of(seconds[0]), Spread.of(seconds[1]))


def times_of(action: Action, runs: int) -> list[float]:
    """Return the seconds of each of some runs without the garbage collector, after untimed ones."""
    return timeit.repeat(action, repeat=WARM_UPS + runs, number=1)[WARM_UPS:]


def fastest(
    actions: Sequence[Action], rounds: int, before: Action, *, clock: Callable[[], float] = time.perf_counter
) -> int:
    """Return the index of the action with the shortest run over interleaved rounds; each is warmed once.

    The shortest and not the median, because what other processes add to a run says nothing about the action. `before`
    runs untimed before every timed run: it is what the winner will be compared with, so that the candidates find the
    caches as they will find them there.
    """
    shortest = [math.inf] * len(actions)
    for action in actions:
        action()
    for turn in range(rounds):
        order = range(len(actions)) if turn % 2 == 0 else reversed(range(len(actions)))
        for index in order:
            before()
            start = clock()
            actions[index]()
            shortest[index] = min(shortest[index], clock() - start)
    return shortest.index(min(shortest))
