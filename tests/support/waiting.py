"""Waiting for what another thread or process does, instead of sleeping for as long as that may take."""

import time
from collections.abc import Callable

SECONDS = 200.0
"""After which what is waited for never comes: many more than a loaded machine needs."""


def wait_until(condition: Callable[[], object]) -> None:
    """Return once the condition is true; raises TimeoutError where that takes too long."""
    deadline = time.monotonic() + SECONDS
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"what was waited for did not come within {SECONDS:g} s")
        time.sleep(0.001)
