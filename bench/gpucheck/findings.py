"""What a stage of the check says, and how long it may take.

Owns these records. It knows no stage.
"""

from __future__ import annotations

import enum
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gpucheck.programs import Done, Runner


class Outcome(enum.Enum):
    """How a stage went; the words are those of the report."""

    GOOD = "good"
    FAILED = "failed"
    SHORTENED = "shortened"
    """Its time was over before everything was done; what was done is good."""
    LEFT_OUT = "left out"
    """There was no time, or something that it needs is not installed; the detail says which."""


@dataclass(frozen=True, slots=True)
class Finding:
    """What a stage found, so far or in the end.

    Attributes:
        outcome: how it went.
        detail: a sentence for people.
        figures: what was measured, under names that end in their units; plain values, or records of them.
        seconds: how long it took.
    """

    outcome: Outcome
    detail: str
    figures: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Limit:
    """A moment at which a stage has to be over.

    Attributes:
        end: seconds of `time.monotonic()`.
    """

    end: float

    @property
    def left(self) -> float:
        """Seconds until then, 0 afterwards."""
        return max(0.0, self.end - time.monotonic())


@dataclass(frozen=True, slots=True)
class Context:
    """What every stage is told.

    Attributes:
        runner: starts other programs.
        device: "cuda", or "cpu" in a rehearsal.
        rehearses: whether everything is tiny and nothing of it means anything.
        trace: path of the trace that the verified run leaves.
    """

    runner: Runner
    device: str
    rehearses: bool
    trace: str

    def run(self, command: Sequence[str], seconds: float, environment: Mapping[str, str] | None = None) -> Done:
        """Run one program."""
        (done,) = self.runner([command], seconds, environment or {})
        return done
