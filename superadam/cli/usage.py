"""`UsageError`, which a command raises for input that the user can correct; library code never does.

`superadam.cli.main` turns it into one sentence on stderr and exit status 2.
"""

from __future__ import annotations


class UsageError(Exception):
    """A command cannot do what it was asked; the message says what was wrong, what was expected and what to do."""
