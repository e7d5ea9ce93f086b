"""The results of a check, as a file and as a table.

Owns the layout of both, and the name of the file. It computes nothing that is not in the findings.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from gpucheck.findings import Finding, Outcome

_COLOURS = {Outcome.GOOD: "green", Outcome.FAILED: "bold red", Outcome.SHORTENED: "yellow", Outcome.LEFT_OUT: "yellow"}


def slug(device: str) -> str:
    """Return a device's name as the names of result files have it."""
    words = re.findall(r"[a-z0-9]+", device.lower())
    return "-".join(word for word in words if word not in ("nvidia", "amd", "geforce"))


@dataclass(slots=True)
class Results:
    """Everything a check has found so far.

    Attributes:
        device: name of the GPU, or of what stands in for it.
        date: ISO 8601.
        command: as it was typed.
        rehearsal: whether the figures mean nothing.
        stages: findings by the name of their stage, in order.
    """

    device: str
    date: str
    command: list[str]
    rehearsal: bool
    stages: dict[str, Finding] = field(default_factory=dict)

    @property
    def has_failed(self) -> bool:
        """Whether anything was wrong."""
        return any(finding.outcome is Outcome.FAILED for finding in self.stages.values())

    @property
    def rows(self) -> list[dict[str, Any]]:
        """What was measured of throughput."""
        rows: list[dict[str, Any]] = (
            self.stages["throughput"].figures.get("rows", []) if "throughput" in self.stages else []
        )
        return rows

    def add(self, stage: str, finding: Finding, seconds: float) -> None:
        """Put what a stage has found after so many seconds in place of what it had found before."""
        self.stages[stage] = dataclasses.replace(finding, seconds=seconds)

    def write(self, path: Path) -> None:
        """Write everything as JSON; a process that dies meanwhile leaves what was there before."""
        plain = {
            **{name: getattr(self, name) for name in ("device", "date", "command", "rehearsal")},
            "stages": {
                name: {**dataclasses.asdict(finding), "outcome": finding.outcome.value}
                for name, finding in self.stages.items()
            },
        }
        part = path.with_suffix(".part")
        part.write_text(json.dumps(plain, indent=1) + "\n")
        os.replace(part, path)


def tables(results: Results) -> Group:
    """Return what a person sees at the end: the stages, and the throughput."""
    stages = Table(box=box.SIMPLE_HEAD, pad_edge=False, title=_title(results), title_justify="left")
    for name in ("stage", "outcome"):
        stages.add_column(name, no_wrap=True)
    stages.add_column("s", justify="right")
    stages.add_column("what came of it")
    for name, finding in results.stages.items():
        outcome = Text(finding.outcome.value, style=_COLOURS[finding.outcome])
        stages.add_row(name, outcome, f"{finding.seconds:.0f}", Text(finding.detail))
    return Group(stages, throughput_table(results.rows)) if results.rows else Group(stages)


def _title(results: Results) -> str:
    words = f"gpu-check of {results.device}"
    return f"REHEARSAL without a GPU: no figure means anything; {words}" if results.rehearsal else words


def throughput_table(rows: list[dict[str, Any]]) -> Table:
    """Return the table of optimizers, by model and batch."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("model, batch x seq", no_wrap=True)
    table.add_column("optimizer")
    for name in ("tokens/s", "s/step", "GPU GB", "host GB", "hidden"):
        table.add_column(name, justify="right", no_wrap=True)
    last = None
    for row in sorted(rows, key=lambda row: (row["model"], row["batch"])):
        this = (row["model"], row["batch"])
        if last not in (None, this):
            table.add_section()
        last = this
        shown = [f"{row['model']}, {row['batch']} x {row['seq']}", row["side"]]
        if row["outcome"] != "measured":
            table.add_row(*shown, Text(row["outcome"], style="yellow"))
            continue
        device, share = row["peak_device_bytes"], row.get("hidden_share")
        table.add_row(
            *shown,
            f"{row['tokens_per_second']:,.0f}",
            f"{row['step_seconds']:.3f}",
            "" if device is None else f"{device / 1e9:.1f}",
            f"{row['peak_host_bytes'] / 1e9:.1f}",
            "" if share is None else f"{share:.0%}",
        )
    return table
