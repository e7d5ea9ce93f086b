"""The results of `bench/pace.py` as a table and as JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from measures.gradient_norms import MAX_NORM
from measures.paced_device import H200
from measures.pacing import CLIP_EVERY, Row, Settings, SideResult
from superadam.cli.bench.report import in_words
from superadam.cli.console import new_table

_NAMES = {"clock": "clock", "auto": "auto", "best": "best fixed", "after_backward": "no overlap", "torch": "torch"}

LIMITS = (
    "A paced device cannot show contention for host memory or links, the cost of launching kernels, or "
    "autograd's device thread."
)


def to_table(rows: Sequence[Row]) -> Table:
    """Return the table: for each row the clock, "auto", the best fixed placement, and the sides without overlap."""
    title = f"{in_words(rows[0].parameters)} parameters in {rows[0].layers} tensors"
    table = new_table("side", title=title, title_justify="left")
    table.add_column("placement", no_wrap=True, style="dim")
    for name in ("ms", "/clock", "hidden", "accepted", "redone"):
        table.add_column(name, justify="right", no_wrap=True, style="bold" if name == "/clock" else "")
    for row in rows:
        table.add_section()
        table.add_row(f"{row.ratio:.2f} x {1e3 * row.adam_seconds:.0f} ms", style="bold")
        for name, words in _NAMES.items():
            table.add_row(f"  {words}", *_columns(getattr(row, name)))
    return table


def _columns(side: SideResult) -> list[str]:
    return [
        side.placement,
        f"{1e3 * side.typical_seconds:.1f}",
        f"{side.over_clock:.2f}",
        f"{side.hidden_share:.0%}",
        *([f"{side.accepted:.0%}", f"{side.redone:.0%}"] if side.placement else ["", ""]),
    ]


def steps_in_words(row: Row) -> str:
    """Return how many steps were clipped, their norms, and the learning rate: the same in all rows of a run."""
    return (
        f"{row.clipped_share:.0%} of the steps clipped, norms {row.lowest_norm:.3g} to {row.highest_norm:.3g}, limit "
        f"{MAX_NORM:g}, learning rate {row.lr:g}"
    )


def notes(rows: Sequence[Row], settings: Settings) -> list[str]:
    """Return explanations of the table."""
    times = f"without the clipped steps, one in {CLIP_EVERY}"
    if settings.clipped is not None:
        times = "of steps that are clipped and of others, weighted by their number"
    return [
        f"{steps_in_words(rows[0])}.",
        "Sections: backward's time as a multiple of the CPU's Adam time, which is that of a plain step on all "
        "threads. Sides: the device alone; the scheduler; its best fixed placement; superadam's and "
        "torch's step, with gradients and new values travelling after backward.",
        f"Gradients travel at {H200.download / 1e9:g} GB/s, new values at {H200.upload / 1e9:g}; the device's memory "
        f"has {H200.memory / 1e12:g} TB/s. Medians of {settings.rounds} interleaved turns {times}. hidden: of Adam's "
        "time, what an iteration does not take longer than the clock. accepted: of all tensors, those whose "
        "speculation was published; redone: those updated again with the verdict; the others were updated once, with "
        "the verdict.",
        "Placements: resident buckets, elements of a bucket, threads; fixed were "
        + "; ".join(dict.fromkeys(side.placement for row in rows for side in row.placements))
        + ".",
        LIMITS,
    ]


def to_json(environment: Mapping[str, Any], settings: Settings, rows: Sequence[Row]) -> dict[str, Any]:
    """Return all results as plain values in seconds, bytes per second and elements."""
    return {
        "environment": environment,
        "rates": dataclasses.asdict(H200),
        **dataclasses.asdict(settings),
        "rows": [dataclasses.asdict(row) | {"ratio": row.ratio, "best": row.best.placement} for row in rows],
    }
