"""The console that commands print to: rich's, which is optional, so that this is imported where it is used."""

from __future__ import annotations

import rich.console


class Console(rich.console.Console):
    """Raises BrokenPipeError as any other error of its stream, instead of ending the process."""

    def on_broken_pipe(self) -> None:
        """Raise what rich has caught."""
        raise
