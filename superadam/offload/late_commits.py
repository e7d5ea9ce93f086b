"""Whether new values that had to wait for the verdict come before their state: what took less time is done.

An update reads and writes the state, while a new value only needs it read. The state then follows in the worker's idle
time; where the worker has none, the next step waits for it.
"""

from __future__ import annotations

import collections
import statistics

SETTLING_STEPS = 2  # after a change, which bear work of the steps before it
TRIED_STEPS = 3  # of each choice, whose times are compared
TRUSTED_STEPS, MOST_TRUSTED = 64, 1024  # with the better choice, before the other is tried again; it may cost time
LEAST_SHARE = 0.25  # of the elements of a step must have waited, or its time says little of them
LEAST_GAIN = 0.05  # of the time, for commits to be late


class LateCommits:
    """Chooses for each step from the times of the last ones.

    Attributes:
        is_on: the choice for the next step.
    """

    is_on = False

    def __init__(self) -> None:
        self._seconds = {choice: collections.deque[float](maxlen=TRIED_STEPS) for choice in (False, True)}
        self._steps = 0  # with this choice in a row
        self._trusted = TRUSTED_STEPS  # doubled whenever a choice is confirmed

    def add_step(self, computed: int, elements: int, seconds: float) -> None:
        """Learn from a step.

        Args:
            computed: its elements, at least one, whose new values were computed after backward.
            elements: all of its elements.
            seconds: from the end of backward to that of the step.
        """
        if computed < LEAST_SHARE * elements:
            return
        self._steps += 1
        self._seconds[self.is_on].append(seconds / computed)
        if self._steps >= SETTLING_STEPS + TRIED_STEPS:
            self._choose()

    def _choose(self) -> None:
        choice = not self.is_on
        if self._seconds[choice] and self._steps < self._trusted:
            choice = self._median(True) < (1.0 - LEAST_GAIN) * self._median(False)
        elif self._seconds[choice]:
            self._trusted = min(MOST_TRUSTED, 2 * self._trusted)
        if choice != self.is_on:
            self.is_on, self._steps = choice, 0

    def _median(self, choice: bool) -> float:
        return statistics.median(self._seconds[choice])
