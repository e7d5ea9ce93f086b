"""The error that a command shows to the person who typed it.

Owns that one exception. Library code never raises it: it is for input that a person can mend, and `superadam.cli.main`
turns it into one sentence on stderr and exit status 2.
"""

from __future__ import annotations


class UsageError(Exception):
    """A command cannot do what it was asked; the message says what was wrong, what was expected and what to do."""
