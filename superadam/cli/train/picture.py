"""The picture of a run, with matplotlib: loss, gradient norm, and a mark for every step that was clipped or skipped.

It needs no display, and leaves matplotlib's global settings alone.
"""

from __future__ import annotations

import io
import math
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

import superadam
from superadam import StepKind
from superadam.cli.train.history import History
from superadam.cli.train.loop import Trainer
from superadam.cli.train.verification import Verification
from superadam.host.files import replace_file

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
    "axes.xmargin": 0.015,
    "grid.color": _PALE,
    "grid.linewidth": 0.8,
    "legend.frameon": False,
    "legend.fontsize": 9,
    "xtick.color": _GREY,
    "ytick.color": _GREY,
    "text.color": _INK,
}

_SPAN = 8
"""Steps on either side that the smoothed loss takes in."""


def smoothed(values: list[float]) -> list[float]:
    """Return the median around each value, but for the last ones, after which too few follow for it to mean much.

    The ends are continued by their mirror image, turned upside down, so that the curve begins at the first value.
    """
    padded = np.pad(values, _SPAN, mode="reflect", reflect_type="odd")
    medians = np.median(np.lib.stride_tricks.sliding_window_view(padded, 2 * _SPAN + 1), axis=1)
    shown: list[float] = medians[: max(1, len(values) - _SPAN // 2)].tolist()
    return shown


def draw(trainer: Trainer, found: Verification | None) -> Figure:
    """Return the figure of a run with at least one step."""
    history, settings = trainer.history, trainer.settings
    with rc_context(_STYLE):
        figure = Figure(figsize=(10, 6.6), dpi=150, facecolor="white")
        top, bottom = figure.subplots(
            2, 1, sharex=True, gridspec_kw={"height_ratios": (1.7, 1.0), "hspace": 0.1, "top": 0.845, "bottom": 0.085}
        )
        figure.subplots_adjust(left=0.075, right=0.975)
        _draw_loss(top, history)
        _draw_norm(bottom, history, settings.max_grad_norm)
        for axes in (top, bottom):
            for step in _numbers(history, StepKind.SKIPPED):
                axes.axvline(step, color=_RED, linewidth=1.0, alpha=0.55, zorder=1)
        threads, trained = superadam.get_num_threads(), len(history.steps) * settings.batch * settings.seq
        parts = [
            f"{trainer.parameters / 1e6:,.1f} M parameters in {settings.dtype}",
            f"{len(history.steps)} steps",
            f"loss {history.steps[0].loss:.2f} \N{RIGHTWARDS ARROW} {history.final_loss:.2f}",
            f"{trained / history.seconds:,.0f} tokens/s",
            f"{superadam.active_isa()}, {threads} thread{'' if threads == 1 else 's'}",
        ]
        figure.text(0.075, 0.955, "superadam train", fontsize=15, fontweight="bold")
        figure.text(0.075, 0.918, "   \N{MIDDLE DOT}   ".join(parts), fontsize=9.5, color=_GREY)
        if found is not None:
            words = f"{found.elements_differing:,} of {found.elements:,} elements differ from torch"
            figure.text(0.975, 0.955, words, ha="right", fontsize=11, color=_RED if found.is_failed else _GREEN)
        figure.legend(
            *top.get_legend_handles_labels(),
            loc="upper left",
            bbox_to_anchor=(0.068, 0.908),
            ncols=6,
            columnspacing=1.6,
            handletextpad=0.5,
            borderaxespad=0.0,
        )
    return figure


def write(trainer: Trainer, found: Verification | None, path: Path) -> None:
    """Draw a run; raises OSError."""
    buffer = io.BytesIO()
    draw(trainer, found).savefig(buffer, format="png")
    replace_file(path, lambda file: file.write(buffer.getvalue()))


def _draw_loss(axes: Any, history: History) -> None:
    losses = [record.loss for record in history.steps]
    steps = range(1, len(losses) + 1)
    axes.plot(steps, losses, color=_BLUE, alpha=0.3, linewidth=1.0)
    curve = smoothed(losses)
    axes.plot(steps[: len(curve)], curve, color=_BLUE, linewidth=2.0, label="training loss (running median)")
    held_out = sorted(history.held_out.items())
    axes.plot(*zip(*held_out, strict=True), "o--", color=_GREEN, linewidth=1.2, markersize=4, label="held-out loss")
    for kind, words, mark, colour, size in (
        (StepKind.CLIPPED, "clipped", "v", _ORANGE, 5.5),
        (StepKind.SKIPPED, "skipped, Inf or NaN", "X", _RED, 9),
    ):
        at = _numbers(history, kind)
        axes.plot(
            at,
            [losses[step - 1] for step in at],
            mark,
            color=colour,
            markersize=size,
            markeredgecolor="white",
            markeredgewidth=0.5,
            zorder=5,
            label=f"{words} ({len(at)})",
        )
    axes.set_ylabel("loss (nats per byte)")


def _draw_norm(axes: Any, history: History, max_grad_norm: float) -> None:
    norms = [record.grad_norm for record in history.steps]
    steps = range(1, len(norms) + 1)
    finite = [norm if math.isfinite(norm) else math.nan for norm in norms]
    kept = [norm for norm in norms if math.isfinite(norm) and norm > 0.0] or [1.0]
    shown = kept
    axes.plot(steps, finite, color=_BLUE, linewidth=1.2)
    if math.isfinite(max_grad_norm):
        shown = [*kept, max_grad_norm]
        above = [norm > max_grad_norm for norm in finite]
        axes.fill_between(
            steps, finite, max_grad_norm, where=above, interpolate=True, color=_ORANGE, alpha=0.35, linewidth=0
        )
        label = f"clipped above {max_grad_norm:g}"
        axes.axhline(max_grad_norm, color=_ORANGE, linewidth=1.2, linestyle=(0, (5, 2)), label=label)
        axes.legend(loc="upper right", frameon=True, framealpha=0.9, edgecolor="none", borderaxespad=0.1)
    axes.set_yscale("log")
    axes.set_ylim(min(shown) / 1.3, max(shown) * 1.3)
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if max(kept) < 100 * min(kept) else (1,)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_ylabel("gradient norm")
    axes.set_xlabel("step")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def _numbers(history: History, kind: StepKind) -> list[int]:
    return [number for number, record in enumerate(history.steps, 1) if record.kind is kind]
