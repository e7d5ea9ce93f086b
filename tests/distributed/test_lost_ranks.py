"""Ranks that are killed, stopped or fail: the others end with an error that says so."""

import re
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from threading import Event
from typing import Any
from unittest import mock

import pytest
import torch
from support.deep import DEEP
from support.overlap import ThreadDevice
from support.ranks import ENDED, Ending, preload, run_apart
from support.shards import ROUNDED, wrap
from torch import distributed, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from superadam import OffloadScheduler, SpeculativeCPUAdamW
from superadam.distributed.agreement import Ranks
from superadam.integrations import checkpoint_folder
from superadam.integrations.distributed_checkpoint import save
from superadam.offload.buckets import GradientReady
from superadam.offload.pipeline import Pipeline
from superadam.offload.transfers import Transfers
from superadam.state.table import ParameterTable
from superadam.step.transaction import Transaction

pytestmark = pytest.mark.slow

preload("superadam.integrations.distributed_checkpoint")

STEPS = 3
"""Ranks are lost in the last one, or in the save after it."""

SECONDS = 3
"""The group's timeout, once a rank is about to be stopped; ranks that a loaded machine slows down end with its error,
too."""


def in_own_hook(parameter: Any) -> None:
    """Called by a hook of the program in backward."""


def in_own_code() -> None:
    """Called by the program between backward and step."""


PLACES: dict[str, tuple[Any, str, int, bool]] = {
    "own hook": (sys.modules[__name__], "in_own_hook", 3, False),
    "hook": (GradientReady, "__call__", 4, False),
    "taking": (OffloadScheduler, "_take", 4, False),
    "sending": (Pipeline, "send", 2, True),
    "worker": (Transaction, "speculate", 2, False),
    "own code": (sys.modules[__name__], "in_own_code", 1, False),
    "before the verdict": (Ranks, "_exchange", 1, False),
    "in the verdict": (distributed, "all_gather", 1, False),
    "after the verdict": (Ranks, "_exchange", 1, True),
    "publishing": (Transfers, "publish", 1, True),
    "updating": (ParameterTable, "prepared_update", 1, True),
    "committing": (ParameterTable, "run_commit", 1, True),
    "saving": (checkpoint_folder, "sha256", 1, False),
}
"""What is called there, by its owner and name, which of its calls it is, and whether the rank is lost after it."""


@contextmanager
def planted(place: str, act: Callable[[], object], is_armed: Event) -> Iterator[None]:
    """Lose this rank at a place, once it is armed."""
    owner, name, number, is_after = PLACES[place]
    original, left = getattr(owner, name), [number]

    def replaced(*args: Any, **kwargs: Any) -> Any:
        left[0] -= is_armed.is_set()
        is_here = is_armed.is_set() and left[0] == 0
        if is_here and name == "all_gather":
            under_way = original(*args, **kwargs, async_op=True)
            act()
            return under_way.wait()
        if is_here and not is_after:
            act()
        result = original(*args, **kwargs)
        if is_here and is_after:
            act()
        return result

    with mock.patch.object(owner, name, replaced):
        yield


ACTS: dict[str, Callable[[], object]] = {
    "kill": partial(signal.raise_signal, signal.SIGKILL),
    "stop": partial(signal.raise_signal, signal.SIGSTOP),
    "fail": mock.Mock(side_effect=ValueError("planted")),
    "run_out": mock.Mock(side_effect=torch.OutOfMemoryError("planted")),
}


def train(rank: int, folder: str, overlaps: bool, place: str, act: str, victims: Sequence[int]) -> None:
    """Train, and save; victims act at a place."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 9)).bfloat16()  # with uneven parts
    wrap([*model, model], mp_policy=MixedPrecisionPolicy(**ROUNDED))
    optimizer = SpeculativeCPUAdamW(model.parameters(), lr=1e-2)
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda parameter: in_own_hook(parameter))
    is_armed = Event()
    lost = planted(place, ACTS[act], is_armed) if rank in victims else nullcontext()
    options: dict[str, Any] = {"num_threads": 1, "bucket_numel": 8, "device": ThreadDevice()}
    with lost, OffloadScheduler(optimizer, model, **options) if overlaps else nullcontext():
        for step in range(STEPS):
            if step == STEPS - 1:
                if act == "stop":
                    distributed.barrier()
                    distributed.distributed_c10d._set_pg_timeout(timedelta(seconds=SECONDS))
                is_armed.set()
            for micro in range(2):
                generator = torch.Generator().manual_seed(1000 * rank + 10 * step + micro)
                (model(torch.randn(3, 7, generator=generator).bfloat16()) - 1).float().square().sum().backward()
            in_own_code()
            optimizer.step()
            optimizer.zero_grad()
        save(folder, model, optimizer)


NOTICED = re.compile(
    r"RuntimeError: (ranks \[0, 1\] could not agree on a step, because one of them has ended, does not answer or is "
    r"elsewhere in the program \(.*\); nothing was changed: start all of them again from a checkpoint"
    r"|\[.*\] (Connection closed by peer|Read error|Write error|Timed out|Application timeout|writev|Socket).*)\n"
)
"""What a rank raises once another one has ended or does not answer: our sentence, or gloo's within torch."""

TOLD = r"RuntimeError: step\(\) failed on ranks \[{}\], so nothing was changed; see the error that was raised there\n"
UNSAVED = r".*CheckpointError: cannot save a checkpoint to .* \(on rank {}\).*\n"

KILLED = [
    (True, "taking", 0),
    (True, "worker", 0, 1),
    (True, "hook", 1),
    (True, "before the verdict", 0),
    (True, "in the verdict", 1),
    (True, "after the verdict", 0),
    (True, "publishing", 1),
    (True, "committing", 0),
    (True, "saving", 0, 1),
    (False, "own hook", 0),
    (False, "before the verdict", 1),
    (False, "after the verdict", 1),
    (False, "updating", 0),
]
STOPPED = [
    (True, "sending", 0),
    (True, "worker", 1),
    (True, "in the verdict", 0),
    (True, "publishing", 1),
    (True, "saving", 0),
    (False, "own hook", 1),
    (False, "before the verdict", 0),
    (False, "after the verdict", 1),
    (False, "updating", 0),
    (False, "saving", 1),
]
FAILED = [
    ("run_out", "", True, "own hook", 0),
    ("fail", "", True, "hook", 1),
    ("fail", TOLD, True, "taking", 0),
    ("run_out", TOLD, True, "worker", 1),
    ("fail", TOLD, True, "before the verdict", 0),
    ("run_out", "", True, "after the verdict", 1),
    ("fail", "", True, "publishing", 0),
    ("fail", "", False, "own code", 1),
    ("fail", "", False, "in the verdict", 0),
    ("run_out", "", False, "updating", 1),
    ("run_out", UNSAVED, False, "saving", 0),
]
"""Whether there is a scheduler, where ranks are lost, and which; of those that fail first how, and what others tell."""


def test_lost_ranks_are_noticed(tmp_path):
    """Those that were stopped end once they go on; of those that failed, the others tell that, or that they end."""
    losses = [
        *(("kill", "", *one) for one in (KILLED if DEEP else KILLED[1::3])),
        *(("stop", "", *one) for one in (STOPPED if DEEP else STOPPED[2::3])),
        *(FAILED if DEEP else FAILED[::2]),
    ]
    cases = [
        {"folder": str(tmp_path / str(number)), "overlaps": overlaps, "place": place, "act": act, "victims": victims}
        for number, (act, _, overlaps, place, *victims) in enumerate(losses)
    ]
    for case, (_, words, *_), endings in zip(cases, losses, run_apart(train, 2, cases), strict=True):
        for rank, ending in enumerate(endings):
            is_victim = rank in case["victims"]
            if is_victim and case["act"] == "kill":
                assert ending == Ending(ENDED, -signal.SIGKILL), case
                continue
            assert ending.status == 1, (case, ending)
            if is_victim and case["act"] != "stop":
                assert "planted" in ending.result, (case, ending)
            else:
                pattern = re.compile(words.format(*case["victims"])) if words else NOTICED
                assert pattern.fullmatch(ending.result), (case, ending)
