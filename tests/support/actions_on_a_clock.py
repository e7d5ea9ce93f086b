"""A clock for tests of what times actions, or sleeps."""

from collections.abc import Callable, Iterator


class Clock:
    """A clock that only actions and sleepers move, and logs of who ran, and who slept for how long."""

    def __init__(self) -> None:
        self.now = 100.0
        self.log: list[str] = []
        self.slept: list[float] = []

    def __call__(self) -> float:
        return self.now

    def action(self, name: str, durations: Iterator[float]) -> Callable[[], None]:
        def run() -> None:
            self.log.append(name)
            self.now += next(durations)

        return run

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds
