"""A clock for tests of what times actions."""

from __future__ import annotations

from collections.abc import Callable, Iterator


class Clock:
    """A clock that only the actions move, and a log of who ran."""

    def __init__(self) -> None:
        self.now = 0.0
        self.log: list[str] = []

    def __call__(self) -> float:
        return self.now

    def action(self, name: str, durations: Iterator[float]) -> Callable[[], None]:
        def run() -> None:
            self.log.append(name)
            self.now += next(durations)

        return run
