"""One line of the doctor's report.

Owns its shape. It knows nothing of how a finding comes about or is shown.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field


class Status(enum.Enum):
    """How a thing stands; the words are those of the report."""

    OK = "ok"
    BETTER = "could be better"
    BROKEN = "broken"
    UNKNOWN = "unknown"
    """The probe could not tell; the finding says why."""


@dataclass(frozen=True, slots=True)
class Finding:
    """What a probe found.

    Attributes:
        name: what was looked at.
        status: how it stands.
        detail: what was found, in a few words.
        remedy: the command or setting that mends it; empty when nothing is to be mended.
        values: the same as numbers and words for programs, JSON types only.
    """

    name: str
    status: Status
    detail: str
    remedy: str = ""
    values: Mapping[str, object] = field(default_factory=dict)
