"""The processes that train one model together under torchrun, each with a shard of it and a part of every batch.

Owned here: joining them, what they exchange besides FSDP2 and superadam, and which of them tells of an error. A run of
one process is `Ranks()`, for which nothing here calls `torch.distributed`.
"""

from __future__ import annotations

import logging
import math
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, distributed, nn

from superadam.cli.usage import UsageError
from superadam.distributed.shards import local_of
from superadam.kernels.torch_private import default_store

TIMEOUT, LONGEST_TIMEOUT = 600.0, 86400.0
"""Seconds after which a process that does not answer is given up: by default, and at most."""

_PATIENCE = 5.0
"""Seconds within which a rank tells of the error that others have noticed in a collective."""

_TOLD = "superadam train: told"  # in the store of the ranks, once one of them tells


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process among those of a run.

    Attributes:
        number: of this process, from 0 on.
        count: of all.
        local, on_machine: the same among the processes of this machine.
    """

    number: int = 0
    count: int = 1
    local: int = 0
    on_machine: int = 1

    @property
    def are_several(self) -> bool:
        """Whether the model is sharded."""
        return self.count > 1

    @property
    def is_first(self) -> bool:
        """Whether this process prints and writes what there is one of."""
        return self.number == 0

    def device(self, name: str) -> torch.device:
        """Return the device of this process for what `--device` names.

        Raises:
            UsageError: it has none of its own.
        """
        device = torch.device(name)
        if not self.are_several or device.type != "cuda":
            return device
        if device.index is not None:
            raise UsageError(f"--device is {name}, expected cuda without a number, because each process takes its own")
        if self.local >= torch.cuda.device_count() > 0:
            raise UsageError(
                f"--device is cuda, and {self.on_machine} processes were started on a machine with "
                f"{torch.cuda.device_count()} GPUs; give torchrun a smaller --nproc-per-node"
            )
        torch.cuda.set_device(self.local)
        return torch.device("cuda", self.local)

    def part(self, windows: Tensor) -> Tensor:
        """Return this process's rows."""
        return windows.tensor_split(self.count)[self.number]

    def gather(self, *values: float) -> list[tuple[float, ...]]:
        """Return the values of each process, in the order of their numbers; every process calls this."""
        if not self.are_several:
            return [values]
        mine = torch.tensor(values, dtype=torch.float64, device="cpu")
        every = [torch.empty_like(mine) for _ in range(self.count)]
        distributed.all_gather(every, mine)
        return [tuple(one.tolist()) for one in every]

    def total(self, value: float) -> float:
        """Return the sum over processes, added in the order of their numbers."""
        return math.fsum(one for (one,) in self.gather(value)) if self.are_several else value

    def largest(self, value: int) -> int:
        """Return the largest of the processes' values."""
        return int(max(one for (one,) in self.gather(value)))

    def mean(self, value: float, count: int) -> float:
        """Return the mean of what the processes have means of, each over `count` things."""
        if not self.are_several:
            return value
        every = self.gather(value * count, count)
        return math.fsum(one for one, _ in every) / sum(number for _, number in every)

    def shard(self, model: nn.Module, groups: list[Any], dtype: torch.dtype, device: torch.device) -> None:
        """Shard an fp32 model on the meta device, computing with weights of `dtype`; gradients are reduced in fp32.

        Args:
            groups: modules, or lists of them, whose weights are gathered together; the model is the last.
        """
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        # Activations have the dtype in which the model computes, which on the CPU is not that of its weights.
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
        mesh = init_device_mesh(device.type, (self.count,))
        for group in groups:
            fully_shard(group, mesh=mesh, mp_policy=policy)

    @torch.no_grad()
    def fill(self, parameter: Tensor, whole: Tensor) -> None:
        """Give a parameter, of which this process may have a shard only, these values."""
        parts = whole.chunk(self.count)  # as fully_shard does
        if self.number < len(parts):
            local_of(parameter).copy_(parts[self.number])


ALONE = Ranks()


@contextmanager
def joined(timeout: float = TIMEOUT) -> Iterator[Ranks]:
    """Join the processes that torchrun started, if it did; the whole run is made inside.

    One that waits for another for `timeout` seconds gives up, with an error.

    An error that ends the run is raised in the process that is to tell of it; the others exit with status 1.
    """
    is_joined = distributed.is_available() and distributed.is_initialized()
    if not is_joined and os.environ.get("WORLD_SIZE", "1") == "1":
        yield ALONE
        return
    if not is_joined:
        try:
            backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
            distributed.init_process_group(backend, timeout=timedelta(seconds=timeout))
        except (RuntimeError, ValueError) as error:
            raise UsageError(
                f"WORLD_SIZE is {os.environ['WORLD_SIZE']}, but these processes do not find each other "
                f"({_first_line(error)}); start them with torchrun, or unset WORLD_SIZE for one process"
            ) from error
    number, count = distributed.get_rank(), distributed.get_world_size()
    local, on_machine = (
        int(os.environ.get(name, value)) for name, value in (("LOCAL_RANK", number), ("LOCAL_WORLD_SIZE", count))
    )
    logger = logging.getLogger("superadam")
    level = logger.level
    if number:
        logger.setLevel(logging.ERROR)  # the first one warns
    again = "start all of them again, with --resume to continue from the last checkpoint"
    try:
        yield Ranks(number, count, local, on_machine)
    except BaseException as error:
        if count > 1 and not _tells(error):
            raise SystemExit(1) from None
        if count == 1 or not isinstance(error, Exception) or isinstance(error, UsageError | OSError):
            raise
        if _is_consequence(error):
            raise UsageError(
                f"the processes of this run cannot go on, because one of them has ended or does not answer "
                f"({_first_line(error)}); {again}"
            ) from error
        file, line = _origin(error).tb_frame.f_code.co_filename, _origin(error).tb_lineno
        raise UsageError(
            f"process {number} has failed with {type(error).__name__}: {_first_line(error)} ({file}:{line}), so that "
            f"all have ended; {again}"
        ) from error
    else:
        if not is_joined:
            distributed.destroy_process_group()
    finally:
        logger.setLevel(level)


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0][:200]


def _tells(error: BaseException) -> bool:
    """Return whether this process tells of the error that ends the run: the first one to fail of its own."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun sends it as soon as one process has ended
    answers: list[bool] = []
    asking = threading.Thread(target=_ask_to_tell, args=(_PATIENCE * _is_consequence(error), answers), daemon=True)
    asking.start()
    asking.join(2 * _PATIENCE)
    return not answers or answers[0]  # none where the process that has the store is stopped or has ended


def _ask_to_tell(patience: float, answers: list[bool]) -> None:
    """Append whether no other process has told of an error, nor does within `patience` seconds."""
    with suppress(RuntimeError, ValueError):
        store = default_store()
        if store is None:
            return
        deadline = time.monotonic() + patience
        while not (is_told := store.check([_TOLD])) and time.monotonic() < deadline:
            time.sleep(0.05)
        answers.append(not is_told and store.add(_TOLD, 1) == 1)


def _is_consequence(error: BaseException) -> bool:
    """Return whether an error was raised in a collective, because another process failed."""
    module = str(_origin(error).tb_frame.f_globals.get("__name__"))
    return isinstance(error, RuntimeError) and module.startswith(("torch.distributed.", "superadam.distributed."))


def _origin(error: BaseException) -> TracebackType:
    """Return where an error that was caught was raised."""
    trace = error.__traceback__
    assert trace is not None
    while trace.tb_next is not None:
        trace = trace.tb_next
    return trace
