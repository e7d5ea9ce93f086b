"""The doctor's findings, as a table for people and as JSON for programs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.table import Table
from rich.text import Text

from superadam.cli.console import new_table
from superadam.cli.doctor.finding import Finding, Status

STYLES = {Status.OK: "green", Status.BETTER: "yellow", Status.BROKEN: "bold red", Status.UNKNOWN: "dim"}


def to_table(findings: Mapping[str, Finding]) -> Table:
    """Return one row for each finding, with its remedy below it."""
    table = new_table(gap=2, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True, style="bold")
    table.add_column(overflow="fold")
    for name, finding in findings.items():
        detail = Text(finding.detail)
        if finding.remedy:
            detail.append(f"\n{finding.remedy}", style="cyan")
        table.add_row(Text(finding.status.value, style=STYLES[finding.status]), Text(name), detail)
    return table


def to_json(findings: Mapping[str, Finding]) -> dict[str, Any]:
    """Return everything as plain values."""
    shown = [
        {"name": name, "status": one.status.value, "detail": one.detail, "remedy": one.remedy, "values": one.values}
        for name, one in findings.items()
    ]
    return {"findings": shown, "broken": any(one.fault is Status.BROKEN for one in findings.values())}
