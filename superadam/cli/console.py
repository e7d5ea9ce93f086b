"""The console that commands print to, and their tables: rich's, which is optional: imported where they are used."""

from __future__ import annotations

from typing import Any

import rich.console
from rich import box
from rich.table import Table

LEAST_WIDTH = 60
"""In characters: a terminal that says that it has fewer, as some say 0, gets this many; else columns would be lost."""


class Console(rich.console.Console):
    """Prints words as they are, and raises BrokenPipeError as any other error of its stream instead of ending."""

    def __init__(self, *, least_width: int = LEAST_WIDTH, **how: Any) -> None:
        super().__init__(highlight=False, markup=False, emoji=False, **how)
        self.width = max(self.width, least_width)

    def on_broken_pipe(self) -> None:
        """Raise what rich has caught."""
        raise


def new_table(*columns: str, gap: int = 1, **how: Any) -> Table:
    """Return a table without rows, whose columns stand to the right but for the first, with a gap between them.

    `how` are further arguments of rich's `Table`.
    """
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, gap, 0, 0), header_style="bold", **how)
    for name in columns:
        table.add_column(name, justify="right" if table.columns else "left", no_wrap=True)
    return table
