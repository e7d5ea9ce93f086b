"""The picture of a check: tokens per second of each optimizer, and the memory that it took.

Owns everything that is drawn. It needs matplotlib, without a display.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from gpucheck.report import Results
from gpucheck.sides import ALONE, SIDES

# A colour-blind safe set: Okabe & Ito, "Color Universal Design", 2008.
_COLOURS = dict(zip(SIDES, ("#999999", "#009E73", "#0072B2", "#E69F00", "#D55E00"), strict=True))


def write(results: Results, path: Path) -> bool:
    """Draw what was measured of throughput into `path`, and return whether there was anything to draw."""
    rows = [row for row in results.rows if row["outcome"] == "measured"]
    if not rows:
        return False
    with rc_context({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False}):
        _drawn(results, rows).savefig(path, format="png")
    return True


def _drawn(results: Results, rows: list[dict[str, Any]]) -> Figure:
    groups = sorted({(row["model"], row["batch"], row["seq"]) for row in rows})
    figure = Figure(figsize=(11, 7), dpi=150, facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    upper, lower = figure.subplots(2, 1, sharex=True)
    width = 0.8 / len(SIDES)
    for number, side in enumerate(SIDES):
        for index, group in enumerate(groups):
            at = index + (number - (len(SIDES) - 1) / 2) * width
            found = [row for row in rows if (row["model"], row["batch"], row["seq"], row["side"]) == (*group, side)]
            for row in found:
                hatch = "//" if side == ALONE else None
                upper.bar(at, row["tokens_per_second"], width, color=_COLOURS[side], hatch=hatch)
                device, host = (row["peak_device_bytes"] or 0) / 1e9, row["peak_host_bytes"] / 1e9
                lower.bar(at, device, width, color=_COLOURS[side])
                lower.bar(at, host, width, bottom=device, color=_COLOURS[side], alpha=0.4)
    for side, colour in _COLOURS.items():
        upper.bar(0, 0, color=colour, label=side)
    upper.set_ylabel("tokens/s")
    lower.set_ylabel("GB at most: GPU, above it host (pale)")
    lower.set_xticks(range(len(groups)), [f"{model}\n{batch} x {seq} tokens" for model, batch, seq in groups])
    title = f"superadam on {results.device}, {results.date[:10]}"
    figure.suptitle(f"REHEARSAL, means nothing: {title}" if results.rehearsal else title)
    figure.legend(loc="outside lower center", ncols=len(SIDES), frameon=False)
    return figure
