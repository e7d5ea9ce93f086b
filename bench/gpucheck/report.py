"""The results of a check, as a file and as tables; nothing is computed that is not in the findings."""

from __future__ import annotations

import dataclasses
import enum
import itertools
import json
import os
import platform
import re
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from gpucheck.findings import Finding, Outcome
from gpucheck.programs import ROOT
from gpucheck.rates import Rate
from gpucheck.rows import MEASURED, Row
from gpucheck.sides import SIDES, SWEPT
from gpucheck.verdicts import Answer, Verdict
from superadam.cli.bench.report import environment

_COLOURS = {Outcome.GOOD: "green", Outcome.FAILED: "bold red", Outcome.SHORTENED: "yellow", Outcome.LEFT_OUT: "yellow"}

_ANSWER_COLOURS = {Answer.MET: "green", Answer.MISSED: "bold red", Answer.NOT_ASKED: "dim", Answer.UNKNOWN: "yellow"}


def slug(device: str) -> str:
    """Return a name of a device or machine as the names of result files have it."""
    words = re.findall(r"[a-z0-9]+", device.lower())
    return "-".join(word for word in words if word not in ("nvidia", "amd", "geforce"))


def commit() -> str:
    """Return the commit of the repository, with "-dirty" where files differ from it; "" if git does not tell."""
    try:
        words = ["git", "describe", "--always", "--dirty", "--exclude", "*"]
        return subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def new_file(folder: Path, device: str, date: str) -> Path:
    """Make an empty file for results in a folder, under a name that no file there has, and return its path."""
    name = "-".join(filter(None, (slug(device), slug(platform.node()), date[:10], commit())))
    for number in itertools.count(1):
        path = folder / (f"{name}.json" if number == 1 else f"{name}-{number}.json")
        try:
            path.touch(exist_ok=False)
        except FileExistsError:
            continue
        return path
    raise AssertionError("numbers have no end")


@dataclass(slots=True)
class Results:
    """Everything a check has found so far.

    Attributes:
        device: name of the GPU, or of what stands in for it.
        date: ISO 8601.
        command: as it was typed.
        rehearsal: whether the figures mean nothing.
        commit: of the repository.
        environment: processor, threads, versions.
        stages: findings by the name of their stage, in order.
    """

    device: str
    date: str
    command: list[str]
    rehearsal: bool
    commit: str = field(default_factory=commit)
    environment: dict[str, Any] = field(default_factory=environment)
    stages: dict[str, Finding] = field(default_factory=dict)

    @property
    def has_failed(self) -> bool:
        """Whether anything was wrong."""
        return any(finding.outcome is Outcome.FAILED for finding in self.stages.values())

    @property
    def rows(self) -> list[Row]:
        """What was measured of throughput."""
        return self._figures("throughput", "rows")

    @property
    def verdicts(self) -> list[Verdict]:
        """What that says of the project's bounds."""
        return self._figures("throughput", "verdicts")

    @property
    def rates(self) -> list[Rate]:
        """What was measured of links, kernels and passes."""
        return self._figures("rates", "rows")

    def _figures(self, stage: str, name: str) -> list[Any]:
        found: list[Any] = self.stages[stage].figures.get(name, []) if stage in self.stages else []
        return found

    def add(self, stage: str, finding: Finding, seconds: float) -> None:
        """Put what a stage has found after this number of seconds in place of what it had found before."""
        self.stages[stage] = dataclasses.replace(finding, seconds=seconds)

    def write(self, path: Path) -> None:
        """Write everything as JSON; a process that dies meanwhile leaves what was there before."""
        part = path.with_suffix(".part")
        part.write_text(json.dumps(dataclasses.asdict(self), indent=1, default=_word) + "\n")
        os.replace(part, path)


def _word(member: enum.Enum) -> Any:
    return member.value


def _table(title: str, *names: str, right: tuple[str, ...] = ()) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, title=title, title_justify="left")
    for name in names:
        table.add_column(name, justify="right" if name in right else "left", no_wrap=name in right)
    return table


def tables(results: Results) -> Group:
    """Return what a person sees at the end: the stages, and what was measured."""
    title = f"gpu-check of {results.device}"
    if results.rehearsal:
        title = f"REHEARSAL without a GPU: no figure means anything; {title}"
    stages = _table(title, "stage", "outcome", "s", "result", right=("s",))
    for name, finding in results.stages.items():
        outcome = Text(finding.outcome.value, style=_COLOURS[finding.outcome])
        stages.add_row(name, outcome, f"{finding.seconds:.0f}", Text(finding.detail))
    shown = [stages]
    if results.rates:
        shown.append(rates_table(results.rates))
    if results.rows:
        shown += [throughput_table(results.rows), verdicts_table(results.verdicts)]
    return Group(*shown)


def rates_table(rates: list[Rate]) -> Table:
    """Return the table of links, kernels and passes."""
    right = ("GB/s", "of a copy", "elements/s")
    table = _table("rates", "what", *right, right=right)
    for rate in rates:
        share, elements = rate.share_of_copy, rate.elements_per_second
        table.add_row(
            rate.what,
            f"{rate.gigabytes_per_second:,.1f}",
            "" if share is None else f"{share:.0%}",
            "" if elements is None else f"{elements:.3g}",
        )
    return table


def throughput_table(rows: list[Row]) -> Table:
    """Return the table of optimizers, by model and batch."""
    right = ("tokens/s", "s/step", "backward s", "GPU GB", "host GB", "hidden")
    table = _table("throughput", "model, batch x seq", "optimizer", *right, right=right)
    order = (*SIDES, *SWEPT)
    last = None
    for row in sorted(rows, key=lambda row: (row.workload, order.index(row.side))):
        if last not in (None, row.workload):
            table.add_section()
        last = row.workload
        shown = [f"{row.model}, {row.batch} x {row.seq}", row.side]
        if row.outcome != MEASURED:
            table.add_row(*shown, Text(row.outcome, style="yellow"))
            continue
        figures = (
            (row.tokens_per_second, ",.0f", 1.0),
            (row.step_seconds, ".3f", 1.0),
            (row.backward_seconds, ".3f", 1.0),
            (row.peak_device_bytes, ".1f", 1e-9),
            (row.peak_host_bytes, ".1f", 1e-9),
            (row.hidden_share, ".0%", 1.0),
        )
        table.add_row(*shown, *("" if value is None else format(value * unit, form) for value, form, unit in figures))
    return table


def verdicts_table(verdicts: list[Verdict]) -> Table:
    """Return the table of the project's bounds."""
    table = _table("bounds, where backward takes 1.5 x the CPU's Adam or more", "model", "bound", "verdict", "because")
    for verdict in verdicts:
        model, batch, seq = verdict.workload
        answer = Text(verdict.answer.value, style=_ANSWER_COLOURS[verdict.answer])
        table.add_row(f"{model}, {batch} x {seq}", verdict.bound, answer, Text(verdict.detail))
    return table
