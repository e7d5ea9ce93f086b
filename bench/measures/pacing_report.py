"""The results of `bench/pace.py` as a table, as JSON, and as a picture (matplotlib, without a display)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator, PercentFormatter
from rich.table import Table

from measures.gradient_norms import MAX_NORM
from measures.pacing import CLIP_EVERY, Row, Settings, SideResult
from superadam.cli.bench.report import Environment, in_words
from superadam.cli.console import new_table

# A colour-blind safe set: Okabe & Ito, "Color Universal Design", 2008.
_SIDES = {"auto": "#0072B2", "best": "#009E73", "after_backward": "#E69F00", "torch": "#D55E00"}
_NAMES = {
    "clock": "clock",
    "auto": "auto",
    "best": "best fixed",
    "after_backward": "no overlap",
    "torch": "torch",
}
_GREY = "#6B7280"

LIMITS = (
    "A device made of time cannot show contention for host memory or links, the cost of launching kernels, or "
    "autograd's device thread."
)


def to_table(rows: Sequence[Row], settings: Settings) -> Table:
    """Return the table: for each row the clock, "auto", the best fixed placement, and the sides without overlap.

    Where a share of clipped steps was asked for, it shows what became of speculation instead of Python's time.
    """
    last = ("accepted", "redone") if settings.clipped is not None else ("Python", "us/b.")
    table = new_table("side")
    table.add_column("placement", no_wrap=True, style="dim")
    for name in ("ms", "/clock", "hidden", "waited", *last):
        table.add_column(name, justify="right", no_wrap=True, style="bold" if name == "/clock" else "")
    size = None
    for row in rows:
        table.add_section()
        if size != (size := (row.parameters, row.layers)):
            table.add_row(f"[bold]{in_words(row.parameters)}\n/ {row.layers}")
        table.add_row(f"[bold]{row.ratio:g} x {1e3 * row.adam_seconds:.0f} ms")
        for name in ("clock", *_SIDES):
            table.add_row(f"  {_NAMES[name]}", *_columns(getattr(row, name), settings))
    return table


def _columns(side: SideResult, settings: Settings) -> list[str]:
    waited = f"{1e3 * side.waited_seconds:.1f}"
    python = "" if side.python_seconds is None else f"{1e3 * side.python_seconds:.1f}"
    if settings.clipped is not None:
        last = [waited, f"{side.accepted:.0%}", f"{side.redone:.0%}"] if side.placement else [""] * 3
    elif side.placement:
        bucket = "" if side.bucket_seconds is None else f"{1e6 * side.bucket_seconds:.0f}"
        last = [waited, python, bucket]
    else:
        last = ["", python, ""]
    return [
        side.placement,
        f"{1e3 * side.typical_seconds:.1f}",
        f"{side.over_clock:.2f}",
        f"{side.hidden_share:.0%}",
        *last,
    ]


def steps_in_words(row: Row) -> str:
    """Return how many steps were clipped, their norms, and the learning rate: the same in all rows of a run."""
    return (
        f"{row.clipped_share:.0%} of the steps clipped, norms {row.lowest_norm:.3g} to {row.highest_norm:.3g}, limit "
        f"{MAX_NORM:g}, learning rate {row.lr:g}"
    )


def notes(rows: Sequence[Row], settings: Settings) -> list[str]:
    """Return explanations of the table."""
    rates = settings.rates
    if settings.clipped is None:
        times = f"without the clipped steps, one in {CLIP_EVERY}"
        more = (
            "Python: of its CPU time, without the device's own; us/b.: of that, what each bucket takes in hooks and in "
            "the step"
        )
    else:
        times = "of steps that are clipped and of others, weighted by their number"
        more = (
            "accepted: of all tensors, those whose speculation was published; redone: those updated again with the "
            "verdict; the others were updated once, with the verdict"
        )
    return [
        f"{steps_in_words(rows[0])}.",
        "Sections: parameters / layers, and backward's time as a multiple of the CPU's Adam time, which is that of a "
        "plain step on all threads. Sides: the device alone; the scheduler; its best fixed placement; superadam's and "
        "torch's step, with gradients and new values travelling after backward.",
        f"Gradients travel at {rates.download / 1e9:g} GB/s, new values at {rates.upload / 1e9:g}; the device's memory "
        f"has {rates.memory / 1e12:g} TB/s. Medians of {settings.rounds} interleaved turns {times}. hidden: of Adam's "
        "time, what an iteration does not take longer than the clock. waited: ms of the training thread for the "
        f"worker; {more}.",
        "Placements: resident buckets, elements of a bucket, threads; fixed were "
        + "; ".join(dict.fromkeys(side.placement for row in rows for side in row.placements))
        + ".",
        LIMITS,
    ]


def to_json(environment: Environment, settings: Settings, rows: Sequence[Row]) -> dict[str, Any]:
    """Return all results as plain values in seconds, bytes per second and elements."""
    plain = {field.name for field in dataclasses.fields(Row)} - {"trace"}
    return {
        "environment": dataclasses.asdict(environment),
        "rates": dataclasses.asdict(settings.rates),
        "clipped": settings.clipped,
        "rows": [
            {name: _plain(getattr(row, name)) for name in sorted(plain)} | {"best": row.best.placement} for row in rows
        ],
    }


def _plain(value: Any) -> Any:
    if isinstance(value, list):
        return [_plain(each) for each in value]
    return dataclasses.asdict(value) if isinstance(value, SideResult) else value


def draw(rows: Sequence[Row], title: str) -> Figure:
    """Return the figure: for each model, iteration over clock above, hidden share of Adam below, by ratio."""
    groups = sorted({(row.parameters, row.layers) for row in rows})
    with rc_context({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(max(7.5, 5.5 * len(groups)), 7.5), dpi=150, facecolor="white", layout="constrained")
        axes = figure.subplots(2, len(groups), sharex=True, sharey="row", squeeze=False)
        for column, (parameters, layers) in enumerate(groups):
            some = sorted((row for row in rows if (row.parameters, row.layers) == (parameters, layers)), key=_ratio)
            _draw_group(axes[0][column], axes[1][column], some)
            axes[0][column].set_title(f"{in_words(parameters)} parameters in {layers} tensors")
            axes[1][column].set_xlabel("backward's time over the CPU's Adam time")
        axes[0][0].set_ylabel("iteration over the clock alone")
        axes[1][0].set_ylabel("of Adam's time hidden")
        figure.suptitle(title)
        figure.legend(*axes[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False)
    return figure


def _ratio(row: Row) -> float:
    return row.ratio


def _draw_group(upper: Any, lower: Any, rows: Sequence[Row]) -> None:
    ratios = [row.ratio for row in rows]
    for index, row in enumerate(rows):
        for number, side in enumerate(row.placements):
            label = "each fixed placement" if index == number == 0 else None
            upper.plot(row.ratio, side.over_clock, "_", color=_GREY, markersize=9, label=label)
            lower.plot(row.ratio, side.hidden_share, "_", color=_GREY, markersize=9)
    for name, colour in _SIDES.items():
        sides: list[SideResult] = [getattr(row, name) for row in rows]
        upper.plot(ratios, [side.over_clock for side in sides], "o-", color=colour, label=_NAMES[name], markersize=4)
        lower.plot(ratios, [side.hidden_share for side in sides], "o-", color=colour, markersize=4)
    for axes, line in ((upper, 1.1), (lower, 0.9)):
        axes.axhline(line, color=_GREY, linewidth=0.8, linestyle=(0, (4, 3)))
        axes.set_xscale("log", base=2)
        axes.set_xticks(ratios, [f"{ratio:g}" for ratio in ratios])
        axes.xaxis.set_minor_locator(NullLocator())
    upper.set_yscale("log", base=2)
    ticks = [1, 1.1, 1.5, 2, 3, 4, 6, 8, 12, 16]
    upper.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    upper.yaxis.set_minor_locator(NullLocator())
    upper.set_ylim(0.97, 1.08 * max(side.over_clock for row in rows for side in (row.torch, row.auto, *row.placements)))
    lower.set_ylim(-0.03, 1.03)
    lower.yaxis.set_major_formatter(PercentFormatter(1.0))


def write(folder_and_stem: Path, text: str, rows: Sequence[Row], title: str) -> None:
    """Write `STEM.json`, `STEM.png`, and as `STEM.trace.json` the trace of the row with the ratio nearest to 1."""
    folder_and_stem.with_suffix(".json").write_text(text)
    draw(rows, title).savefig(folder_and_stem.with_suffix(".png"), format="png")
    min(rows, key=lambda row: abs(row.ratio - 1.0)).trace.write(folder_and_stem.with_suffix(".trace.json"))
