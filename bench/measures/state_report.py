"""The results of `bench/smaller_state.py`, as tables, as JSON, and as a picture (matplotlib, without a display)."""

from __future__ import annotations

import dataclasses
import json
import statistics
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from rich.console import Console
from rich.table import Table

from measures.state_formats import FORMATS
from measures.state_training import (
    FINE_TUNING,
    FROM_SCRATCH,
    MAX_GRAD_NORM,
    PERTURBATION,
    WEIGHT_DECAY,
    Result,
    Run,
    SpreadOfRuns,
    Training,
)
from superadam.cli.bench.report import Environment
from superadam.cli.console import new_table
from superadam.cli.usage import UsageError

# A colour-blind safe set: Okabe & Ito, "Color Universal Design", 2008.
_COLOURS = ("#000000", "#56B4E9", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#D55E00", "#6B7280", "#B0A000")


@dataclass
class TrainingResults:
    """Results so far, and the file that holds them."""

    about: dict[str, Any]
    results: list[Result]
    file: Path | None

    @staticmethod
    def begin(training: Training, file: Path | None) -> TrainingResults:
        """Return what the file holds already.

        Raises:
            UsageError: the file is of other settings, another text or another machine.
        """
        about = {
            "environment": dataclasses.asdict(Environment.here()),
            "packages": {name: _version(name) for name in ("bitsandbytes", "torchao")},
            "settings": dataclasses.asdict(training.settings),
            "parameters": training.settings.parameters,
            "texts": [
                {"name": text.name, "bytes": len(text.training) + len(text.held_out), "sha256": text.sha256}
                for text in (training.text, training.other)
            ],
        }
        about = json.loads(json.dumps(about))  # lists instead of tuples, as files have them
        if file is None or not file.exists():
            return TrainingResults(about, [], file)
        held = json.loads(file.read_text())
        rows = held.pop("runs")
        if different := [name for name in about if held.get(name) != about[name]]:
            raise UsageError(f"{file} has other {' and '.join(different)}; give --json a new name")
        return TrainingResults(held, [Result(**row | {"run": Run(**row["run"])}) for row in rows], file)

    def of(self, run: Run) -> Result | None:
        """Return the result of a run, if there is one."""
        return next((result for result in self.results if result.run == run), None)

    def of_all_seeds(self, run: Run) -> list[Result]:
        """Return the results of runs that differ from this one in their initial weights at most."""
        return [result for result in self.results if dataclasses.replace(result.run, seed=run.seed) == run]

    def add(self, result: Result) -> None:
        """Add a result, and write the file."""
        self.results.append(result)
        if self.file is not None:
            content = {**self.about, "runs": [dataclasses.asdict(result) for result in self.results]}
            self.file.write_text(json.dumps(content, indent=1) + "\n")


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def spread(results: TrainingResults, run: Run) -> SpreadOfRuns | None:
    """Return that of the fp32 runs in a run's setting, if there are at least two."""
    losses = [result.held_out[-1][1] for result in results.of_all_seeds(dataclasses.replace(run, format="fp32"))]
    return SpreadOfRuns.of(losses) if len(losses) > 1 else None


def _settings(results: TrainingResults) -> list[Run]:
    """Return the first fp32 run of each setting, in their order."""
    runs = {dataclasses.replace(result.run, format="fp32", seed=0): None for result in results.results}
    return sorted(runs, key=lambda run: (run.part != FROM_SCRATCH, run.lr, run.beta2))


def _title(run: Run) -> str:
    return f"{run.part}, lr {run.lr:g}, beta2 {run.beta2:g}"


def losses_table(results: TrainingResults, setting: Run) -> Table:
    """Return the table of held-out losses in a setting: of each format, and where they lie among those of fp32 runs."""
    columns = "state", "bytes", "runs", "held out", "- fp32", "in range", "in 95 %"
    table = new_table(*columns, title=f"loss, {_title(setting)}", title_justify="left")
    among = spread(results, setting)
    if among is not None:
        table.add_row("fp32, the least", "", "", "", "", f"{among.least:.4f}", f"{among.low:.4f}")
        table.add_row("fp32, the most", "", "", "", "", f"{among.most:.4f}", f"{among.high:.4f}")
        table.add_section()
    for name, format in FORMATS.items():
        runs = results.of_all_seeds(dataclasses.replace(setting, format=name))
        if not runs:
            continue
        losses = [run.held_out[-1][1] for run in runs]
        mean, where = statistics.fmean(losses), ["", "", ""]
        if among is not None and name != "fp32":
            within = [among.least <= loss <= among.most for loss in losses]
            likely = [among.low <= loss <= among.high for loss in losses]
            where = [f"{mean - among.mean:+.4f}", *(f"{sum(some)} of {len(runs)}" for some in (within, likely))]
        table.add_row(name, f"{format.state_bytes:.3g}", str(len(runs)), f"{mean:.4f}", *where)
    return table


def marks_table(results: TrainingResults, setting: Run) -> Table | None:
    """Return the table of errors of updates (from scratch) or drifts of masters (fine-tuning), by format and step."""
    if (led := results.of(setting)) is None:
        return None
    what, found = ("error of the update", led.errors) if led.errors else ("drift of masters", led.drifts)
    marks = [str(step) for step, _ in led.held_out]
    columns = ("at step", *marks, f"{marks[-1]}/{marks[0]}")
    table = new_table(*columns, title=f"{what}, {_title(setting)}", title_justify="left")
    for name, pairs in found.items():
        values = [value for _, value in pairs]
        table.add_row(name, *(f"{value:.4f}" for value in values), f"{values[-1] / values[0]:.2f}" if values[0] else "")
    return table


def training_notes(results: TrainingResults) -> list[str]:
    """Return explanations of the tables of training."""
    settings = results.about["settings"]
    text, other = (part["name"] for part in results.about["texts"])
    return [
        f"{results.about['parameters']:,} bf16 parameters, {settings['batch'] * settings['seq']} bytes a step, clipped "
        f"at {MAX_GRAD_NORM:g}, weight decay {WEIGHT_DECAY:g}; {settings['steps']} steps on {text}, "
        f"{settings['fine_tuning_steps']} on {other}.",
        "bytes: of master and moments, for a parameter. held out: loss in nats per byte after the last step, mean of "
        f"the runs, whose initial weights differ by {PERTURBATION:.0%}. in range, in 95 %: how many of them lie within "
        "the range of the fp32 runs, and where 95 % of more fp32 runs would lie (Student's t).",
        "Error of the update: |update - exact| / |exact|, where exact is that of fp32 state fed the same gradients. "
        "Drift of masters: their distance from fp32 ones fed the same gradients, over the way that these have come.",
        f"The runs took {sum(result.seconds for result in results.results) / 60:.0f} minutes of the CPU.",
    ]


def show_training(results: TrainingResults, console: Console) -> None:
    """Print the tables of training."""
    console.print(environment_in_words(results), highlight=False)
    for setting in _settings(results):
        for table in (losses_table(results, setting), marks_table(results, setting)):
            if table is not None and table.row_count:
                console.print(table)
    for line in training_notes(results):
        console.print(line, style="dim", highlight=False)


def environment_in_words(results: TrainingResults) -> str:
    """Return a line on the machine and the packages."""
    others = [f"{name} {version}" for name, version in results.about["packages"].items() if version]
    return ", ".join([Environment(**results.about["environment"]).in_words(), *others])


def draw(results: TrainingResults) -> Figure:
    """Return the figure: losses among those of fp32 runs, errors of updates, drift of masters."""
    settings = _settings(results)
    scratch = [run for run in settings if run.part == FROM_SCRATCH][:2]
    tuned = [run for run in settings if run.part == FINE_TUNING][:2]
    with rc_context({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(11, 9.5), facecolor="white", layout="constrained")
        rows = figure.subplots(3, 2)
        for column, run in enumerate(scratch):
            _draw_losses(rows[0][column], results, run)
            _draw_marks(rows[1][column], f"error of the update, {_title(run)}", results.of(run), "errors")
        for column, run in enumerate(tuned):
            _draw_marks(rows[2][column], f"drift of masters, {_title(run)}", results.of(run), "drifts")
        figure.suptitle(environment_in_words(results), fontsize=9)
        handles = [Line2D([], [], marker="o", color=_colour(name), label=name, markersize=4) for name in FORMATS]
        figure.legend(handles=handles[1:], loc="outside lower center", ncols=4, frameon=False)
    return figure


def _draw_losses(axes: Any, results: TrainingResults, setting: Run) -> None:
    names = [name for name in FORMATS if results.of(dataclasses.replace(setting, format=name))]
    for result in results.results:
        if dataclasses.replace(result.run, format="fp32", seed=0) == setting:
            place, size = names.index(result.run.format), 4 if result.run.seed else 6
            axes.plot(result.held_out[-1][1], place, "o", color=_colour(result.run.format), markersize=size)
    if (among := spread(results, setting)) is not None:
        axes.axvspan(among.low, among.high, color="#E5E7EB", zorder=0)
        axes.axvspan(among.least, among.most, color="#CBD5E1", zorder=0)
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set_title(f"held-out loss, {_title(setting)}", fontsize=9, loc="left")


def _draw_marks(axes: Any, title: str, result: Result | None, what: str) -> None:
    if result is not None:
        for name, values in getattr(result, what).items():
            axes.plot(*zip(*values, strict=True), "o-", color=_colour(name), markersize=3)
        axes.set_xticks([step for step, _ in result.held_out])
    axes.set_yscale("log")
    axes.set_xlabel("step")
    axes.set_title(title, fontsize=9, loc="left")


def _colour(name: str) -> str:
    return _COLOURS[list(FORMATS).index(name) % len(_COLOURS)]
