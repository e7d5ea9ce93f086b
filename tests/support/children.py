"""Runs a function in a forked child, where a crash, a hang or a fresh thread pool is an outcome to look at."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable


def exit_code_of_child(work: Callable[[], object], seconds: float = 240.0) -> int:
    """Fork, call `work` in the child, and return its exit code: 0, 1 after an exception, or minus a signal's number.

    Raises:
        TimeoutError: the child hung: it did not end within `seconds`, which are many more than a loaded machine or an
            emulator needs, wrote the stacks of its threads to stderr, and was killed.
    """
    pid = os.fork()
    if pid == 0:
        code = 1
        faulthandler.register(signal.SIGUSR2, all_threads=True)
        try:
            work()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    os.kill(pid, signal.SIGUSR2)
    time.sleep(1)  # for its stacks
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    raise TimeoutError(f"the child did not end within {seconds} s")
