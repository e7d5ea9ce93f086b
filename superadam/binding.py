"""Which state belongs to which parameter: between the parameter groups, the published `state` dict and the
transaction's table.

Owns the published dict and keeps both sides equal: what users and frameworks write into the dict is read before a
step, what steps change is written back before anybody can see it. It runs no arithmetic.
"""

from __future__ import annotations

import itertools
import operator
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from superadam import checkpoint
from superadam.hyperparameters import Hyperparameters
from superadam.outcome import Statistics
from superadam.parameter import ParameterState, Phase
from superadam.table import ParameterTable
from superadam.transaction import Transaction

_get_parameter = operator.attrgetter("parameter")

TENSORS = (*checkpoint.MOMENTS, *checkpoint.OPTIONAL)
"""Keys of a parameter's published state beside `step`; also attributes of `ParameterState`."""

Groups = Sequence[dict[str, Any]]
"""Parameter groups as `torch.optim.Optimizer.param_groups` holds them."""


def names_of(group: dict[str, Any], index: int) -> list[str]:
    """Return how errors call the parameters of a group."""
    return group.get("param_names") or [f"parameter {k} of group {index}" for k in range(len(group["params"]))]


class Binding:
    """Binds lazily, because frameworks replace parameters between construction and the first step.

    Attributes:
        published: per parameter `step`, `exp_avg`, `exp_avg_sq` (`max_exp_avg_sq`, `master`), as users see it.
        transaction: over the parameters that were bound last; None before the first.
        is_exposed: whether somebody outside may hold `published`, and so may change it at any time.
    """

    def __init__(self, published: defaultdict[Tensor, Any], statistics: Statistics) -> None:
        self.published = published
        self.transaction: Transaction | None = None
        self.is_exposed = False
        self._statistics = statistics

    def bound(self, groups: Groups) -> Transaction:
        """Return the transaction over the present parameters of the groups, its clean rows equal to what is published.

        Raises:
            RuntimeError: the parameters changed while speculation was open.
            ValueError: two parameters share memory, or somebody published what cannot be a state.
        """
        parameters = [parameter for group in groups for parameter in group["params"]]
        transaction = self.transaction
        if transaction is None or not _are_same(transaction.table.states, parameters):
            return self._bind(
                parameters, [name for index, group in enumerate(groups) for name in names_of(group, index)]
            )
        if self.is_exposed:
            for state in transaction.table.states:
                if state.pending is None:
                    self._read(state, transaction.table)
        return transaction

    def with_hyperparameters(self, groups: Groups) -> Iterator[tuple[list[ParameterState], Hyperparameters]]:
        """Yield, group by group, the states that `bound` has bound and the present hyper-parameters.

        Raises:
            ValueError: a hyper-parameter is out of range.
        """
        assert self.transaction is not None
        states = iter(self.transaction.table.states)
        for group in groups:
            yield list(itertools.islice(states, len(group["params"]))), Hyperparameters.of_group(group)

    def committed(self, groups: Groups) -> defaultdict[Tensor, Any]:
        """Return the published state after committing what is accepted and adopting what was written to parameters."""
        if self.published:
            self.bound(groups)
        if self.transaction is not None:
            self.transaction.commit()
            self._write(self.transaction.table)
        return self.published

    def keep_published(self) -> None:
        """Bring what somebody may hold up to date after a step."""
        if self.is_exposed and self.transaction is not None:
            self._write(self.transaction.table)

    def _bind(self, parameters: Sequence[Tensor], names: Sequence[str]) -> Transaction:
        known: dict[Tensor, ParameterState] = {}
        if self.transaction is not None:
            if self.transaction.is_open:
                raise RuntimeError(
                    "the parameters of the optimizer changed while speculation was open; "
                    "call resolve() or rollback() before changing them"
                )
            self.transaction.commit()
            self._write(self.transaction.table)
            known = {state.parameter: state for state in self.transaction.table.states}
        states = []
        for row, (parameter, name) in enumerate(zip(parameters, names, strict=True)):
            state = known.get(parameter) or ParameterState(parameter, row, name)
            state.row, state.name = row, name
            states.append(state)
        _refuse_shared_memory(states)
        table = ParameterTable(states)
        for state in states:
            self._read(state, table)
        self.transaction = Transaction(table, self._statistics)
        return self.transaction

    def _write(self, table: ParameterTable) -> None:
        """Bring `published` up to date with the table, except where an accepted step is not committed yet."""
        for state in table.states:
            if not state.has_state or state.is_provisional or state.phase is Phase.ACCEPTED:
                continue
            entry = self.published[state.parameter]
            step = entry.setdefault("step", torch.zeros((), dtype=torch.float32))
            if step != table.steps[state.row]:
                step.fill_(float(table.steps[state.row]))
            for key in TENSORS:
                tensor = None if key == "max_exp_avg_sq" and state.is_max_provisional else getattr(state, key)
                if tensor is not None:
                    entry[key] = tensor

    def _read(self, state: ParameterState, table: ParameterTable) -> None:
        """Bring a clean row of the table up to date with `published`."""
        entry = self.published.get(state.parameter)
        if not entry:
            if state.has_state:
                state.is_provisional = state.is_max_provisional = True
                state.forget_provisional()
                table.steps[state.row] = 0
                table.note_moved(state)
            return
        if state.is_own_master:
            entry.pop("master", None)  # of a working copy once: of lower precision, elsewhere, or not dense
        if any(getattr(state, key) is not entry.get(key) for key in TENSORS):
            checkpoint.check_entry(entry, state)
            for key in TENSORS:
                tensor = entry.get(key)
                if tensor is not None:
                    entry[key] = tensor = checkpoint.fitted(tensor, state)
                setattr(state, key, tensor)
            table.note_moved(state)
            state.distrust()
        table.steps[state.row] = checkpoint.read_step(entry["step"], state.name)
        if not isinstance(entry["step"], Tensor):
            entry["step"] = torch.tensor(float(entry["step"]), dtype=torch.float32)


def _are_same(states: Sequence[ParameterState], parameters: Sequence[Tensor]) -> bool:
    return len(states) == len(parameters) and all(map(operator.is_, parameters, map(_get_parameter, states)))


def _refuse_shared_memory(states: Sequence[ParameterState]) -> None:
    """Raise when two parameters lie in the same memory: speculation on one would overwrite the other.

    Raises:
        ValueError: two distinct parameters overlap.
    """
    spans = []
    for state in states:
        p = state.parameter
        if p.numel():
            extent = 1 + sum((size - 1) * stride for size, stride in zip(p.shape, p.stride(), strict=True))
            spans.append((str(p.device), p.data_ptr(), p.data_ptr() + extent * p.element_size(), state.name))
    spans.sort()
    for (device, _, end, first), (other_device, begin, _, second) in itertools.pairwise(spans):
        if device == other_device and begin < end:
            raise ValueError(
                f"{first} and {second} share memory, expected distinct parameters in distinct memory; "
                "tie weights by using one Parameter twice"
            )
