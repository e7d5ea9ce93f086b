"""Trace of the scheduler: spans of the last steps, written as a Chrome trace (chrome://tracing, ui.perfetto.dev).

Recording takes no lock that an interrupt could leave taken.
"""

from __future__ import annotations

import collections
import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from superadam.host.files import replace_file

SPANS_KEPT = 100_000  # beyond which the oldest are dropped: about 35 MB
TRACKS = ("training", "worker", "download", "upload", "model")  # from top to bottom


class Span(NamedTuple):
    """One piece of work, in seconds of `time.perf_counter()`; `details` are shown when the span is clicked."""

    name: str
    track: str
    begin: float
    end: float
    details: dict[str, Any] = {}  # noqa: RUF012 none writes to it


class Trace:
    """Spans in the order in which they ended; any thread may add to it and look at it.

    Attributes:
        add: records a span.
    """

    def __init__(self) -> None:
        self._spans: collections.deque[Span] = collections.deque(maxlen=SPANS_KEPT)
        self.add: Callable[[Span], None] = self._spans.append

    @property
    def spans(self) -> list[Span]:
        """A copy of what there is now."""
        return list(self._spans)

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write everything recorded so far as Chrome trace JSON; the file is replaced whole or not at all."""
        spans = self.spans
        zero = min((span.begin for span in spans), default=0.0)
        events: list[dict[str, Any]] = [
            {"ph": "M", "pid": 0, "tid": row, "name": "thread_name", "args": {"name": track}}
            for row, track in enumerate(TRACKS)
        ]
        events += [
            {
                "ph": "X",
                "pid": 0,
                "tid": TRACKS.index(span.track),
                "name": span.name,
                "ts": (span.begin - zero) * 1e6,
                "dur": (span.end - span.begin) * 1e6,
                "args": {key: _readable(value) for key, value in span.details.items()},
            }
            for span in spans
        ]
        text = json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}, allow_nan=False)
        replace_file(Path(path), lambda file: file.write(text.encode()))


def _readable(value: Any) -> Any:
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
