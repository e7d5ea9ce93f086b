"""Binds the optimizer's parameters, their published state and a scheduler to one transaction.

That is done when a call first needs it, because frameworks replace parameters after the optimizer was made.
"""

from __future__ import annotations

import functools
import operator
import os
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor
from torch import distributed as dist

from superadam.distributed import shards
from superadam.distributed.agreement import Question, Ranks, ranks_of
from superadam.distributed.replicas import warn_of_others
from superadam.handles.gradient_handle import taken_of
from superadam.handles.taken_gradient import GradientHolder, TakenGradient
from superadam.host.signals import THIS_THREAD
from superadam.kernels import torch_private
from superadam.kernels.hyperparameters import Hyperparameters
from superadam.kernels.memory import has_memory, is_expanded
from superadam.optim.arguments import is_flattened
from superadam.optim.published_state import PublishedState
from superadam.state.new_values import NewValues
from superadam.state.parameter import ParameterState, pieces_of
from superadam.state.places import sharing
from superadam.state.resident import ResidentStates
from superadam.state.storage import Storage
from superadam.state.table import ParameterTable, Runs
from superadam.step.gradients import hyper_of_each
from superadam.step.outcome import Applied, Statistics, StepOutcome, tell
from superadam.step.transaction import Transaction

_get_kind = operator.attrgetter("parameter_dtype", "shape", "strides")
_get_stand_ins = operator.attrgetter("shown")

Method = TypeVar("Method", bound=Callable[..., Any])
Groups = Sequence[dict[str, Any]]  # as `torch.optim.Optimizer.param_groups`


def untracked(method: Method) -> Method:
    """Run without autograd, outside inference mode (state made there could not be written outside), and uncompiled."""

    @functools.wraps(method)
    def untracked(*args: Any, **kwargs: Any) -> Any:
        # One call into C, which also restores the grad mode: a signal handler that raises inside no_grad() would leave
        # gradients disabled.
        with torch_private.inference_mode(False):
            torch.set_grad_enabled(False)
            return method(*args, **kwargs)

    return torch_private.uncompiled(untracked)  # type: ignore[no-any-return]  # as the methods of torch.optim


def names_of(group: dict[str, Any], index: int) -> list[str]:
    """Return the names of a group's parameters in error messages."""
    names, count = group.get("param_names"), len(group["params"])
    if isinstance(names, list | tuple) and len(names) == count and all(isinstance(name, str) for name in names):
        return list(names)
    return [f"parameter {k} of group {index}" for k in range(count)]


def all_names_of(groups: Groups) -> list[str]:
    """Return those of all groups."""
    return [name for index, group in enumerate(groups) for name in names_of(group, index)]


def _parameters_of(groups: Groups) -> list[Tensor]:
    return [parameter for group in groups for parameter in group["params"]]


def runs_of(groups: Groups) -> Runs:
    """Return the present hyper-parameters of each group, and its number of parameters."""
    return [(Hyperparameters.of_group(group), len(group["params"])) for group in groups]


def hyper_by_row(groups: Groups) -> list[Hyperparameters]:
    """Return the present hyper-parameters of each parameter."""
    return hyper_of_each(runs_of(groups))


class Overlap(Protocol):
    """The scheduler that runs the optimizer during backward, as seen by the optimizer."""

    @property
    def _transfers(self) -> NewValues:
        """Brings new values to parameters."""

    @property
    def _resident(self) -> ResidentStates | None:
        """State that is not on the host."""

    def _follow(self, transaction: Transaction | None) -> None:
        """Speculate on the parameters of this transaction from now on; None: on none, until the next one."""

    def _catch_up(self) -> None:
        """Return when everything that was taken is speculated on; raise what failed there."""

    def _conclude(self, outcome: StepOutcome, applied: Applied | None) -> None:
        """Handle the outcome of a step, and what it did to gradients that were taken."""


class LockOfProcess:
    """Returns a reentrant lock of this process: another thread may have held its parent's at a fork.

    Attributes:
        worker: the thread of the scheduler's worker, for which others wait while they hold the lock.
    """

    def __init__(self) -> None:
        self._locks: dict[int, AbstractContextManager[object]] = {}
        self.worker: threading.Thread | None = None

    def __call__(self) -> AbstractContextManager[object]:
        """Return the lock; raises RuntimeError in the worker, where Python may run finalizers of a program."""
        if threading.current_thread() is self.worker:
            raise RuntimeError(
                "a finalizer or a callback of the garbage collector has used an optimizer, or a gradient that was "
                "taken, in the thread of the scheduler's worker, for which they wait; use them outside of finalizers"
            )
        return self._locks.get(os.getpid()) or self._locks.setdefault(os.getpid(), threading.RLock())


class Binding(GradientHolder):
    """The transaction over the parameters that were bound last, their published state, and who else takes part.

    Attributes:
        published: the `state` dict.
        overlap: the scheduler, if there is one.
        source: what takes gradients before they are rounded to the dtype of `.grad`, if there is such a holder.
        is_flattened: whether the bound parameters are shards of FSDP1; there once any are bound.
        ranks: that make each step together; None for this one alone.
        process_group: of those ranks, if a program has said which.
        storage: how state is stored.
    """

    _lock: LockOfProcess  # held by every public call of optimizer and scheduler, so that those of other threads wait

    def __init__(self, entries: defaultdict[Tensor, Any], statistics: Statistics, storage: Storage) -> None:
        self._lock = LockOfProcess()
        self.published = PublishedState(entries, self._lock)
        self.overlap: Overlap | None = None
        self.source: GradientHolder | None = None
        self.ranks: Ranks | None = None
        self.process_group: dist.ProcessGroup | None = None
        self.storage = storage
        self._transaction: Transaction | None = None
        self._table: ParameterTable | None = None  # that was bound last, until there is another
        self._is_compared = False  # with other ranks
        self._shown: list[object] = []  # what was in `entries` when they were last given to a program
        self._statistics = statistics

    def replace(self, entries: defaultdict[Tensor, Any]) -> None:
        """Replace the published dict, after bringing the old one up to date; gradients stay in `.grad`."""
        self.catch_up()
        with THIS_THREAD.deferred_signals:
            self._unbind()
            self._forget_binding()
            if self._table is not None:
                self._table.forget_all_but(())  # masters may be large, and come back no more
            self.published = PublishedState(entries, self._lock)
            if self.ranks is not None:
                self.ranks.is_behind = False

    def join(self, process_group: dist.ProcessGroup | None, groups: Groups) -> None:
        """Make each step together with the ranks of this group from now on; gradients stay in `.grad`."""
        self.catch_up()
        if self._transaction is not None and _are_same(self._transaction.table, _parameters_of(groups)):
            self.entries(groups, is_given=False)  # which reads what programs have written there
        with THIS_THREAD.deferred_signals:
            self._unbind()
            self._forget_binding()
            self.process_group = process_group
            if self.ranks is not None:
                self.ranks.world = lambda: None  # of another group, in which calls are counted anew

    @contextmanager
    def on_all_ranks(self, question: Question, groups: Groups) -> Iterator[None]:
        """Tell the other ranks of an error inside, so that they raise as well; after agreement, in the next call."""
        before = self.ranks
        number = 0 if before is None else before.number
        try:
            if self.source is not None:
                self.source.check()
            yield
        except Exception:
            ranks = self.ranks
            if ranks is None or (self._transaction is None and ranks.world() is not dist.group.WORLD):  # first binding
                ranks, parameters = None, _parameters_of(groups)
                with THIS_THREAD.without_handlers, suppress(ValueError):
                    ranks = self.ranks = ranks_of(parameters, [""] * len(parameters), self.ranks, self.process_group)
            if ranks is not None and ranks.number == (number if ranks is before else 0):
                ranks.tell_failure(question)
            elif ranks is not None and ranks.agreed == ranks.number and question is Question.STEP:
                ranks.is_behind = True
            raise

    @property
    def has_state(self) -> bool:
        """Whether any parameter was bound, or has a state that was loaded."""
        return bool(self.published.entries) or self._transaction is not None

    @property
    def lacks_any_state(self) -> bool:
        """Whether no parameter has a state, as before the first step."""
        return not self.published.entries and (self._transaction is None or not self._transaction.table.has_state)

    def bound(self, groups: Groups) -> Transaction:
        """Return the transaction over the groups' present parameters, its rows equal to the published state.

        Raises ValueError where parameters share memory, or a published entry cannot be a state.
        """
        self.catch_up()
        with THIS_THREAD.deferred_signals:  # a handler may close the scheduler, and so end what is bound
            return self.bound_now(groups)

    def bound_now(self, groups: Groups, *, looks: bool = True) -> Transaction:
        """As `bound`, for those who wait for the scheduler first, and then defer signals for as long as they use it.

        Unless it `looks` which state programs hold, what they may hold counts as held.
        """
        parameters = _parameters_of(groups)
        if self._transaction is None or not _are_same(self._transaction.table, parameters):
            names = all_names_of(groups)
            transaction = self._bind(parameters, names)
            if not self._is_compared:
                self._is_compared = True
                if self.ranks is None and not self.is_flattened:
                    warn_of_others(parameters, names)
            return transaction
        if self._transaction.table.is_any_held:
            with THIS_THREAD.deferred_signals, self._transaction.lock:
                self.published.read_edited(self._transaction.table)
                if looks:
                    self.published.look(self._transaction.table)
        return self._transaction

    def look(self) -> None:
        """Find out which state programs hold, where they were given any; changes nothing that they can see."""
        transaction = self._transaction
        if transaction is not None and transaction.table.is_exposed:
            with THIS_THREAD.deferred_signals, transaction.lock:
                self.published.look(transaction.table)

    @untracked
    def entries(self, groups: Groups, *, is_given: bool = True) -> defaultdict[Tensor, Any]:
        """Return the published state after committing accepted steps.

        Where it `is_given` to programs, outside writes are adopted first. Where binding fails, it is returned
        unchanged: a step refuses it, and until then it can be corrected.
        """
        with self._lock():
            self.catch_up()
            with THIS_THREAD.deferred_signals:  # a handler may look, too
                if is_given and self._is_shown(groups):
                    return self.published.entries
                if self.has_state:
                    try:
                        transaction = self.bound_now(groups, looks=False)  # programs will be given all of it
                    except (TypeError, ValueError):
                        pass
                    else:
                        if is_given:
                            transaction.adopt_outside_writes()
                    self._refresh_entries()
                if is_given and self._transaction is not None:
                    self._transaction.expose()
                    self._shown = self.published.contents()
                return self.published.entries

    def _is_shown(self, groups: Groups) -> bool:
        """Whether programs were given the entries as they are, and have put nothing else into them since then.

        What they have written to is read when it is used: a loop may read the state of one parameter after another.
        What they have moved is read now, and so is all where there are stand-ins, or may be: each read lets go of those
        that no program has.
        """
        transaction = self._transaction
        if transaction is None or not transaction.table.is_exposed:
            return False
        table = transaction.table
        if table.is_any_encoded or any(map(_get_stand_ins, table.states)) or not table.is_published.all():
            return False
        if self._shown != self.published.contents() or table.has_moved_arrays():
            return False
        return _are_same(table, _parameters_of(groups)) and not table.fingerprints.seen_hints(table.all_rows)

    @untracked
    def attach(self, overlap: Overlap, groups: Groups) -> None:
        """Let a scheduler carry gradients and parameters from now on; if this raises, nothing was attached."""
        with self._lock():
            if self.overlap is not None:
                raise RuntimeError("the optimizer has a scheduler already; close() it before making another one")
            with THIS_THREAD.deferred_signals:
                self._unbind()
                self._forget_binding()
                self.overlap = overlap
                try:
                    self.bound_now(groups)
                except BaseException:
                    self.overlap = None
                    self._forget_binding()
                    raise

    @untracked
    def detach(self, groups: Groups) -> None:
        """Work without a scheduler again, which holds the lock and has nothing under way."""
        with THIS_THREAD.deferred_signals:
            self.entries(groups, is_given=False)
            self._forget_binding()
            self.overlap = None

    def create_state(self, groups: Groups) -> None:
        """Create the state of every parameter with a gradient, as it is before the first step."""
        table, each = self.bound(groups).table, hyper_by_row(groups)
        states = [state for state in table.states if state.parameter.grad is not None]
        table.create_state(states, [each[state.row] for state in states])
        self._refresh_entries()

    def conclude(self, transaction: Transaction, outcome: StepOutcome, applied: Applied | None) -> None:
        """Tell of a step, which raises nothing: to the statistics, exposed entries and the scheduler."""
        if self.ranks is not None:
            self.ranks.agreed = 0  # it was made, whatever a handler raises that runs now
        tell("counting steps", self._statistics.count, outcome.kind)
        if transaction.table.is_any_held:  # else with the next, or when read
            tell("updating optimizer.state at once", self._refresh_held_entries, transaction)
        if self.overlap is not None:
            tell("the scheduler's part after a step", self.overlap._conclude, outcome, applied)

    def catch_up(self) -> None:
        """Wait for the scheduler, if there is one; handlers of signals run meanwhile."""
        overlap = self.overlap
        if overlap is not None:
            overlap._catch_up()

    def commit(self, groups: Groups, *, with_samples: bool = False) -> None:
        """As `SpeculativeCPUAdam.commit`; `with_samples` as in `Transaction.adopt_outside_writes`."""
        if not self.has_state:
            return
        self.catch_up()
        with THIS_THREAD.deferred_signals:
            transaction = self.bound_now(groups)
            transaction.commit()
            transaction.adopt_outside_writes(with_samples=with_samples)
            self._refresh_held_entries(transaction)

    def drop(self) -> None:
        """Drop everything that waits for a verdict."""
        self.catch_up()
        with THIS_THREAD.deferred_signals:
            if self._transaction is not None:
                self._transaction.drop()

    def _forget_binding(self) -> None:
        self._transaction = None
        if self._table is not None:  # from which the next one learns, when its scheduler may be gone
            self._table.new_values, self._table.resident = NewValues(), None
        if self.overlap is not None:
            self.overlap._follow(None)

    def _refresh_entries(self) -> None:
        """Bring `entries` up to date with every step; what others wrote to parameters is not adopted."""
        if self._transaction is not None:
            self._transaction.commit()
            self._transaction.table.bring_home()
            self.published.write(self._transaction.table, self._transaction.table.states)

    def _refresh_held_entries(self, transaction: Transaction) -> None:
        """Bring those of `entries` up to date of which programs hold something."""
        table = transaction.table
        held = table.held_states()  # none of which is accepted
        table.bring_home(pieces_of(held))
        self.published.write(table, held)

    def _unbind(self) -> dict[Tensor, ParameterState]:
        """Write all state to `entries`; return the states of parameters that are still as they were bound."""
        if self._transaction is None:
            return {}
        self._transaction.drop()  # the gradients in `.grad` still count
        self._refresh_entries()
        table = self._transaction.table
        return {state.parameter: state for state in table.states if not _is_converted(state)}

    def _bind(self, parameters: Sequence[Tensor], names: Sequence[str]) -> Transaction:
        known, before = self._unbind(), self._table
        owners = [] if before is None else before.states
        arrays = {} if before is None or self._transaction is None else before.moved_arrays(before.all_rows)
        moved = {id(owners[row]): names for row, names in arrays.items()}
        new_values = NewValues() if self.overlap is None else self.overlap._transfers
        states = [
            known.get(parameter)
            or ParameterState(
                parameter,
                row,
                name,
                is_on_host=new_values.device.is_host(shards.local_of(parameter)),
                piece_numel=new_values.piece_numel,
                storage=self.storage,
            )
            for row, (parameter, name) in enumerate(zip(parameters, names, strict=True))
        ]
        _refuse_shared_memory(states, names)
        self.published.refuse_shared_memory(states, names)
        ranks = ranks_of(parameters, names, self.ranks, self.process_group)
        try:
            for state, name in zip(states, names, strict=True):
                state.name = name
            for state in states:
                owner = None if before is None else before.state_of(state.parameter)
                if owner is not None and owner is not state:
                    state.inherit(owner)
            table = ParameterTable(states, new_values, self.overlap._resident if self.overlap else None)
            for state in states:
                self.published.read(state, table, moved.get(id(state), ()))
            if before is not None:
                before.hand_on(table)
            for state in states:
                if not has_memory(state.local):  # which the next step refuses
                    table.fingerprints.distrust(state.row)
            if before is not None:
                before.forget_all_but(states)
            self.is_flattened, self.ranks, self._table = is_flattened(parameters), ranks, table
            self._transaction = Transaction(table, self._statistics, ranks)
            for state in states:
                taken = None if state.parameter.grad is None else taken_of(state.parameter.grad)
                if taken is not None:
                    taken.owner = weakref.ref(state)
            for owner in {*owners}.difference(states):
                for key in [*owner.shown]:
                    owner.forget(key)
            self.published.let_go(table.states)
            self.published.look(table)
            if self.overlap is not None:
                self.overlap._follow(self._transaction)
        except BaseException:  # the table before has rows of these states no longer; what they hold is in the entries
            self._forget_binding()
            raise
        return self._transaction

    def _nonfinite_of(self, taken: TakenGradient) -> int | None:
        return None if self._transaction is None else self._transaction.nonfinite_of(taken)


def _are_same(table: ParameterTable, parameters: Sequence[Tensor]) -> bool:
    """Whether these are the bound parameters, of the same dtype, layout and device; distrust those that have moved."""
    if len(parameters) != len(table.parameters) or not all(map(operator.is_, parameters, table.parameters)):
        return False
    if table.is_distributed and any(shards.local_of(state.parameter) is not state.local for state in table.states):
        return False
    moved = table.look()
    if any(map(_is_converted, moved)):
        return False
    for state in moved:
        table.fingerprints.distrust(state.row)
    return True


def _is_converted(state: ParameterState) -> bool:
    """Whether `.data` is not what the state describes, as after model.to(torch.bfloat16)."""
    if state.is_distributed and shards.local_of(state.parameter) is not state.local:
        return True
    if state.cuts and state.local.stride() != state.strides:  # pieces are consecutive in memory
        return True
    now = ParameterState(state.parameter, state.row, state.name)
    return bool(_get_kind(now) != _get_kind(state)) or (now.is_staged and not state.is_staged)


def _refuse_shared_memory(states: Sequence[ParameterState], names: Sequence[str]) -> None:
    """Raise ValueError if parameters or elements share memory: speculation on one would overwrite another."""
    listed: dict[Tensor, str] = {}
    for state, name in zip(states, names, strict=True):
        if state.parameter in listed:
            raise ValueError(
                f"{listed[state.parameter]} and {name} are the same parameter, expected each parameter once; remove "
                "one of them"
            )
        listed[state.parameter] = name
        if is_expanded(state.local):
            raise ValueError(
                f"{name} is expanded: its elements share memory, expected each element in memory of its own; "
                "clone() it before optimizing"
            )
    if shared := sharing([state.local for state in states]):
        first, second = (names[position] for position in shared)
        raise ValueError(
            f"{first} and {second} share memory, expected distinct parameters in distinct memory; "
            "tie weights by using one Parameter twice"
        )
