"""The picture of a check: tokens per second of each optimizer, and its memory; placements of the sweep are in tables.

Owns everything that is drawn. It needs matplotlib, without a display.
"""

from __future__ import annotations

from pathlib import Path

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from gpucheck.report import Results
from gpucheck.rows import MEASURED, Row
from gpucheck.sides import ALONE, ON_DEVICE, SIDES
from gpucheck.verdicts import LEAST_RATE

# A colour-blind safe set: Okabe & Ito, "Color Universal Design", 2008.
_COLOURS = dict(zip(SIDES, ("#999999", "#009E73", "#E69F00", "#0072B2", "#D55E00"), strict=True))

_QUANTITIES = ("tokens/s", "GB at most:\nGPU, above it host (pale)")


def write(results: Results, path: Path) -> bool:
    """Draw what was measured of throughput into `path`, and return whether there was anything to draw."""
    if all(row.outcome != MEASURED for row in results.rows):
        return False
    with rc_context({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False}):
        _drawn(results).savefig(path, format="png")
    return True


def _drawn(results: Results) -> Figure:
    models = list(dict.fromkeys(row.model for row in results.rows))
    figure = Figure(figsize=(11, 10), dpi=150, facecolor="white", layout="constrained")
    columns = figure.subplots(2, len(models), height_ratios=(2, 1), squeeze=False).T
    for model, (upper, lower) in zip(models, columns, strict=True):
        rows = [row for row in results.rows if row.model == model and row.side in SIDES]
        _draw_rates(upper, rows)
        _draw_memory(lower, rows)
    for axes, name in zip(columns[0], _QUANTITIES, strict=True):
        axes.set_ylabel(name)
    title = f"superadam on {results.device}, {results.date[:10]}"
    figure.suptitle(f"REHEARSAL, means nothing: {title}" if results.rehearsal else title)
    figure.legend(*columns[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False)
    return figure


def _places(axes: Axes, rows: list[Row]) -> list[tuple[Row, float, float]]:
    """Name the workloads below a plot, and return each row with the middle and the width of its bar."""
    groups = sorted({row.workload for row in rows})
    axes.set_xticks(range(len(groups)), [f"{model}\n{batch} x {seq} tokens" for model, batch, seq in groups])
    axes.set_xlim(-0.5, len(groups) - 0.5)
    width = 0.8 / len(SIDES)
    middle = (len(SIDES) - 1) / 2
    return [(row, groups.index(row.workload) + (SIDES.index(row.side) - middle) * width, width) for row in rows]


def _draw_rates(axes: Axes, rows: list[Row]) -> None:
    """Draw tokens per second, hidden shares above them, the bound, and the names of what was not measured."""
    for row, at, width in _places(axes, rows):
        if row.outcome != MEASURED:
            words = f"{row.side}: {row.outcome}"
            axes.annotate(words, (at, 0), (0, 4), textcoords="offset points", rotation=90, ha="center", fontsize=8)
            continue
        rate = row.tokens_per_second
        axes.bar(at, rate, width, color=_COLOURS[row.side], hatch="//" if row.side == ALONE else None)
        if row.hidden_share is not None:
            words = f"{row.hidden_share:.0%}\nhidden"
            axes.annotate(words, (at, rate), (0, 3), textcoords="offset points", ha="center", fontsize=8)
        if row.side == ON_DEVICE:
            begin = at - (SIDES.index(ON_DEVICE) + 0.5) * width
            axes.hlines(LEAST_RATE * rate, begin, begin + len(SIDES) * width, colors="black", linestyles="dashed")
    for side, colour in _COLOURS.items():
        axes.bar(0, 0, color=colour, hatch="//" if side == ALONE else None, label=side)
    axes.plot([], [], color="black", linestyle="dashed", label=f"{1 - LEAST_RATE:.0%} below {ON_DEVICE}")
    axes.margins(y=0.15)


def _draw_memory(axes: Axes, rows: list[Row]) -> None:
    """Draw the most memory of GPU and host."""
    for row, at, width in _places(axes, rows):
        device, host = (row.peak_device_bytes or 0) / 1e9, (row.peak_host_bytes or 0) / 1e9
        axes.bar(at, device, width, color=_COLOURS[row.side])
        axes.bar(at, host, width, bottom=device, color=_COLOURS[row.side], alpha=0.4)
