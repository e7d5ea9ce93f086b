"""The picture of a run, with matplotlib: loss, gradient norm, and a mark for every step that was clipped or skipped.

It needs no display, and leaves matplotlib's global settings alone.
"""

from __future__ import annotations

import io
import math
import statistics
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from superadam import StepKind
from superadam.cli.train.files import replace_file
from superadam.cli.train.history import History
from superadam.cli.train.report import Report

FILE_NAME = "training.png"

# A colour-blind safe set: Okabe & Ito, "Color Universal Design", 2008.
_BLUE, _ORANGE, _RED, _GREEN = "#0072B2", "#E69F00", "#D55E00", "#009E73"
_INK, _GREY, _PALE = "#222222", "#6B7280", "#E5E7EB"

_STYLE: Any = {
    "font.family": "DejaVu Sans",
    "font.size": 10,
    "axes.edgecolor": _GREY,
    "axes.labelcolor": _INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": _PALE,
    "grid.linewidth": 0.8,
    "xtick.color": _GREY,
    "ytick.color": _GREY,
    "text.color": _INK,
}


_SPAN = 8
"""Steps on either side that the smoothed loss takes in, where there are as many."""


def smoothed(values: list[float]) -> list[float]:
    """Return the median around each value: of up to `_SPAN` values on either side, the same number on both.

    A median follows the curve without bending to a single bad batch, and does not lag behind a falling loss. It ends
    some steps before the last one, where too few values would follow for either.
    """
    last = len(values) - 1
    reach = [min(_SPAN, index, last - index) for index in range(len(values) - min(_SPAN // 2, max(last, 0) // 4))]
    return [statistics.median(values[index - r : index + r + 1]) for index, r in enumerate(reach)]


def draw(history: History, report: Report) -> Figure:
    """Return the figure of a run with at least one step."""
    with rc_context(_STYLE):
        figure = Figure(figsize=(10, 6.6), dpi=150, facecolor="white")
        FigureCanvasAgg(figure)
        top, bottom = figure.subplots(
            2, 1, sharex=True, gridspec_kw={"height_ratios": (1.7, 1.0), "hspace": 0.1, "top": 0.845, "bottom": 0.085}
        )
        figure.subplots_adjust(left=0.075, right=0.975)
        _draw_loss(top, history)
        _draw_norm(bottom, history, report.max_grad_norm)
        figure.text(0.075, 0.955, "superadam train", fontsize=15, fontweight="bold")
        figure.text(0.075, 0.918, _summary(report), fontsize=9.5, color=_GREY)
        if report.elements is not None:
            words = f"{report.elements_differing:,} of {report.elements:,} elements differ from torch"
            figure.text(0.975, 0.955, words, ha="right", fontsize=11, color=_RED if report.is_failed else _GREEN)
        figure.legend(
            *top.get_legend_handles_labels(),
            loc="upper left",
            bbox_to_anchor=(0.068, 0.908),
            ncols=6,
            frameon=False,
            fontsize=9,
            columnspacing=1.6,
            handletextpad=0.5,
            borderaxespad=0.0,
        )
    return figure


def write(history: History, report: Report, folder: Path) -> Path:
    """Draw a run into `folder` and return the picture's path.

    Raises:
        UsageError: writing failed.
    """
    buffer = io.BytesIO()
    draw(history, report).savefig(buffer, format="png")
    path = folder / FILE_NAME
    replace_file(path, lambda file: file.write(buffer.getvalue()))
    return path


def _draw_loss(axes: Any, history: History) -> None:
    losses = [record.loss for record in history.steps]
    steps = list(range(1, len(losses) + 1))
    curve = smoothed(losses)
    axes.plot(steps, losses, color=_BLUE, alpha=0.3, linewidth=1.0)
    axes.plot(steps[: len(curve)], curve, color=_BLUE, linewidth=2.0, label="training loss (running median)")
    if history.held_out:
        at = sorted(history.held_out)
        axes.plot(
            at,
            [history.held_out[step] for step in at],
            color=_GREEN,
            linewidth=1.2,
            linestyle=(0, (4, 2)),
            marker="o",
            markersize=4,
            label="held-out loss",
        )
    clipped = _numbers(history, StepKind.CLIPPED)
    skipped = _numbers(history, StepKind.SKIPPED)
    axes.plot(
        clipped,
        [losses[step - 1] for step in clipped],
        linestyle="none",
        marker="v",
        markersize=5.5,
        color=_ORANGE,
        markeredgecolor="white",
        markeredgewidth=0.5,
        label=f"clipped ({len(clipped)})",
    )
    axes.plot(
        skipped,
        [losses[step - 1] for step in skipped],
        linestyle="none",
        marker="X",
        markersize=9,
        color=_RED,
        markeredgecolor="white",
        markeredgewidth=0.8,
        zorder=5,
        label=f"skipped, Inf or NaN ({len(skipped)})",
    )
    _mark_skipped(axes, skipped)
    axes.set_ylabel("loss (nats per byte)")


def _draw_norm(axes: Any, history: History, max_grad_norm: float) -> None:
    norms = [record.grad_norm for record in history.steps]
    steps = list(range(1, len(norms) + 1))
    finite = [norm if math.isfinite(norm) else math.nan for norm in norms]
    kept = [norm for norm in norms if math.isfinite(norm) and norm > 0.0] or [1.0]
    axes.plot(steps, finite, color=_BLUE, linewidth=1.2)
    if math.isfinite(max_grad_norm):
        above = [norm > max_grad_norm for norm in finite]
        axes.fill_between(
            steps, finite, max_grad_norm, where=above, interpolate=True, color=_ORANGE, alpha=0.35, linewidth=0
        )
        axes.axhline(
            max_grad_norm, color=_ORANGE, linewidth=1.2, linestyle=(0, (5, 2)), label=f"clipped above {max_grad_norm:g}"
        )
        axes.legend(loc="upper right", fontsize=9, framealpha=0.9, edgecolor="none", borderaxespad=0.1)
    _mark_skipped(axes, _numbers(history, StepKind.SKIPPED))
    axes.set_yscale("log")
    shown = [*kept, max_grad_norm] if math.isfinite(max_grad_norm) else kept
    axes.set_ylim(min(shown) / 1.3, max(shown) * 1.3)
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if max(kept) < 100 * min(kept) else (1,)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_ylabel("gradient norm")
    axes.set_xlabel("step")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.margins(x=0.015)


def _mark_skipped(axes: Any, skipped: list[int]) -> None:
    for step in skipped:
        axes.axvline(step, color=_RED, linewidth=1.0, alpha=0.55, zorder=1)


def _numbers(history: History, kind: StepKind) -> list[int]:
    return [number for number, record in enumerate(history.steps, 1) if record.kind is kind]


def _summary(report: Report) -> str:
    parts = [
        f"{report.parameters / 1e6:,.1f} M parameters in {report.dtype}",
        f"{report.steps} steps",
        f"loss {report.losses[0]:.2f} \N{RIGHTWARDS ARROW} {report.final_loss:.2f}",
        f"{report.tokens_per_second:,.0f} tokens/s",
        f"{report.isa}, {report.threads} thread{'' if report.threads == 1 else 's'}",
    ]
    return "   \N{MIDDLE DOT}   ".join(parts)
