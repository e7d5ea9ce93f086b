"""Saving in the background: the thread that writes, and the process group that it talks through."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager, suppress
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch.distributed as dist

from superadam.integrations.checkpoint_folder import CheckpointError
from superadam.kernels.torch_private import timeout_of

_logger = logging.getLogger("superadam")

beginning = threading.RLock()
"""Held while a save in the background begins: one thread after the other, each when the save before has ended.

A signal handler that saves meanwhile is refused as another process would be."""

_under_way: Future[None] | None = None


def _begin_anew() -> None:
    """Of a forked child: neither the save's thread nor one that holds the lock is there."""
    global beginning, _under_way
    beginning, _under_way = threading.RLock(), None


os.register_at_fork(after_in_child=_begin_anew)


def start(work: Callable[[], object], context: AbstractContextManager[object]) -> None:
    """Run this in a context, in a thread for whose end the interpreter waits; at once where none can start.

    While it ends, the interpreter waits for no other threads than it did before.
    """
    global _under_way
    result = _under_way = Future[None]()
    with suppress(RuntimeError):
        if threading.main_thread().is_alive():
            threading.Thread(target=_run, args=(work, context, result), name="superadam-save").start()
            return
    _run(work, context, result)


def _run(work: Callable[[], object], context: AbstractContextManager[object], result: Future[None]) -> None:
    try:
        with context:
            work()
    except BaseException as error:
        if not threading.main_thread().is_alive():  # no call will come
            _logger.error("%s", error)
        result.set_exception(error)
    else:
        result.set_result(None)


def wait() -> None:
    """Wait for the save that `save(..., wait=False)` has begun, if there is one.

    Every rank calls this before `destroy_process_group()`. The next `save` or `load`, and the end of the interpreter,
    wait as well.

    Raises:
        CheckpointError: that save failed on some rank; what was saved before is as it was. It is raised once.
    """
    global _under_way
    if _under_way is None:
        return
    error = _under_way.exception()  # after Ctrl-C, Python 3.11 takes a thread that was being joined for ended
    _under_way = None
    if isinstance(error, CheckpointError):
        raise error
    if error is not None:
        reason = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        raise CheckpointError(
            f"cannot end a save in the background: {reason}; earlier ones are as they were: call wait() before "
            "destroy_process_group(), and see whether a rank has ended"
        ) from error


_groups: WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = WeakKeyDictionary()


def gloo_group_of(group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """Return a gloo group of the same ranks, made once, on which collectives run at the same time as those of training.

    It waits for ranks as long as the given one does. After `destroy_process_group()` another one is made; a save under
    way keeps its own. Where torch.distributed is not used, None. Signals have to be deferred: a rank that an interrupt
    keeps from this would make another group alone.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return None
    key: Any = group or dist.group.WORLD
    if key not in _groups:
        ranks = dist.get_process_group_ranks(key)
        is_part = len(ranks) < dist.get_world_size()
        made = dist.new_group(ranks, backend="gloo", timeout=timeout_of(key), use_local_synchronization=is_part)
        _groups[key] = cast(dist.ProcessGroup, made)
    return _groups[key]
