"""Runs a test on several ranks that talk through gloo, in processes that stay for the next test."""

from __future__ import annotations

import functools
import importlib.util
import inspect
import multiprocessing
import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist

_preloaded = ["pytest", "torch.distributed.fsdp", "torch.distributed.checkpoint.state_dict", "superadam"]
ENDED = "ended"

SECONDS = 240
"""After which a rank hangs: many more than a loaded machine needs."""

SECONDS_AFTER_FAILURE = 5
"""After which ranks are stopped that wait for one that failed."""

_processes = multiprocessing.get_context("forkserver")
_processes.set_forkserver_preload(_preloaded)


def preload(module: str) -> None:
    """Let ranks be forked from a process that has imported this module; only before the first one is."""
    _preloaded.append(module)


class RankError(AssertionError):
    """A test failed on a rank, with the rank's traceback."""


class _Worker:
    def __init__(self) -> None:
        self.connection, theirs = _processes.Pipe()
        self.process = _processes.Process(target=_serve, args=(theirs,), daemon=True)
        self.process.start()
        theirs.close()


_workers: list[_Worker] = []


def run(work: Callable[..., Any], ranks: int, /, **arguments: Any) -> list[Any]:
    """Call `work(rank, **arguments)`, which its module holds, on so many ranks; return what each returned.

    For a rank that ended its process that is `ENDED`.

    Raises:
        RankError: on a rank, something was raised, or it hung.
    """
    while len(_workers) < ranks:
        _workers.append(_Worker())
    here = _workers[:ranks]
    with tempfile.TemporaryDirectory() as folder:
        for rank, worker in enumerate(here):
            job = inspect.getfile(work), work.__name__, rank, ranks, f"{folder}/store", arguments
            worker.connection.send(job)
        results: dict[int, Any] = {}
        left = {worker.connection: rank for rank, worker in enumerate(here)}
        while left:
            has_failed = any(isinstance(result, RankError) for result in results.values())
            ready = wait(list(left), SECONDS_AFTER_FAILURE if has_failed else SECONDS)
            if not ready:
                for rank in left.values():
                    results[rank] = RankError(f"rank {rank} hung")
                break
            for connection in ready:
                assert isinstance(connection, Connection)
                rank = left.pop(connection)
                try:
                    results[rank] = connection.recv()
                except EOFError:
                    results[rank] = ENDED
    ended = [rank for rank in range(ranks) if results[rank] == ENDED or isinstance(results[rank], RankError)]
    while ended and len(_workers) > ended[0]:  # the others, too: torch remembers which rank a process was
        worker = _workers.pop()
        worker.process.kill()
        worker.process.join()
    failures = [f"rank {rank}: {result}" for rank, result in sorted(results.items()) if isinstance(result, RankError)]
    if failures:
        raise RankError("\n".join(failures))
    return [results[rank] for rank in range(ranks)]


def on_ranks(ranks: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make a function of a rank, and of further arguments that can be pickled, a test that runs on so many ranks."""

    def decorate(work: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(work)
        def test(**arguments: Any) -> None:
            assert run(work, ranks, **arguments) == [None] * ranks

        signature = inspect.signature(work)
        test.__signature__ = signature.replace(parameters=list(signature.parameters.values())[1:])  # type: ignore[attr-defined]
        return test

    return decorate


@functools.cache
def _module(path: str) -> Any:
    name = f"on_rank_{Path(path).stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _serve(connection: Connection) -> None:
    torch.set_num_threads(1)
    while True:
        try:
            path, name, rank, ranks, store, arguments = connection.recv()
        except EOFError:
            os._exit(0)
        try:
            work = getattr(_module(path), name)
            dist.init_process_group(
                "gloo",
                store=dist.FileStore(store, ranks),
                rank=rank,
                world_size=ranks,
                timeout=timedelta(seconds=SECONDS),
            )
            dist.barrier()  # a rank that is done might leave while another one still connects
            try:
                result: Any = getattr(work, "__wrapped__", work)(rank, **arguments)
            finally:
                dist.destroy_process_group()
        except BaseException:
            result = RankError(traceback.format_exc())
        connection.send(result)
