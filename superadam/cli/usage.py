"""`UsageError`, which commands raise for input that can be corrected; `main` makes it a sentence and status 2."""

from __future__ import annotations

from importlib.util import find_spec


class UsageError(Exception):
    """A command cannot do what it was asked; the message says what was wrong, what was expected and what to do."""


def require_modules(command: str, *modules: str, extra: str = "cli") -> None:
    """Raise UsageError unless the optional modules that a command needs are installed."""
    for module in modules:
        if find_spec(module) is None:
            raise UsageError(f"'superadam {command}' needs {module}; install it with: pip install 'superadam[{extra}]'")
