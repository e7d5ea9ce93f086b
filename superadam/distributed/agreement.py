"""One verdict for all ranks: one collective per step, after which every rank goes on alike, or raises."""

from __future__ import annotations

import enum
import math
import zlib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import distributed as dist

from superadam.distributed.shards import is_distributed, members_of

_MAGIC = float(0x5A_DA_51)  # marks our numbers, should they ever meet those of another collective


class Question(enum.IntEnum):
    """What a collective is for."""

    STEP = 0
    NORM = 1

    @property
    def call(self) -> str:
        """The method that asks it."""
        return ("step()", "clip_grad_norm_()")[self]


@dataclass(frozen=True, slots=True)
class RanksNorm:
    """The norm of the gradients of all ranks, and the number of their elements that are Inf or NaN."""

    total: float
    count: int


class _Words(NamedTuple):
    """What one rank tells the others, as fp64 numbers; only `failed`, `nonfinite` and `owned` may differ."""

    magic: float
    question: float
    number: float  # of questions before
    failed: float = 0.0  # 1: the rank has an error to raise, 2: it missed a step; then the rest means nothing
    parameters: float = 0.0  # a checksum of the shapes of the distributed ones
    limit: float = math.inf  # of the norm; inf for none
    nonfinite: float = 0.0  # elements of all local gradients that are Inf or NaN
    owned: float = 0.0  # sum of squares of the elements of which this rank has the first replica
    plain: float = 0.0  # sum of squares of the gradients of ordinary parameters


class Ranks:
    """The ranks over which an optimizer's parameters are distributed."""

    def __init__(self, mesh: Any, members: Sequence[int]) -> None:
        self.members = list(members)  # sorted
        self.number = 0  # of questions so far, the same on all ranks
        self.agreed = 0  # the last of these on which no rank failed
        self.is_behind = False  # this rank missed a step on which all had agreed: if others made it, later ones raise
        self.parameters = 0.0
        self._mesh = mesh
        self._group: dist.ProcessGroup | None = None

    def norm(self, question: Question, limit: float | None, nonfinite: int, owned: float, plain: float) -> RanksNorm:
        """Return the norm of the gradients of all ranks, and their number of Inf and NaN, replicas included.

        `nonfinite`, `owned` and `plain` are those of this rank, as in `_Words`. A `limit` of None is none.

        Raises:
            RuntimeError: on every rank alike: another rank failed, ended, or is elsewhere in the program, or the ranks
                have different parameters, limits or gradients of ordinary parameters.
        """
        limit = math.inf if limit is None else limit
        mine = self._words(question)._replace(parameters=self.parameters, limit=limit)
        mine = mine._replace(nonfinite=nonfinite, owned=owned, plain=plain)
        every = self._exchange(mine)
        self._check(every)
        first = every[0]
        total, count = 0.0, int(sum(words.nonfinite for words in every))
        for words in every:
            total += words.owned
        total = math.sqrt(total + first.plain)
        if count:
            return RanksNorm(math.nan if math.isfinite(total) else total, count)
        for rank, words in zip(self.members, every, strict=True):
            if words.plain != first.plain:
                raise RuntimeError(
                    f"the gradients of parameters that are not distributed differ between ranks {self.members[0]} and "
                    f"{rank}, expected the same ones everywhere; all-reduce the gradients of fully_shard's "
                    "ignored_params before the step"
                )
        self.agreed = self.number
        return RanksNorm(total, 0)

    def tell_failure(self, question: Question) -> None:
        """Let the other ranks, which are about to ask, raise as well; returns also where they cannot be reached."""
        words = self._words(question)
        with suppress(RuntimeError):
            self._exchange(words._replace(failed=words.failed or 1.0))

    def refuse_older_state(self) -> None:
        """Raise RuntimeError if this rank's state may not belong to that of the others."""
        if self.is_behind:
            raise RuntimeError(
                "an error has kept this rank from a step that others may have made, so that its state may be older "
                "than theirs; start all of them again from a checkpoint"
            )

    def _words(self, question: Question) -> _Words:
        self.number += 1
        return _Words(_MAGIC, float(question), float(self.number), 2.0 if self.is_behind else 0.0)

    def _exchange(self, mine: _Words) -> list[_Words]:
        """Return the words of each rank, in the order of `members`."""
        if len(self.members) == 1:
            return [mine]
        sent = torch.tensor(mine, dtype=torch.float64, device=self._mesh.device_type)
        received = [torch.empty_like(sent) for _ in self.members]
        try:
            dist.all_gather(received, sent, group=self._process_group())
            return [_Words(*words) for words in torch.stack(received).tolist()]
        except (RuntimeError, ValueError) as error:
            told = str(error).partition("\n")[0][:150]
            raise RuntimeError(
                f"ranks {self.members} could not agree on a step, because one of them has ended, does not answer or is "
                f"elsewhere in the program ({told}); nothing was changed: start all of them again from a checkpoint"
            ) from error

    def _process_group(self) -> dist.ProcessGroup | None:
        """Return a group of these ranks; made by the first collective, in which every rank takes part."""
        if self._group is None and self.members != list(range(dist.get_world_size())):
            if self._mesh.ndim == 1:
                self._group = self._mesh.get_group()
            else:
                group: Any = dist.new_group(self.members, use_local_synchronization=True)
                self._group = group
        return self._group

    def _check(self, every: Sequence[_Words]) -> None:
        calls = [words[:3] for words in every]
        for rank, call in zip(self.members, calls, strict=True):
            if call != calls[0]:
                here, there = (_call_of(one) for one in (calls[0], call))
                raise RuntimeError(
                    f"the ranks are not at the same point: rank {self.members[0]} {here} and rank {rank} {there}, "
                    "expected each call on every rank; nothing was changed: start all of them again from a checkpoint"
                )
        behind = [rank for rank, words in zip(self.members, every, strict=True) if words.failed == 2.0]
        if len(behind) == len(every):
            self.is_behind = False  # all have missed the same step
        elif behind:
            raise RuntimeError(
                f"an error on ranks {behind} has kept them from a step that the others made, so that their parameters "
                "and state are older; start all of them again from a checkpoint"
            )
        failed = [rank for rank, words in zip(self.members, every, strict=True) if words.failed == 1.0]
        if failed:
            raise RuntimeError(
                f"{Question(int(every[0].question)).call} failed on ranks {failed}, so nothing was changed; "
                "see the error that was raised there"
            )
        for rank, words in zip(self.members, every, strict=True):
            if words.parameters != every[0].parameters:
                raise RuntimeError(
                    f"the optimizers of ranks {self.members[0]} and {rank} have different parameters, expected parts "
                    "of the same ones in the same order; make them from the same model"
                )
            if words.limit != every[0].limit:
                raise RuntimeError(
                    f"the limit of the gradient norm is {every[0].limit} on rank {self.members[0]} and {words.limit} "
                    f"on rank {rank}, expected the same on all ranks; set the same max_grad_norm"
                )


def _call_of(words: tuple[float, ...]) -> str:
    magic, question, number = words
    if magic != _MAGIC or question not in (0.0, 1.0):
        return "sent something else"
    return f"is in call {number:.0f} ({Question(int(question)).call})"


def ranks_of(parameters: Sequence[Any], names: Sequence[str], before: Ranks | None) -> Ranks | None:
    """Return the ranks over which parameters are distributed; None if all are ordinary tensors.

    `before` is what this has returned for the same optimizer; it is returned again where the ranks are the same.
    Raises ValueError where parameters are distributed over different ranks.
    """
    first: tuple[Any, str] | None = None
    shapes = []
    for parameter, name in zip(parameters, names, strict=True):
        if not is_distributed(parameter):
            continue
        shapes.append(tuple(parameter.shape))
        if first is None:
            first = parameter, name
        elif parameter.device_mesh is not first[0].device_mesh and members_of(parameter) != members_of(first[0]):
            raise ValueError(
                f"{first[1]} is distributed over ranks {members_of(first[0])} and {name} over {members_of(parameter)}, "
                "expected the same ranks for all parameters of an optimizer; make one optimizer for each"
            )
    if first is None:
        return None
    members = members_of(first[0])
    ranks = before if before is not None and before.members == members else Ranks(first[0].device_mesh, members)
    ranks.parameters = float(zlib.crc32(repr(shapes).encode()))
    return ranks
