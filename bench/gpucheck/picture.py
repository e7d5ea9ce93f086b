"""The picture of a check: tokens per second of each optimizer, its memory, and the placements of the sweep.

Owns everything that is drawn. It needs matplotlib, without a display.
"""

from __future__ import annotations

from pathlib import Path

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from gpucheck.report import Results
from gpucheck.rows import MEASURED, Row
from gpucheck.sides import ALONE, AUTO, ON_DEVICE, OVERLAPPED, SIDES, SWEPT
from gpucheck.verdicts import LEAST_RATE

# A colour-blind safe set: Okabe & Ito, "Color Universal Design", 2008.
_COLOURS = dict(zip(SIDES, ("#999999", "#009E73", "#E69F00", "#0072B2", "#D55E00"), strict=True))

_WIDTH = 0.8 / len(SIDES)


def write(results: Results, path: Path) -> bool:
    """Draw what was measured of throughput into `path`, and return whether there was anything to draw."""
    if all(row.outcome != MEASURED for row in results.rows):
        return False
    with rc_context({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False}):
        _drawn(results).savefig(path, format="png")
    return True


def _drawn(results: Results) -> Figure:
    groups = sorted({row.workload for row in results.rows})
    figure = Figure(figsize=(11, 10), dpi=150, facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    upper, middle, lower = figure.subplots(3, 1, height_ratios=(4, 2, 2))
    bars = [
        (row, index + (SIDES.index(row.side) - (len(SIDES) - 1) / 2) * _WIDTH)
        for index, group in enumerate(groups)
        for row in results.rows
        if row.workload == group and row.side in SIDES
    ]
    _draw_rates(upper, bars)
    _draw_memory(middle, bars)
    for axes in (upper, middle):
        axes.set_xticks(range(len(groups)), [f"{model}\n{batch} x {seq} tokens" for model, batch, seq in groups])
    _draw_placements(lower, [row for row in results.rows if row.side in SWEPT])
    title = f"superadam on {results.device}, {results.date[:10]}"
    figure.suptitle(f"REHEARSAL, means nothing: {title}" if results.rehearsal else title)
    figure.legend(*upper.get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False)
    return figure


def _draw_rates(axes: Axes, bars: list[tuple[Row, float]]) -> None:
    """Draw tokens per second, hidden shares above them, the bound, and the names of what was not measured."""
    for row, at in bars:
        if row.outcome != MEASURED:
            words = f"{row.side}: {row.outcome}"
            axes.annotate(words, (at, 0), (0, 4), textcoords="offset points", rotation=90, ha="center", fontsize=8)
            continue
        rate = row.tokens_per_second
        axes.bar(at, rate, _WIDTH, color=_COLOURS[row.side], hatch="//" if row.side == ALONE else None)
        if row.hidden_share is not None:
            words = f"{row.hidden_share:.0%}\nhidden"
            axes.annotate(words, (at, rate), (0, 3), textcoords="offset points", ha="center", fontsize=8)
        if row.side == ON_DEVICE:
            begin = at - (SIDES.index(ON_DEVICE) + 0.5) * _WIDTH
            axes.hlines(LEAST_RATE * rate, begin, begin + len(SIDES) * _WIDTH, colors="black", linestyles="dashed")
    for side, colour in _COLOURS.items():
        axes.bar(0, 0, color=colour, hatch="//" if side == ALONE else None, label=side)
    axes.plot([], [], color="black", linestyle="dashed", label=f"{1 - LEAST_RATE:.0%} below {ON_DEVICE}")
    axes.set_ylabel("tokens/s")
    axes.margins(y=0.15)


def _draw_memory(axes: Axes, bars: list[tuple[Row, float]]) -> None:
    """Draw the most memory of GPU and host."""
    for row, at in bars:
        device, host = (row.peak_device_bytes or 0) / 1e9, (row.peak_host_bytes or 0) / 1e9
        axes.bar(at, device, _WIDTH, color=_COLOURS[row.side])
        axes.bar(at, host, _WIDTH, bottom=device, color=_COLOURS[row.side], alpha=0.4)
    axes.set_ylabel("GB at most:\nGPU, above it host (pale)")


def _draw_placements(axes: Axes, rows: list[Row]) -> None:
    """Draw the time of a step for each placement, each with its name in its bar."""
    groups = sorted({row.workload for row in rows})
    width = 0.8 / len(SWEPT)
    for row in rows:
        at = groups.index(row.workload) + (SWEPT.index(row.side) - (len(SWEPT) - 1) / 2) * width
        name = row.side.partition(", ")[2]
        is_measured = row.outcome == MEASURED
        if is_measured:
            colour = _COLOURS[OVERLAPPED]
            axes.bar(at, row.step_seconds, 0.9 * width, color=colour, alpha=1.0 if row.side == AUTO else 0.4)
        words = name if is_measured else f"{name}: {row.outcome}"
        axes.annotate(words, (at, 0), (0, 4), textcoords="offset points", rotation=90, ha="center", fontsize=8)
    if not rows:
        axes.text(0.5, 0.5, "placements were not measured", ha="center", transform=axes.transAxes)
    axes.set_xticks(range(len(groups)), [f"{model}\n{batch} x {seq} tokens" for model, batch, seq in groups])
    axes.set_ylabel("s/step by placement")
