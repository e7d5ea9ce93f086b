"""Tells listeners of what is done already: statistics, traces, and what learns from steps.

They can neither fail it nor change it. An error of theirs is logged, once in a process for each of them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from superadam.host.signals import THIS_THREAD

_logger = logging.getLogger("superadam")
_failed: set[str] = set()  # whose errors were logged


def tell(what: str, listener: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Call a listener, and return what it returns, None where it raised an `Exception`; `what` names it in the log."""
    with THIS_THREAD.without_handlers:  # what a signal's handler raises is the program's
        try:
            return listener(*arguments, **options)
        except Exception:
            with suppress(Exception):  # of a handler of the log's
                if what not in _failed:
                    _failed.add(what)
                    _logger.error("%s failed, which changes no step; training goes on without", what, exc_info=True)
            return None
