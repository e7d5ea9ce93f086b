"""One line of the doctor's report, independent of how it is found and shown."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field


class Status(enum.Enum):
    """The state of what was probed, in the words of the report."""

    OK = "ok"
    BETTER = "could be better"
    BROKEN = "broken"
    UNKNOWN = "unknown"
    """The probe could not find out; the finding says why."""


@dataclass(frozen=True, slots=True)
class Finding:
    """What a probe found.

    Attributes:
        detail: what was found, in a few words.
        remedy: the command or setting that fixes it; empty when nothing has to be fixed.
        values: the same as numbers and words for programs, JSON types only.
        fault: BROKEN or UNKNOWN; None where the remedy tells the status.
    """

    detail: str
    remedy: str = ""
    values: Mapping[str, object] = field(default_factory=dict)
    fault: Status | None = None

    @property
    def status(self) -> Status:
        """Better where there is a remedy, and else ok, unless it is a fault."""
        return self.fault or (Status.BETTER if self.remedy else Status.OK)
