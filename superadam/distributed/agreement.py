"""One verdict for all ranks: one collective per step, after which every rank goes on alike, or raises."""

from __future__ import annotations

import enum
import functools
import itertools
import math
import operator
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import distributed as dist

from superadam.distributed.shards import counted_part, is_distributed, members_of
from superadam.host.signals import THIS_THREAD

_MAGIC = float(0x5A_DA_51)  # marks our numbers, should they ever meet those of another collective
_PADDING = 16
"""Sums are padded with zeros to a multiple of this many words: a rank whose parameters were just bound does not know
of copies yet, and all ranks must send tensors of one length."""


class Question(enum.IntEnum):
    """What a collective is for."""

    STEP = 0
    NORM = 1


_CALLS = ("step()", "clip_grad_norm_()")  # that ask them


@dataclass(frozen=True, slots=True)
class RanksNorm:
    """The norm of the gradients of all ranks, and the number of their elements that are Inf or NaN."""

    total: float
    count: int


class _Words(NamedTuple):
    """What one rank sends the others, as fp64 numbers; only `failed` and what follows `limit` may differ."""

    magic: float
    question: float
    number: float  # of questions before
    described_as: float  # a number that names the optimizer on all ranks; 0 before they have described it
    failed: float = 0.0  # 1: the rank has an error to raise, 2: it missed a step; then the rest means nothing
    limit: float = math.inf  # of the norm; inf for none
    is_new: float = 0.0  # 1: the rank has parameters that it has not described
    nonfinite: float = 0.0  # elements of all local gradients that are Inf or NaN
    sums: Any = ()  # as `Ranks.norm` says: class 0 is what this rank alone counts, each other one a `_Copies`


_exchanges = itertools.count(1)  # of descriptions on this rank; the count of the group's first rank names the optimizer


class Description(NamedTuple):
    """A parameter as one rank describes it to the others."""

    name: str  # by which ranks know the same parameter
    shape: tuple[int, ...]  # of the whole parameter
    members: tuple[int, ...]  # the ranks over which it is distributed; an ordinary one lies on one
    part: str | None = None  # which elements of it this rank counts, as `shards.counted_part` says


_Copies = tuple[tuple[int, ...], ...]
"""Groups of ranks, each of which has all of some parameters: those on ordinary tensors, or on a mesh of fewer ranks."""

_REPLICA, _COUNTED = -1, 0  # what other ranks count, and this one; from 1 on, what has copies


class Ranks:
    """The ranks that make each step together.

    Which elements each rank counts in the norm is found out by names: parameters of the same name are the same.
    """

    def __init__(self, members: Sequence[int], group: dist.ProcessGroup | None = None) -> None:
        self.members = list(members)  # in the order of the group, as rows arrive
        self.number = 0  # of questions so far, the same on all ranks
        self.agreed = 0  # the last of these, while others may make the step that an error keeps from this rank; else 0
        self.is_behind = False  # this rank missed a step on which all had agreed: if others made it, later ones raise
        self.described: list[Description] = []  # the parameters on this rank, which others learn with the next question
        self.device = "cpu"  # where words lie
        self.world: Callable[[], Any]  # the job's group; in another one, calls are counted anew
        self._group = group
        self._exchanged: list[Description] = []
        self._described_as = 0
        self._copies: dict[_Copies, float] = {}  # by which part of them sums may differ
        self._classes: list[int] = []

    def norm(
        self, question: Question, limit: float | None, nonfinite: int, sums: Callable[[Sequence[int]], Sequence[float]]
    ) -> RanksNorm:
        """Return the norm of the gradients of all ranks, and their number of Inf and NaN, replicas included.

        `nonfinite` is that of this rank. `sums` is given the class of each parameter. It returns this rank's sum of
        squares of class 0, and for each class from 1 on its sum and its number of elements without a gradient. A
        `limit` of None is none.

        Raises RuntimeError, on every rank alike: another rank failed, ended, or is elsewhere in the program, or the
        ranks have different limits, parts of different parameters, or different gradients of the same ones.
        """
        limit = math.inf if limit is None else limit
        mine = self._words(question)._replace(
            limit=limit, nonfinite=nonfinite, is_new=float(self.described != self._exchanged)
        )
        every = self._exchange(mine if mine.is_new else mine._replace(sums=sums(self._classes)))
        self._check(mine, every)
        if any(words.is_new for words in every):
            self.agreed = 0  # nobody makes the step before all have asked once more
            self._exchange_descriptions()
            every = self._exchange(mine._replace(sums=sums(self._classes)))
            self._check(mine, every)
        total, count = 0.0, int(sum(words.nonfinite for words in every))
        for words in every:
            total += words.sums[0]
        differing = None
        for position, (groups, bound) in enumerate(self._copies.items()):
            parts = [[every[self.members.index(rank)].sums[2 * position + 1 :] for rank in group] for group in groups]
            copied, lacking = (  # sum() rounds by the version of Python
                [functools.reduce(operator.add, (sums[k] for sums in each)) for each in parts] for k in (0, 1)
            )
            total += copied[0]
            is_near = max(copied) == min(copied) or max(copied) - min(copied) <= bound * min(copied)
            if not is_near or max(lacking) != min(lacking):  # some have none where others have zeros, which make a step
                differing = groups
        total = math.sqrt(total)
        if count or differing is not None:
            self.agreed = 0  # nobody makes it
        if count:
            return RanksNorm(math.nan if math.isfinite(total) else total, count)
        if differing is not None:
            ranks = " and ".join(str([*group]) for group in differing[:3]) + " and others" * (len(differing) > 3)
            raise RuntimeError(
                f"the copies of a parameter on ranks {ranks} have gradients that differ, expected the "
                "same ones; all-reduce them before the step, as those of fully_shard's ignored_params, or, if they are "
                "no copies, give each parameter a name of its own: pass named_parameters() to the optimizer"
            )
        return RanksNorm(total, 0)

    def copied_rows(self) -> set[int]:
        """Return the positions of parameters whose sums have to be those of copies; all where that is not known yet."""
        is_known = self.described == self._exchanged
        return {row for row in range(len(self.described)) if not is_known or self._classes[row] > 0}

    def _exchange_descriptions(self) -> None:
        """Exchange the descriptions of all ranks, and find out what this rank counts.

        Raises RuntimeError on every rank alike where parameters of one name are not the same, or not whole.
        """
        every: list[Any] = [None] * len(self.members)
        try:
            dist.all_gather_object(every, (next(_exchanges), self.described), group=self._group)
        except (RuntimeError, ValueError) as error:
            raise self._no_agreement(error) from error
        by_rank: dict[int, list[Description]] = {
            rank: described for rank, (_, described) in zip(self.members, every, strict=True)
        }
        holders: dict[str, dict[Description, set[int]]] = {}
        for rank, described in by_rank.items():
            for parameter in described:
                holders.setdefault(parameter.name, {}).setdefault(parameter._replace(part=None), set()).add(rank)
        copies: dict[str, _Copies] = {}
        for name, kinds in holders.items():
            ranks = [rank for kind in kinds for rank in kind.members]
            if len({kind.shape for kind in kinds}) > 1 or len(ranks) > len(set(ranks)):
                raise RuntimeError(
                    f"{name} is {' and '.join(f'{kind.shape} on ranks {[*kind.members]}' for kind in kinds)}, expected "
                    "the same parameter, or one that has another name; make the optimizers of all ranks from the same "
                    "model, or pass named_parameters() whose names differ where parameters do"
                )
            for kind, there in kinds.items():
                if there != set(kind.members):
                    raise RuntimeError(
                        f"{name} is distributed over ranks {[*kind.members]}, and only the optimizers of ranks "
                        f"{sorted(there)} have it, expected it in all of them; make them from the same model"
                    )
            if len(kinds) > 1:
                copies[name] = tuple(sorted(kind.members for kind in kinds))
        self._copies = {groups: _bound(groups, copies, by_rank) for groups in sorted(set(copies.values()))}
        classes = {name: 1 + [*self._copies].index(groups) for name, groups in copies.items()}
        self._classes = [
            _REPLICA if parameter.part is None else classes.get(parameter.name, _COUNTED)
            for parameter in self.described
        ]
        self._exchanged, self._described_as = self.described, every[0][0]

    def tell_failure(self, question: Question) -> None:
        """Let the other ranks, which are about to ask, raise as well; returns also where they cannot be reached."""
        words = self._words(question)
        with THIS_THREAD.without_handlers, suppress(RuntimeError):
            self._exchange(words._replace(failed=words.failed or 1.0))

    def refuse_older_state(self) -> None:
        """Raise RuntimeError if this rank's state may not belong to that of the others."""
        if self.is_behind:
            raise RuntimeError(
                "an error has kept this rank from a step that others may have made, so that its state may be older "
                "than theirs; start all of them again from a checkpoint"
            )

    def _words(self, question: Question) -> _Words:
        return _Words(_MAGIC, question, self.number + 1, self._described_as, 2.0 if self.is_behind else 0.0)

    def _exchange(self, mine: _Words) -> list[_Words]:
        """Return the words of each rank, in the order of `members`."""
        if len(self.members) == 1:
            return [mine]
        room = [0.0] * (-(-(1 + 2 * len(self._copies)) // _PADDING) * _PADDING)
        sums = [*mine.sums, *room][: len(room)]
        sent = torch.tensor([*mine[:-1], *sums], dtype=torch.float64, device=self.device)
        received = sent.new_empty(len(self.members), len(sent))
        self.number = int(mine.number)  # from here on others cannot be told of an error, and none is expected
        try:
            dist.all_gather([*received], sent, group=self._group)
        except (RuntimeError, ValueError) as error:
            raise self._no_agreement(error) from error
        self.agreed = self.number
        rows: list[list[float]] = received.tolist()
        fixed = len(mine) - 1
        return [_Words(*words[:fixed])._replace(sums=words[fixed:]) for words in rows]

    def _no_agreement(self, error: Exception) -> RuntimeError:
        said = str(error).partition("\n")[0][:150]
        return RuntimeError(
            f"ranks {self.members} could not agree on a step, because one of them has ended, does not answer or is "
            f"elsewhere in the program ({said}); nothing was changed: start all of them again from a checkpoint"
        )

    def _check(self, mine: _Words, every: Sequence[_Words]) -> None:
        if mine[:3] not in [words[:3] for words in every]:  # as of an exchange that was aborted
            raise self._no_agreement(RuntimeError("the answer is that to an older question"))
        agreed, self.agreed = self.agreed, 0  # what is raised here is raised on all ranks
        for rank, words in zip(self.members, every, strict=True):
            if words[:3] != every[0][:3]:
                here, there = _call_of(every[0]), _call_of(words)
                raise RuntimeError(
                    f"the ranks are not at the same point: rank {self.members[0]} {here} and rank {rank} {there}, "
                    "expected each call on every rank; nothing was changed: start all of them again from a checkpoint"
                )
            if words.described_as != every[0].described_as:
                raise RuntimeError(
                    f"ranks {self.members[0]} and {rank} are in {_CALLS[int(words.question)]} of different optimizers, "
                    "expected the same one on all ranks; nothing was changed: call those of several optimizers in one "
                    "order on all ranks, and start them again from a checkpoint"
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
                f"{_CALLS[int(every[0].question)]} failed on ranks {failed}, so nothing was changed; "
                "see the error that was raised there"
            )
        for rank, words in zip(self.members, every, strict=True):
            if words.limit != every[0].limit:
                raise RuntimeError(
                    f"the limit of the gradient norm is {every[0].limit} on rank {self.members[0]} and {words.limit} "
                    f"on rank {rank}, expected the same on all ranks; set the same max_grad_norm"
                )
        self.agreed = agreed


def _bound(groups: _Copies, copies: Mapping[str, _Copies], by_rank: Mapping[int, Sequence[Description]]) -> float:
    """Return by which part of them the sums of groups of ranks may differ, though their gradients are equal.

    0 where all add the same elements in the same order. Otherwise each sum of n squares, added in fp64 in whatever
    order, is within n * 2**-53 of the true one, so that two differ by twice that at most; twice as much covers terms of
    second order, up to 2**50 elements.
    """
    parts = [
        [
            [(parameter.name, parameter.part) for parameter in by_rank[rank] if copies.get(parameter.name) == groups]
            for rank in group
        ]
        for group in groups
    ]
    if all(part == parts[0] for part in parts):
        return 0.0
    sizes = {parameter.name: math.prod(parameter.shape) for rank in groups[0] for parameter in by_rank[rank]}
    return sum(size for name, size in sizes.items() if copies.get(name) == groups) * 2.0**-51


def _call_of(words: _Words) -> str:
    if words.magic != _MAGIC or words.question not in (0.0, 1.0):
        return "sent something else"
    return f"is in call {words.number:.0f} ({_CALLS[int(words.question)]})"


def ranks_of(
    parameters: Sequence[Any], names: Sequence[str], before: Ranks | None, group: dist.ProcessGroup | None
) -> Ranks | None:
    """Return the ranks that make each step of these parameters; None if all are ordinary tensors and `group` is None.

    They are those of `group`, by default all of the job; `before`, of the same optimizer, where that has the same ones
    and the job has made no group of all since.
    Raises ValueError where parameters lie on other ranks, or do not tell that all ranks of the job belong together.
    """
    meshes = {
        tuple(members_of(parameter)): name
        for parameter, name in zip(parameters, names, strict=True)
        if is_distributed(parameter)
    }
    if group is None and not meshes:
        return None
    if dist.get_rank(group) < 0:
        raise ValueError(
            f"process_group is a group without this rank, {dist.get_rank()}, expected one of the ranks that train "
            "together; pass it on its own ranks only, and on this one the group that this one is in"
        )
    members = dist.get_process_group_ranks(group)
    for mesh, name in meshes.items():
        if not set(mesh) <= set(members):
            raise ValueError(
                f"{name} is distributed over ranks {[*mesh]}, expected some of the process_group's, {sorted(members)}; "
                "pass the group of all ranks that train together"
            )
    if group is None and tuple(members) not in meshes:
        mesh, name = next(iter(meshes.items()))
        raise ValueError(
            f"{name} is distributed over ranks {[*mesh]} of a job of {len(members)}, and no parameter over all, so "
            "that it is unknown who makes each step together; pass process_group=torch.distributed.group.WORLD to the "
            "optimizer if all do, as the stages of a pipeline, or else the group of those that do"
        )
    world = weakref.ref(dist.group.WORLD)
    ranks = before if before and (before.members, before.world) == (members, world) else Ranks(members, group)
    ranks.world, ranks.is_behind = world, before is not None and before.is_behind
    of_meshes = (parameter.device_mesh.device_type for parameter in parameters if is_distributed(parameter))
    devices = itertools.chain(of_meshes, (str(parameter.device) for parameter in parameters))
    ranks.device = next(devices, str(torch.accelerator.current_accelerator() or "cpu"))
    here, shared = (dist.get_rank(),), {mesh: mesh for mesh in meshes}  # for pickle, one object for each mesh
    ranks.described = [
        Description(
            name,
            tuple(parameter.shape),
            shared[tuple(members_of(parameter))] if is_distributed(parameter) else here,
            counted_part(parameter),
        )
        for parameter, name in zip(parameters, names, strict=True)
    ]
    return ranks
