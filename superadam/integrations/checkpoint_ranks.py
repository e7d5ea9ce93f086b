"""The ranks that save or load a checkpoint together: what they tell each other, and errors on all of them."""

from __future__ import annotations

import itertools
import math
import os
import tempfile
from collections.abc import Callable, Mapping, Sized
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from superadam.host.signals import THIS_THREAD
from superadam.integrations import checkpoint_folder
from superadam.integrations.checkpoint_folder import CheckpointError

_T = TypeVar("_T")

Seen = Mapping[tuple[int, str], list[float]]
"""A few elements of parameters, by their position in the model and the part of them that a rank has."""

_begun = itertools.count(1)


class _Told(NamedTuple):
    """What a rank tells the others."""

    point: tuple[str, int, int]  # where it is: what for, the calls of `gather` before, and the first rank's `number`
    number: int  # of saves and loads that have begun on this rank
    value: Any


def _differ(some: list[float], others: list[float]) -> bool:
    """Whether these cannot be elements of copies, which may have drifted apart a little, on unlike GPUs say."""
    return len(some) != len(others) or math.dist(some, others) > 0.1 * math.hypot(*others)


class CheckpointRanks:
    """The ranks that save or load together, of which all fail if one does; a single one without torch.distributed."""

    def __init__(self, group: dist.ProcessGroup | None, failure: str, advice: str, outcome: str) -> None:
        self.group, self.failure, self.advice, self.outcome = group, failure, advice, outcome
        self._number, self._point = next(_begun), (outcome, 0, 0)
        are_several = dist.is_available() and dist.is_initialized()
        self.rank, self.size = (dist.get_rank(group), dist.get_world_size(group)) if are_several else (0, 1)
        if self.rank < 0:
            raise CheckpointError(
                f"{failure}: process_group is a group without this rank, {dist.get_rank()}; call it on the ranks of "
                "the group alone"
            )

    def gather(self, value: _T) -> list[_T]:
        """Return the values of all ranks, in their order.

        Raises CheckpointError where a rank is elsewhere: after Ctrl-C it may be in its next call already.
        """
        if self.size == 1:
            return [value]
        every: list[Any] = [None] * self.size
        with THIS_THREAD.without_handlers:  # between its two collectives, Ctrl-C would leave others in the second
            dist.all_gather_object(every, _Told(self._point, self._number, value), group=self.group)
        elsewhere = [rank for rank, told in enumerate(every) if getattr(told, "point", None) != self._point]
        if elsewhere:
            raise CheckpointError(
                f"{self.failure}: ranks {elsewhere} are elsewhere in the program than rank {self.rank}, as after "
                "Ctrl-C on one of them, expected this call on all; call it again on all ranks"
            )
        self._point = self.outcome, self._point[1] + 1, every[0].number
        return [told.value for told in every]

    def on_first(self, work: Callable[[], _T]) -> _T:
        """Return on every rank what `work` returns on rank 0; raises CheckpointError where it raised."""
        results: list[Any] = self.gather(self.run(lambda: work() if self.rank == 0 else None))
        return cast(_T, results[0])

    def require_shared(self, path: Path) -> str | None:
        """Return what rank 0 sees at a path of a folder of checkpoints.

        Raises CheckpointError where another rank sees something else.
        """
        seen = self.gather(self.run(lambda: checkpoint_folder.sight(path)))
        strangers = [rank for rank, sight in enumerate(seen) if sight != seen[0]]
        if not strangers and seen[0] != path.name:  # else it was made just now; folders may hold copies, or nothing
            strangers = self._without_marker(path.parent)
        if strangers:
            raise CheckpointError(
                f"{self.failure}: {path.parent} is another folder on ranks {strangers} than on rank 0: choose one that "
                f"all ranks share; {self.outcome}"
            )
        return seen[0]

    def require_same(self, names: object = None, seen: Seen | None = None, **values: object) -> None:
        """Raise CheckpointError unless all ranks have the same names of tensors, and the same values of the same names.

        What was seen of the same part of a tensor has to be nearly the same.
        """
        every = self.gather((names, seen or {}, {name: repr(value) for name, value in values.items()}))
        first = dict(itertools.chain(*(some.items() for _, some, _ in reversed(every))))  # of each part, by any rank
        if others := [
            rank
            for rank, (its, some, _) in enumerate(every)
            if its != every[0][0] or any(_differ(elements, first[part]) for part, elements in some.items())
        ]:
            raise CheckpointError(
                f"{self.failure}: ranks {others} have other parameters than rank 0, expected shards of the same ones: "
                f"give each stage of a pipeline a folder and a process_group of its own; {self.outcome}"
            )
        for name in dict.fromkeys(itertools.chain(*(its for *_, its in every))):
            there = [its.get(name) for *_, its in every]
            if others := [rank for rank, value in enumerate(there) if value != there[0]]:
                raise CheckpointError(
                    f"{self.failure}: {name} is {there[0]} on rank 0 and {there[others[0]]} on rank {others[0]}, "
                    f"expected the same on all ranks; {self.outcome}"
                )

    def _without_marker(self, folder: Path) -> list[int]:
        """Return the ranks that do not see a file that rank 0 makes; none where it can make none."""
        if self.size == 1:
            return []
        with ExitStack() as stack:
            name: str | None = None
            if self.rank == 0:
                with THIS_THREAD.without_handlers, suppress(OSError):  # one may load where one cannot write
                    marker = stack.enter_context(tempfile.NamedTemporaryFile(prefix=".shared-", dir=folder))
                    name = os.path.basename(marker.name)
            name = self.gather(name)[0]
            found = self.gather(name is None or os.path.exists(folder / name))
        self.gather(None)  # no rank goes on before it is removed
        return [rank for rank, is_there in enumerate(found) if not is_there]

    def run(self, work: Callable[[], _T]) -> _T:
        """Return what `work` returns, or raise CheckpointError on every rank if it raised on one."""
        results: list[_T] = []
        if fault := self.fault(lambda: results.append(work())):
            raise CheckpointError(fault)
        return results[0]

    def restore(self, begin: Callable[[], object], go_on: Callable[[], object]) -> None:
        """Load: `begin` may refuse, and has changed nothing then; raise CheckpointError on every rank as `run` does."""
        begun: list[object] = []
        if fault := self.fault(lambda: begun.append(begin()), begun) or self.fault(go_on, begun):
            raise CheckpointError(fault)

    def fault(self, work: Callable[[], object], begun: Sized = ()) -> str | None:
        """Return, on every rank, a sentence about what `work` raised on the first one on which it did.

        It says that a part was loaded where `begun` is not empty on some rank. Ctrl-C is raised on its rank, and the
        sentence as CheckpointError on the others, which would wait for that one in the next call.
        """
        fault = None
        cause: BaseException | None = None
        try:
            work()
        except BaseException as error:
            cause = error
            if isinstance(error, CheckpointException):  # of DCP, which a program's hook may use over ranks
                (cause, _), *_ = error.failures.values()
            inner = cause.__context__  # where a write failed or was ended, torch tells of its archive then
            if type(cause) is RuntimeError and (isinstance(inner, OSError) or not isinstance(inner, Exception | None)):
                cause = inner
            place = f" (on rank {self.rank})" if self.size > 1 else ""
            fault = f"{cause}{place}"
            if not isinstance(cause, CheckpointError):
                advice = self.advice if isinstance(cause, OSError) and cause.errno else ""
                fault = f"{type(cause).__name__}: {(str(cause).splitlines() or [''])[0]}{place}{advice}"
        is_ended = cause is not None and not isinstance(cause, Exception)
        faults, are_begun, are_ended = zip(*self.gather((fault, len(begun), is_ended)), strict=True)
        if cause is not None and is_ended:
            raise cause
        first = next(filter(None, faults), None)
        if first is None:
            return None
        outcome = "a part of it was loaded: load again before training" if any(are_begun) else self.outcome
        sentence = f"{self.failure}: {first}; {outcome}"
        if any(are_ended):
            raise CheckpointError(sentence)
        return sentence
