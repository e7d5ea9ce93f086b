"""Whether the bounds of the project hold, by what was measured.

Owns the bounds, and what is hidden. A bound that is missed is a result, and no failure of the check.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from gpucheck.rows import MEASURED, Row
from gpucheck.sides import ALONE, AUTO, ON_DEVICE, OVERLAPPED, SWEPT

ASKED_RATIO = 1.5
"""Of backward's time to the CPU's Adam time, from which on bounds are asked for."""

LEAST_HIDDEN_SHARE = 0.9

LEAST_RATE = 0.9
"""Tokens per second, of those with everything on the GPU."""

MOST_TIME = 1.1
"""Of a step as "auto" places it, by one of the best placement."""


class Answer(enum.Enum):
    """Whether a bound holds; the words are those of the report."""

    MET = "met"
    MISSED = "MISSED"
    NOT_ASKED = "not asked"
    """Backward is too short for it."""
    UNKNOWN = "unknown"
    """Something that it takes was not measured; the detail says what."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """One bound for one model and batch size.

    Attributes:
        workload: model, batch and sequence length.
        bound: in words.
        answer: whether it holds.
        detail: the figures, or what is missing.
    """

    workload: tuple[str, int, int]
    bound: str
    answer: Answer
    detail: str


def with_hidden_shares(rows: Sequence[Row]) -> list[Row]:
    """Return the rows, overlapped ones with the share of the Adam time that they do not add to forward and backward.

    That is the time of the CPU's passes alone, without any copy. No step without overlap is compared with, because a
    plain step's copies are pageable, and every one of them that overlap makes faster would count as hidden.
    """
    alone = {row.workload: row for row in rows if row.side == ALONE}

    def completed(row: Row) -> Row:
        reference = alone.get(row.workload)
        if row.side not in (OVERLAPPED, *SWEPT) or row.step_seconds is None or reference is None:
            return row
        if reference.step_seconds is None or not reference.adam_seconds:
            return row
        shown = (row.step_seconds - reference.step_seconds) / reference.adam_seconds
        return dataclasses.replace(row, hidden_share=1.0 - shown)

    return [completed(row) for row in rows]


def verdicts(rows: Sequence[Row]) -> Iterator[Verdict]:
    """Return three verdicts for each workload, of rows that have their hidden shares; the third only where swept."""
    for workload in dict.fromkeys(row.workload for row in rows):
        sides = {row.side: row for row in rows if row.workload == workload}
        yield Verdict(workload, f"at least {LEAST_HIDDEN_SHARE:.0%} of Adam hidden", *_hidden(sides))
        yield Verdict(workload, f"at most {1 - LEAST_RATE:.0%} below {ON_DEVICE}", *_rate(sides))
        if AUTO in sides:
            yield Verdict(workload, f"auto within {MOST_TIME - 1:.0%} of the best placement", *_placed(sides))


def _missing(sides: dict[str, Row], *names: str) -> str:
    """Return in words which of these sides were not measured."""
    words = (
        f"{name}: {sides[name].outcome if name in sides else 'not measured yet'}"
        for name in names
        if name not in sides or sides[name].outcome != MEASURED
    )
    return ", ".join(words)


def _hidden(sides: dict[str, Row]) -> tuple[Answer, str]:
    missing = _missing(sides, ALONE, OVERLAPPED)
    if missing:
        return Answer.UNKNOWN, missing
    share = sides[OVERLAPPED].hidden_share
    words = f"{share:.0%}; {_ratio_words(sides)}"
    return _answer(sides, share is not None and share >= LEAST_HIDDEN_SHARE), words


def _rate(sides: dict[str, Row]) -> tuple[Answer, str]:
    missing = _missing(sides, ALONE, OVERLAPPED, ON_DEVICE)
    if missing:
        return Answer.UNKNOWN, missing
    mine, other = sides[OVERLAPPED].tokens_per_second, sides[ON_DEVICE].tokens_per_second
    assert mine is not None
    assert other is not None
    return _answer(sides, mine >= LEAST_RATE * other), f"{mine / other - 1:+.1%}; {_ratio_words(sides)}"


def _placed(sides: dict[str, Row]) -> tuple[Answer, str]:
    times = {name: sides[name].step_seconds for name in SWEPT if not _missing(sides, name)}
    if AUTO not in times or len(times) == 1:
        return Answer.UNKNOWN, _missing(sides, *SWEPT)
    best = min(times, key=lambda name: times[name] or 0.0)
    ratio = (times[AUTO] or 0.0) / (times[best] or 1.0)
    words = f"{ratio:.2f} of the best of {len(times)}, {best}"
    return Answer.MET if ratio <= MOST_TIME else Answer.MISSED, words


def _backward_ratio(sides: dict[str, Row]) -> float:
    alone = sides[ALONE]
    assert alone.backward_seconds is not None
    assert alone.adam_seconds is not None
    return alone.backward_seconds / alone.adam_seconds


def _ratio_words(sides: dict[str, Row]) -> str:
    return f"backward is {_backward_ratio(sides):.2f} x Adam"


def _answer(sides: dict[str, Row], holds: bool) -> Answer:
    """Return the answer; a bound that holds although it was not asked for is not asked for, all the same."""
    if _backward_ratio(sides) < ASKED_RATIO:
        return Answer.NOT_ASKED
    return Answer.MET if holds else Answer.MISSED
