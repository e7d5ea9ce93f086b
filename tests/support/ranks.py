"""Runs a test on several ranks that talk through gloo, in processes that stay for the next tests of a file."""

import atexit
import ctypes
import functools
import gc
import importlib.util
import inspect
import itertools
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import distributed as dist

_preloaded = [
    "pytest",
    "torch._dynamo",
    "torch.distributed.fsdp",
    "torch.distributed.checkpoint.state_dict",
    "superadam",
]
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
    def __init__(self, target: Callable[..., None], *arguments: Any) -> None:
        self.connection, theirs = _processes.Pipe()
        self.process = _processes.Process(target=target, args=(theirs, *arguments), daemon=True)
        self.process.start()
        theirs.close()


_ranks: list[_Worker] = []

MOST_RUNS = 8
"""Of processes that stay: gloo's threads outlive their groups, and go on looking for something to do."""

_runs = itertools.count(1)


def end_workers(first: int = 0) -> None:
    while len(_ranks) > first:
        _ranks.pop().process.kill()


def run(work: Callable[..., Any], ranks: int, /, **arguments: Any) -> list[Any]:
    """Call `work(rank, **arguments)`, which its module holds, on so many ranks; return what each returned.

    For a rank that ended its process that is `ENDED`.

    Raises:
        RankError: on a rank, something was raised, or it hung.
    """
    while len(_ranks) < ranks:
        _ranks.append(_Worker(_serve))
    here = _ranks[:ranks]
    with tempfile.TemporaryDirectory() as folder:
        for rank, worker in enumerate(here):
            worker.connection.send((inspect.getfile(work), work.__name__, rank, ranks, f"{folder}/store", arguments))
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
                results[left.pop(connection)] = _received(connection)
    ended = [rank for rank in range(ranks) if results[rank] == ENDED or isinstance(results[rank], RankError)]
    if ended:
        end_workers(ended[0])  # the later ones, too: torch remembers which rank a process was
    if next(_runs) % MOST_RUNS == 0:
        end_workers()
    failures = [f"rank {rank}: {result}" for rank, result in sorted(results.items()) if isinstance(result, RankError)]
    if failures:
        raise RankError("\n".join(failures))
    return [results[rank] for rank in range(ranks)]


class Ending(NamedTuple):
    """How a rank ended."""

    result: Any  # of its work, or the exception that it raised, as in its traceback's last line; `ENDED` without either
    status: int  # of its process, or minus the number of the signal that ended it


def run_apart(work: Callable[..., Any], ranks: int, cases: Sequence[dict[str, Any]]) -> list[list[Ending]]:
    """Call `work(rank, **case)` for all cases at once, on so many ranks each, which then end as a program does.

    Where all others of a case have ended, ranks that are stopped go on. The first case's end with all of Python's
    finalization. Results have to be small.

    Raises:
        RankError: a rank hung.
    """
    with tempfile.TemporaryDirectory() as folder:
        workers = [[_Worker(_be_a_program) for _ in range(ranks)] for _ in cases]
        for number, (case, here) in enumerate(zip(cases, workers, strict=True)):
            for rank, worker in enumerate(here):
                job = inspect.getfile(work), work.__name__, rank, ranks, f"{folder}/{number}", case
                worker.connection.send((number == 0, *job))
        every = [worker for here in workers for worker in here]
        deadline = time.monotonic() + SECONDS
        while (left := [worker for worker in every if worker.process.is_alive()]) and time.monotonic() < deadline:
            wait([worker.process.sentinel for worker in left], 0.2)
            for here in workers:
                alive = [worker.process for worker in here if worker.process.is_alive()]
                if len(alive) < ranks and all(map(_is_stopped, alive)):
                    for process in alive:
                        os.kill(process.pid, signal.SIGCONT)
        for worker in left:
            worker.process.kill()
        if left:
            raise RankError(f"these hung: {[cases[n] for n, here in enumerate(workers) if set(here) & set(left)]}")
        return [[_ending(worker) for worker in here] for here in workers]


def start(work: Callable[..., None], *arguments: Any) -> BaseProcess:
    """Call `work(*arguments)`, which its module holds, in a process of its own, which may start others."""
    process = _processes.Process(target=_call, args=(inspect.getfile(work), work.__name__, arguments))
    process.start()
    return process


def _call(path: str, name: str, arguments: tuple[Any, ...]) -> None:
    getattr(_module(path), name)(*arguments)


def _is_stopped(process: Any) -> bool:
    try:
        text = Path(f"/proc/{process.pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return text.rpartition(")")[2].split()[0] == "T"


def _ending(worker: _Worker) -> Ending:
    worker.process.join()
    return Ending(_received(worker.connection), worker.process.exitcode)


def _received(connection: Any) -> Any:
    try:
        return connection.recv()
    except EOFError:
        return ENDED


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


def raises(error: type[Exception] | tuple[type[Exception], ...], pattern: str, call: Callable[[], object]) -> None:
    """Check that on this rank, a call raises an error that is one sentence."""
    with pytest.raises(error, match=pattern) as caught:
        call()
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 450


@functools.cache
def _module(path: str) -> Any:
    name = f"on_rank_{Path(path).stem}"
    spec: Any = importlib.util.spec_from_file_location(name, path)
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    gc.freeze()  # collections pass over what was imported
    return module


def _joined(path: str, name: str, rank: int, ranks: int, store: str, arguments: dict[str, Any]) -> Callable[[], Any]:
    """Join the other ranks, and return what to do."""
    torch.set_num_threads(1)
    work = getattr(_module(path), name)
    dist.init_process_group(
        "gloo", store=dist.FileStore(store, ranks), rank=rank, world_size=ranks, timeout=timedelta(seconds=SECONDS)
    )
    dist.barrier()  # a rank that is done might leave while another one still connects
    return functools.partial(getattr(work, "__wrapped__", work), rank, **arguments)


def _be_a_program(connection: Connection) -> None:
    """Do one job, and end as the interpreter does after a script, with an error if there was one.

    Python's finalization, after the last thread and handler, takes a second, and is left out where not asked for.
    """
    status = 0
    finalizes, *job = connection.recv()
    try:
        result: Any = _joined(*job)()
    except Exception as error:
        sys.last_value = error  # which keeps alive what its frames hold
        result, status = "".join(traceback.format_exception_only(error)), 1
    connection.send(result)
    connection.close()
    if finalizes:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # Triton's bindings tell of what they leak
        ctypes.pythonapi.Py_Exit(status)
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    os._exit(status)


def _serve(connection: Connection) -> None:
    while True:
        try:
            job = connection.recv()
        except EOFError:
            os._exit(0)
        try:
            if dist.is_initialized():  # kept until all ranks are done: who leaves cuts off those that still read
                dist.destroy_process_group()
            result: Any = _joined(*job)()
        except BaseException:
            result = RankError(traceback.format_exc())
        connection.send(result)
