"""Ctrl-C at one line after another of what may be interrupted anywhere."""

import gc
import sys
import warnings
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any


def interrupt_at_each_line(work: Callable[[], object], is_traced: Callable[[CodeType], bool]) -> int:
    """Call until it gets to its end, each time with Ctrl-C at the next line of this code; return how many there were.

    All exceptions are kept until then, and with them their frames, as a notebook keeps them.
    """
    kept: list[KeyboardInterrupt] = []
    left = 0

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal left
        if not is_traced(frame.f_code):
            return None
        left -= 1
        if left == 0:
            sys.settrace(None)
            raise KeyboardInterrupt
        return trace

    for number in range(1, 1000):
        left = number
        try:
            sys.settrace(trace)
            work()
        except KeyboardInterrupt as error:
            kept.append(error)
        finally:
            sys.settrace(None)
        if len(kept) < number:
            break
    count = len(kept)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # of files that were open then
        kept.clear()
        gc.collect()
    return count
