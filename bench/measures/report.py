"""The results of `bench/compare.py`, as one table for people and as JSON for programs."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.table import Table

from measures.contests import Contest, ContestResult
from measures.peers import LeftOut, Peer, versions
from superadam.cli.bench import report


@dataclass
class Results:
    """What was measured so far, of which peers, and what was not."""

    contests: list[ContestResult] = field(default_factory=list)
    peers: Sequence[Peer] = ()
    left_out: list[LeftOut] = field(default_factory=list)


def to_json(environment: Mapping[str, Any], results: Results) -> dict[str, Any]:
    """Return everything as plain values: seconds, bytes, elements and ratios."""
    return {
        "environment": environment,
        "packages": versions(results.peers),
        "openmp": {name: value for name, value in sorted(os.environ.items()) if name.startswith(("OMP_", "GOMP_"))},
        "left_out": [asdict(each) for each in results.left_out],
        "contests": [
            {
                "task": row.contest.task.value,
                "against": row.contest.against,
                "moments": row.contest.moments,
                "threads": row.contest.threads,
                "tensors": row.contest.tensors,
                "numel": row.contest.numel,
                **asdict(row.comparison),
            }
            for row in results.contests
        ],
    }


def to_text(content: dict[str, Any]) -> str:
    """Return JSON with a line for each row."""
    parts = []
    for name, value in content.items():
        rows = ",\n  ".join(map(json.dumps, value)) if isinstance(value, list) else ""
        parts.append(f"{json.dumps(name)}: " + (f"[\n  {rows}\n ]" if rows else json.dumps(value)))
    return "{\n " + ",\n ".join(parts) + "\n}\n"


def to_table(results: Results) -> Table:
    """Return the one table: steps over those of peers."""
    table = report.comparisons_table()
    for section, rows in itertools.groupby(results.contests, lambda row: _section(row.contest)):
        report.add_section(table, section)
        for row in rows:
            name = f"{row.contest.tensors} x {row.contest.numel}, {row.contest.against}"
            report.add_row(table, name, row.comparison)
    return table


def _section(contest: Contest) -> str:
    moments = "" if contest.moments == "fp32" else f", moments {contest.moments}"
    return f"{contest.threads} thr.{moments}, {contest.task.in_words}"


def notes(results: Results, pairs: int) -> list[str]:
    """Return what a reader of the table needs: sizes, what a ratio is against, and what was left out."""
    return [
        "Steps: tensors x elements, peer. SpeculativeCPUAdamW.step, which always takes the norm, against what the "
        "title says with the peer's step; new gradients before each.",
        *(f"Not measured: {each.what} ({each.why})." for each in results.left_out),
        report.about_ratios(pairs),
    ]
