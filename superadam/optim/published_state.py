"""The optimizer's `state` dict as users and frameworks see it.

What they write into it is read before a step; what steps change is written back before it shows.
"""

from __future__ import annotations

import operator
import sys
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from superadam.distributed import shards
from superadam.optim import checkpoint
from superadam.state.parameter import TENSORS, ParameterState
from superadam.state.table import ParameterTable


class PublishedState:
    """The published dict, beside the rows of a `ParameterTable`.

    Attributes:
        entries: per parameter `step`, `exp_avg`, `exp_avg_sq` (`max_exp_avg_sq`, `master`), as users see it.
        is_exposed: whether there may be outside references to `entries` or its contents, through which it may change.
    """

    def __init__(self, entries: defaultdict[Tensor, Any], *, is_exposed: bool = False) -> None:
        self.entries = entries
        self.is_exposed = is_exposed

    def look_for_references(self) -> None:
        """Find out whether there are still outside references."""
        self.is_exposed = any(map(operator.gt, _references(self), _USUAL))

    def write(self, table: ParameterTable) -> None:
        """Bring `entries` up to date with rows that are newer; other entries, which users may have edited, stay."""
        for state in table.states:
            is_distributed = table.is_distributed and state.is_distributed
            if table.is_published[state.row] or state.is_accepted or not table.is_home(state):
                continue
            entry = self.entries.setdefault(state.parameter, {})
            count = int(table.steps[state.row])
            if "step" not in entry:
                entry["step"] = checkpoint.fitted_step(None, count)
            else:
                entry["step"].fill_(count)
            for key in TENSORS:
                tensor = getattr(state, key)
                if tensor is not None:
                    entry[key] = state.whole_of(key) if is_distributed else tensor
            table.is_published[state.row] = True

    def read(self, state: ParameterState, table: ParameterTable) -> bool:
        """Bring a row of the table up to date with `entries`, unless the row is the newer; return if it changed."""
        if state.has_state and not table.is_published[state.row]:
            return False
        entry = self.entries.get(state.parameter)
        if not entry or checkpoint.is_of_others(entry):
            if all(getattr(state, key) is None for key in TENSORS):  # moments may be there without a master
                return False
            state.master = state.exp_avg = state.exp_avg_sq = state.max_exp_avg_sq = None
            table.steps[state.row] = 0
            table.refresh_pointers(state)
            return True
        if not isinstance(entry, dict) or "step" not in entry:
            checkpoint.check_entry(entry, state)
        kept = checkpoint.local_entry(entry, state)
        is_stale = state.is_own_master or getattr(kept.get("master"), "shape", None) != state.shape
        if is_stale:
            kept.pop("master", None)
        is_new = any(getattr(state, key) is not kept.get(key) for key in TENSORS)
        if is_new:
            checkpoint.check_entry(kept, state)
            for key in TENSORS:
                tensor = kept.get(key)
                if tensor is not None:
                    fitted = checkpoint.fitted(tensor, state)
                    if fitted is not tensor:
                        entry[key] = state.whole(fitted)
                    tensor = fitted
                setattr(state, key, tensor)
            if state.is_distributed:
                state.wholes = {key: entry[key] for key in TENSORS if kept.get(key) is not None}
            table.refresh_pointers(state)
            table.fingerprints.distrust(state.row)
        if is_stale:
            entry.pop("master", None)  # from when the parameter had another dtype, device, layout or shape
        step = checkpoint.read_step(entry["step"], state.name)
        is_new = is_new or step != int(table.steps[state.row])
        table.steps[state.row] = step
        entry["step"] = checkpoint.fitted_step(entry["step"], step)
        return is_new


def _references(published: Any) -> tuple[int, ...]:
    """Count the references to published objects: the dict, its entries, their steps and their other tensors."""
    entries = [entry for entry in published.entries.values() if isinstance(entry, dict)]
    ours = ("step", *TENSORS)
    tensors = [(key, entry[key]) for entry in entries for key in ours if isinstance(entry.get(key), Tensor)]
    steps, others = ([value for key, value in tensors if (key == "step") is wanted] for wanted in (True, False))
    others += [shards.local_of(value) for value in others if shards.is_distributed(value)]
    del tensors
    most = [max(map(sys.getrefcount, some), default=0) for some in (entries, steps, others)]
    return sys.getrefcount(published.entries), *most


_held = torch.zeros((), device="cpu")  # once more than a step, as by a `ParameterState`
_USUAL = _references(SimpleNamespace(entries={0: {"step": torch.zeros((), device="cpu"), "exp_avg": _held}}))
