"""Runs a function in a forked child, where a crash, a hang or a fresh thread pool is an outcome to look at."""

import faulthandler
import functools
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import superadam


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
        if hasattr(sys.modules.get("torch"), "set_num_threads"):  # whose OpenMP waits for threads that were not forked
            sys.modules["torch"].set_num_threads(1)
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


def in_child(test: Callable[..., object]) -> Callable[..., None]:
    """Let a test run in a forked child, which begins with one thread and an empty pool."""

    @functools.wraps(test)
    def run(**arguments: Any) -> None:
        assert exit_code_of_child(lambda: test(**arguments)) == 0

    return run


def without_torch(code: str) -> list[str]:
    """Return a command that runs code in a new Python, without torch, whose import takes seconds.

    `superadam` imports none of its modules by itself there.
    """
    begin = "import sys, types; sys.path.append(sys.argv[1])"
    for name in ("superadam", "torch"):
        begin += f"; {name} = sys.modules['{name}'] = types.ModuleType('{name}')"
    begin += "; superadam.__path__ = sys.argv[2:]"
    return [sys.executable, "-c", f"{begin}\n{code}", str(Path(__file__).parents[1]), *superadam.__path__]


def killed_at(number: int, work: Callable[[], object]) -> None:
    """Call `work`, and kill this process before its so-manyth call to the file system."""
    left = [number]

    def count(event: str, arguments: tuple[Any, ...]) -> None:
        if event.startswith(("os.", "shutil.", "fcntl.")) or event == "open":
            left[0] -= 1
            if left[0] == -1:  # killing is a call, too
                os.kill(os.getpid(), signal.SIGKILL)

    os.fsync = lambda descriptor, fsync=os.fsync: (count("os.fsync", ()), fsync(descriptor))[1]
    sys.addaudithook(count)  # before every call
    work()


def memory_of_process(name: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{name}:"))
    return 1024 * int(line.split()[1])
