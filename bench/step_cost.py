"""Puts a result of `bench/compare.py --json` into docs/step_cost.md: its tables, and the picture next to it.

    python bench/step_cost.py bench/results/NAME.json

The tables replace what stands between two comments of the page.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import os
import re
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure

sys.path.append(str(Path(__file__).parent))  # which PYTHONSAFEPATH leaves out
from measures.contests import FLOOR, MANY_NUMEL, Task
from measures.peers import PEERS

from superadam.cli.bench.report import line_of

PAGE = Path(__file__).parents[1] / "docs" / "step_cost.md"
FIGURES = re.compile(r"(?<=<!-- figures: python bench/step_cost.py -->\n).*(?=<!-- end of figures -->)", re.DOTALL)

OURS = "superadam"
COLOURS = {
    OURS: "#DC2626",
    FLOOR: "#111827",
    **dict(zip([peer.name for peer in PEERS], ["#2563EB", "#0891B2", "#93C5FD", "#16A34A", "#D97706"], strict=False)),
}
UNKNOWN = "\N{EN DASH}"

Row = dict[str, Any]
Shape = tuple[int, int]


class StepCosts:
    """The rows of one file, by what was measured."""

    def __init__(self, file: Path) -> None:
        self.name = file.name
        self.sha256 = hashlib.sha256(file.read_bytes()).hexdigest()
        self.content: dict[str, Any] = json.loads(file.read_text())
        self.rows: list[Row] = self.content["contests"]
        self.threads = max(row["threads"] for row in self.rows)

    def of(self, task: Task, threads: int, moments: str = "fp32") -> list[Row]:
        """Return the rows of a task."""
        asked = (task.value, threads, moments)
        return [row for row in self.rows if (row["task"], row["threads"], row["moments"]) == asked]

    def seconds(self, side: str, shape: Shape, task: Task = Task.CAST, threads: int | None = None) -> float | None:
        """Return the median of a step, or None where that was not measured; ours is that of all its comparisons."""
        rows = [row for row in self.of(task, threads or self.threads) if _shape(row) == shape]
        if side == OURS:
            return statistics.median(row["seconds"]["median"] for row in rows) if rows else None
        return next((row["against_seconds"]["median"] for row in rows if row["against"] == side), None)

    def sides(self, task: Task) -> list[str]:
        """Return ours, the peers that were measured, and the floor where it was."""
        found = {row["against"] for row in self.of(task, self.threads)}
        return [OURS, *(peer.name for peer in PEERS if peer.name in found), *({FLOOR} & found)]


def _shape(row: Row) -> Shape:
    return row["tensors"], row["numel"]


def _unique(values: Iterable[Any]) -> list[Any]:
    return list(dict.fromkeys(values))


def _count(number: int) -> str:
    for size, unit in ((1 << 20, "Mi"), (1 << 10, "Ki")):
        if number >= size and number % size == 0:
            return f"{number // size} {unit}"
    return f"{number:,}"


def _threads(count: int) -> str:
    return f"{count} thread{'s' * (count > 1)}"


def _value(value: float | None, scale: float = 1.0) -> str:
    if value is None:
        return UNKNOWN
    return f"{scale * value:,.0f}" if scale * value >= 1000 else f"{scale * value:#.3g}".rstrip(".")


def _table(columns: list[str], rows: list[list[str]]) -> list[str]:
    lines = [columns, ["---", *["---:"] * (len(columns) - 1)], *rows]
    return ["", *("| " + " | ".join(line) + " |" for line in lines)]


def _slope(costs: StepCosts, side: str, shapes: list[Shape], size_of: Callable[[Shape], int]) -> float | None:
    """Return seconds for each unit more, between the two largest shapes that were measured."""
    found = [(size_of(shape), seconds) for shape in shapes if (seconds := costs.seconds(side, shape)) is not None]
    if len(found) < 2:
        return None
    (few, first), (many, second) = sorted(found)[-2:]
    return (second - first) / (many - few)


def growth_table(costs: StepCosts) -> list[str]:
    """Return how the cost of the whole step grows with tensors, elements and threads."""
    shapes = _unique(_shape(row) for row in costs.of(Task.CAST, costs.threads))
    single = [shape for shape in shapes if shape[0] == 1]
    many = [shape for shape in shapes if shape[1] == MANY_NUMEL]
    least, fewer = min(single), sorted({row["threads"] for row in costs.rows} - {costs.threads})
    columns = [
        f"bf16 weights, {_threads(costs.threads)}",
        f"one tensor of {least[1]}, us",
        f"each further tensor of {MANY_NUMEL:,}, us",
        "each 1,000 elements of a large tensor, us",
        *(f"time on {count} / on {costs.threads} threads" for count in fewer),
    ]
    rows = []
    for side in costs.sides(Task.CAST):
        line = [
            costs.seconds(side, least),
            _slope(costs, side, many, lambda shape: shape[0]),
            _slope(costs, side, single, lambda shape: shape[1]),
        ]
        cells = [_value(value, scale) for value, scale in zip(line, (1e6, 1e6, 1e9), strict=True)]
        for count in fewer:
            largest = max((s for s in map(_shape, costs.of(Task.CAST, count)) if s[0] == 1), default=least)
            one, all_of_them = costs.seconds(side, largest, threads=count), costs.seconds(side, largest)
            cells.append(_value(one / all_of_them if one and all_of_them else None))
        rows.append([side, *cells])
    return _table(columns, rows)


def ratio_table(costs: StepCosts, task: Task, threads: int, moments: str = "fp32") -> list[str]:
    """Return ours over each peer: medians of the pairs and, in brackets, quartiles; and the milliseconds of ours."""
    rows = costs.of(task, threads, moments)
    peers = [name for name in (*(peer.name for peer in PEERS), FLOOR) if any(row["against"] == name for row in rows)]
    lines = []
    for shape in sorted(_unique(map(_shape, rows))):
        of_shape = {row["against"]: row for row in rows if _shape(row) == shape}
        own = statistics.median(row["seconds"]["median"] for row in of_shape.values())
        ratios = [of_shape[peer]["ratio"] if peer in of_shape else None for peer in peers]
        cells = [
            f"{_value(ratio['median'])} ({_value(ratio['lower'])} to {_value(ratio['upper'])})" if ratio else UNKNOWN
            for ratio in ratios
        ]
        lines.append([f"{shape[0]:,} x {_count(shape[1])}", _value(own, 1e3), *cells])
    return _table(["tensors x elements", "ours, ms", *peers], lines)


def page(costs: StepCosts, picture: str, result: str) -> str:
    """Return what the page shows: the picture, how cost grows, all ratios, and what was not measured."""
    lines = [f"![Time of a step against elements and against tensors, for each side, with the floor]({picture})"]
    lines += [
        *growth_table(costs),
        "",
        "From the two largest sizes measured of each kind; " + _conditions(costs, result),
    ]
    for task in Task:
        lines += ["", f"## {task.in_words}", *ratio_table(costs, task, costs.threads)]
    compact = costs.of(Task.CAST, costs.threads, "8bit")
    if compact:
        lines += ["", "## bf16, moments of 8 bits", *ratio_table(costs, Task.CAST, costs.threads, "8bit")]
    for threads in sorted({row["threads"] for row in costs.rows} - {costs.threads}):
        lines += ["", f"## bf16, {_threads(threads)}", *ratio_table(costs, Task.CAST, threads)]
    lines += ["", *(f"Not measured: {each['what']} ({each['why']})." for each in costs.content["left_out"])]
    return "\n".join(lines).rstrip() + "\n"


def _conditions(costs: StepCosts, result: str) -> str:
    packages = ", ".join(f"{name} {version}" for name, version in costs.content["packages"].items() if name != "torch")
    where = line_of(costs.content["environment"]) + (f", {packages}" if packages else "")
    policy = costs.content["openmp"].get("OMP_WAIT_POLICY", "not set")
    pairs = " or ".join(map(str, _unique(row["pairs"] for row in costs.rows)))
    return (
        f"medians of {pairs} interleaved pairs. {where}; `OMP_WAIT_POLICY` {policy}. "
        f"[All seconds and quartiles]({result})"
    )


def draw(costs: StepCosts) -> str:
    """Return the picture as SVG, which holds the digest of its file: seconds against elements, and against tensors."""
    options: dict[Any, Any] = {
        "font.size": 9,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "svg.hashsalt": "step",
    }
    with rc_context({**options, "svg.fonttype": "none"}):
        figure = Figure(figsize=(11, 6.5), facecolor="white", layout="constrained")
        axes = figure.subplots(2, len(Task), sharey=True)
        for column, task in enumerate(Task):
            _draw(axes[0][column], costs, task, "elements of one tensor", lambda t, n: n if t == 1 else None)
            words = f"tensors of {MANY_NUMEL:,} elements"
            _draw(axes[1][column], costs, task, words, lambda t, n: t if n == MANY_NUMEL else None)
            axes[0][column].set_title(task.in_words, fontsize=9, loc="left")
        handles, labels = axes[0][0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False)
        target = io.StringIO()
        about = f"{costs.name}, sha256 {costs.sha256}"
        figure.savefig(target, format="svg", metadata={"Date": None, "Description": about})
    return "\n".join(line.rstrip() for line in target.getvalue().splitlines()) + "\n"


def _draw(axes: Any, costs: StepCosts, task: Task, words: str, place: Callable[[int, int], int | None]) -> None:
    shapes = sorted(_unique(_shape(row) for row in costs.of(task, costs.threads)))
    for side in costs.sides(task):
        points = [
            (where, 1e3 * seconds)
            for shape in shapes
            if (where := place(*shape)) is not None and (seconds := costs.seconds(side, shape, task)) is not None
        ]
        style = "--" if side == FLOOR else "o-"
        if points:
            axes.plot(*zip(*points, strict=True), style, color=COLOURS[side], label=side, markersize=3)
    axes.set(xscale="log", yscale="log", xlabel=words, ylabel="ms per step")
    axes.minorticks_off()
    axes.grid(alpha=0.3)


def main(words: Sequence[str] | None = None) -> int:
    """Write page and picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("result", type=Path)
    asked = parser.parse_args(words)
    costs, picture = StepCosts(asked.result), PAGE.with_suffix(".svg")
    link = os.path.relpath(asked.result.resolve(), PAGE.resolve().parent)
    figures = page(costs, picture.name, link)
    picture.write_text(draw(costs))
    PAGE.write_text(FIGURES.sub(lambda _: figures, PAGE.read_text()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
