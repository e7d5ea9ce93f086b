"""Saving beside training: the thread that writes, and the process group that it talks through."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from typing import Any, cast

import torch.distributed as dist

from superadam.integrations.checkpoint_folder import CheckpointError
from superadam.kernels.torch_private import timeout_of

_logger = logging.getLogger("superadam")


# ---- the thread ------------------------------------------------------------------------------------------------------


class _Save:
    """A save under way, or one that has ended and was not waited for."""

    def __init__(self, work: Callable[[], object]) -> None:
        self._process, self._work = os.getpid(), work
        self._error: BaseException | None = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="superadam-save")  # which the interpreter's end awaits
        self._thread.start()

    def _run(self) -> None:
        try:
            self._work()
        except BaseException as error:
            self._error = error
            if not threading.main_thread().is_alive():  # no call will come
                _logger.error("%s", error)
        finally:
            del self._work
            self._ended.set()

    def join(self) -> None:
        if os.getpid() == self._process:  # in a forked process there is no such thread
            self._ended.wait()  # after Ctrl-C, Python 3.11 takes a thread that was being joined for ended
            self._thread.join()

    def raise_failure(self) -> None:
        if os.getpid() == self._process:
            if isinstance(self._error, CheckpointError):
                raise self._error
            if self._error is not None:
                raise CheckpointError(
                    f"cannot end a save beside training: {type(self._error).__name__}: "
                    f"{(str(self._error).splitlines() or [''])[0]}; earlier ones are as they were: call wait() before "
                    "destroy_process_group(), and see whether a rank has ended"
                ) from self._error


beginning = threading.Lock()
"""Held while a save beside training begins: one thread after the other, each when the save before has ended."""


def _renew_lock() -> None:
    """Of a forked child: no thread is there that would give back what was held."""
    global beginning
    beginning = threading.Lock()


os.register_at_fork(after_in_child=_renew_lock)

_under_way: _Save | None = None


def start(work: Callable[[], object]) -> None:
    """Run this beside training."""
    global _under_way
    _under_way = _Save(work)


def wait() -> None:
    """Wait for the save that `save(..., wait=False)` has begun, if there is one.

    Every rank calls this before `destroy_process_group()`. The next `save` or `load`, and the end of the interpreter,
    wait as well.

    Raises:
        CheckpointError: that save failed on some rank; what was saved before is as it was. It is raised once.
    """
    global _under_way
    if _under_way is not None:
        save = _under_way
        save.join()  # where Ctrl-C leaves it to the next call
        _under_way = None
        save.raise_failure()


# ---- the process group -----------------------------------------------------------------------------------------------

_groups: dict[object, tuple[object, dist.ProcessGroup]] = {}


def group_beside(group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """Return a gloo group of the same ranks, made once, on which collectives run beside those of training.

    It waits for ranks as long as the given one does. After `destroy_process_group()` another one is made; a save under
    way keeps its own. Where torch.distributed is not used, None.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return None
    world: Any = dist.group.WORLD
    for known in [known for known, (of_world, _) in _groups.items() if of_world is not world]:
        del _groups[known]  # of a job before
    key = group or world
    if key not in _groups:
        ranks = dist.get_process_group_ranks(key)
        made = dist.new_group(
            ranks,
            backend="gloo",
            timeout=timeout_of(key),
            use_local_synchronization=len(ranks) < dist.get_world_size(),
        )
        _groups[key] = world, cast(dist.ProcessGroup, made)
    return _groups[key][1]
