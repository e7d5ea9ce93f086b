"""The results of `bench/compare.py`, as one table for people and as JSON for programs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from rich.table import Table

import superadam
from measures.contests import ContestResult
from measures.overlap import OverlapResult
from superadam.cli.bench import report
from superadam.cli.bench.passes import PassResult


@dataclass
class Results:
    """What was measured so far."""

    passes: list[PassResult] = field(default_factory=list)
    contests: list[ContestResult] = field(default_factory=list)
    overlap: list[OverlapResult] = field(default_factory=list)


def to_json(environment: report.Environment, results: Results) -> dict[str, Any]:
    """Return everything as plain values: seconds, bytes, elements and ratios."""
    return {
        "environment": report.plain(environment),
        "passes": [report.pass_as_json(row) for row in results.passes],
        "contests": [
            {
                "name": row.contest.name,
                "ours": row.contest.ours,
                "torch": row.contest.theirs,
                "threads": row.threads,
                "tensors": row.contest.tensors,
                "numel": row.contest.numel,
                **report.comparison_as_json(row.comparison),
            }
            for row in results.contests
        ],
        "overlap": [
            {name: value for name, value in report.plain(row).items() if name != "comparison"}
            | report.comparison_as_json(row.comparison)
            for row in results.overlap
        ],
    }


def to_table(results: Results) -> Table:
    """Return the one table: passes over the floor, steps over torch's, iterations over plain ones."""
    table = report.new_table()
    report.add_passes(table, results.passes)
    for contest in results.contests:
        if contest is results.contests[0]:
            _add_section(table, contest.threads, "steps over torch's")
        report.add_row(table, contest.contest.name, contest.comparison)
    for overlap in results.overlap:
        _add_section(table, overlap.threads, "iterations over plain ones")
        report.add_row(table, "overlapped", overlap.comparison)
    return table


def _add_section(table: Table, threads: int, words: str) -> None:
    report.add_section(table, f"{superadam.active_isa()}, {threads} thr.: {words}")


def notes(results: Results, pairs: int) -> list[str]:
    """Return what a reader of the table needs: sizes, what a ratio is against, and what each side of a contest did."""
    sides: dict[tuple[str, str], list[str]] = {}
    for result in results.contests:
        sides.setdefault((result.contest.ours, result.contest.theirs), []).append(result.contest.name)
    return [
        *report.notes(results.passes),
        *(f"{'; '.join(names)}: {ours}, against {theirs}." for (ours, theirs), names in sides.items()),
        *(
            f"overlapped: forward, backward and step of {report.in_words(row.parameters)} fp32 parameters on the CPU, "
            f"{row.tokens:,} tokens, {row.buckets:g} buckets, through OffloadScheduler; taking the gradients cost the "
            f"training thread {1e6 * row.hook_seconds:.0f} us; {row.hidden_share:.0%} of the optimizer's time was "
            "hidden."
            for row in results.overlap
        ),
        report.about_ratios(pairs),
    ]
