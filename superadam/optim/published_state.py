"""The optimizer's `state` dict as users and frameworks see it.

What they write into it is read before a step; what steps change is written back before it shows.
"""

from __future__ import annotations

import operator
import sys
from collections import defaultdict
from collections.abc import Collection
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from superadam.distributed import shards
from superadam.kernels import torch_private
from superadam.optim import checkpoint
from superadam.optim.entry import Encoded, Entry, Lock, raw
from superadam.state.parameter import TENSORS, ParameterState
from superadam.state.table import ParameterTable


class PublishedState:
    """The published dict, and how it follows the rows of a `ParameterTable`.

    Attributes:
        entries: per parameter `step`, `exp_avg`, `exp_avg_sq` (`max_exp_avg_sq`, `master`), as users see it.
        stays_encoded: whether state dicts have stand-ins for what is encoded.
        is_exposed: whether there may be outside references to `entries` or its contents, through which it may change.
    """

    def __init__(self, entries: defaultdict[Tensor, Any], lock: Lock, *, is_exposed: bool = False) -> None:
        self.entries = entries
        self._lock = lock
        self.is_exposed = is_exposed
        self.stays_encoded = False

    def look_for_references(self, table: ParameterTable) -> None:
        """Find out whether there are still outside references, and let go of decoded tensors to which there are none.

        What was written to these must have been read.
        """
        shown = [(state, key) for state in table.states for key in self._shown(state)]
        ids = {id(raw(self.entries[state.parameter])[key]) for state, key in shown}
        self.is_exposed = any(map(operator.gt, _references(self, ids), _USUAL))
        held = [(state, key) for state, key in shown if self._is_held(state, key)]
        self.is_exposed |= bool(held)
        for state, key in shown:
            entry = self.entries[state.parameter]
            if not isinstance(entry, Entry):
                if self.is_exposed:  # perhaps through this very dict, which decodes nothing
                    continue
                entry = self.entries[state.parameter] = Entry(entry, self._lock)
            if (state, key) not in held and not state.is_accepted:
                entry[key] = Encoded.of(state, key)

    def _is_held(self, state: ParameterState, key: str) -> bool:
        """Whether a program still refers to a decoded tensor, or that cannot be told."""
        counts = _counts(self.entries[state.parameter], key)
        return any(map(operator.gt, counts, _USUAL_COUNTS)) or bool(torch_private.missing)

    def _shown(self, state: ParameterState) -> list[str]:
        """Return what is decoded in a parameter's entry, or was given to it."""
        entry = self.entries.get(state.parameter) if state.encodings else None
        present = raw(entry) if isinstance(entry, dict) else {}
        return [key for key in state.encodings if isinstance(present.get(key), Tensor)]

    def write(self, table: ParameterTable) -> None:
        """Bring `entries` up to date with rows that are newer; other entries, which users may have edited, stay."""
        for state in table.states:
            is_distributed = table.is_distributed and state.is_distributed
            if table.is_published[state.row] or state.is_accepted or not table.is_home(state):
                continue
            entry = self.entries.get(state.parameter)
            if entry is None:
                entry = self.entries[state.parameter] = Entry(lock=self._lock) if state.encodings else {}
            count = int(table.steps[state.row])
            if "step" not in entry:
                entry["step"] = checkpoint.fitted_step(None, count)
            else:
                entry["step"].fill_(count)
            for key in TENSORS:
                tensor = getattr(state, key)
                if tensor is not None and key in state.encodings:
                    _show(entry, key, state)
                elif tensor is not None:
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
            for key in TENSORS:
                state.forget(key)
            table.steps[state.row] = 0
            table.refresh_pointers(state)
            return True
        if not isinstance(entry, dict) or "step" not in entry:
            checkpoint.check_entry(entry, state)
        is_new = False
        if isinstance(entry, Entry):
            entry.lock = self._lock  # from loading, or of another optimizer
        for key, value in raw(entry).items():
            if isinstance(value, Encoded) and not (key in state.encodings and value.arrays[0] is getattr(state, key)):
                if state.take_encoded(key, value.encoding, value.arrays):
                    entry[key], is_new = Encoded.of(state, key), True
                else:
                    entry[key]  # of another layout or format: decoded, to be stored again
        kept = checkpoint.local_entry(raw(entry), state)
        is_stale = state.is_own_master or _shape_of(kept.get("master")) != state.shape
        if is_stale:
            kept.pop("master", None)
        present = [_Present(kept.get(key), raw(entry).get(key), state, key) for key in TENSORS]
        is_new |= any(one.is_new for one in present)
        is_edited = False
        if is_new or any(one.is_shown for one in present):
            checkpoint.check_entry(kept, state)
            for one in present:
                is_edited |= one.store(entry)
        if is_new:
            if state.is_distributed:
                plain = [key for key in TENSORS if kept.get(key) is not None and key not in state.encodings]
                state.wholes = {key: entry[key] for key in plain}
            table.refresh_pointers(state)
            table.fingerprints.distrust(state.row)
        if is_stale and "master" in entry:
            del entry["master"]  # from when the parameter had another dtype, device, layout or shape
        step = checkpoint.read_step(entry["step"], state.name)
        is_new = is_new or is_edited or step != int(table.steps[state.row])
        table.steps[state.row] = step
        entry["step"] = checkpoint.fitted_step(entry["step"], step)
        return is_new


class _Present:
    """One of `TENSORS` as an entry has it: this rank's part, and the whole.

    Attributes:
        is_shown: whether it is the decoded tensor that stands for what the state has, to which users may have written.
        is_new: whether it is another object, whose values replace those of the state.
    """

    def __init__(self, value: Any, whole: Any, state: ParameterState, key: str) -> None:
        self._value, self._whole, self._state, self._key = value, whole, state, key
        self._is_encoded = key in state.encodings
        had = getattr(state, key)
        self.is_shown = self._is_encoded and had is not None and state.shown[key].is_by(whole)
        is_same = self.is_shown or (value is None and had is None) or isinstance(value, Encoded)  # which was taken
        self.is_new = not is_same if self._is_encoded else value is not had

    def store(self, entry: dict[str, Any]) -> bool:
        """Give the state this value, which was checked; return whether that changed it."""
        state, key, value = self._state, self._key, self._value
        if isinstance(value, Encoded) or not (self.is_shown or self.is_new):
            return False
        if value is None:
            state.forget(key)
        elif self._is_encoded:
            is_changed = state.encode(key, value)
            state.shown[key].set(self._whole)
            if is_changed:
                _show(entry, key, state)
            return is_changed
        else:
            fitted = checkpoint.fitted(value, state, key)
            if fitted is not value:
                entry[key] = state.whole(fitted)
            setattr(state, key, fitted)
        return self.is_new


def _show(entry: dict[str, Any], key: str, state: ParameterState) -> None:
    """Update the decoded tensor, if a program has read one and it still fits; else drop it."""
    shown = shards.local_of(raw(entry).get(key))
    if isinstance(shown, Tensor) and shown.dtype == state.dtype_of(key) and state.has_layout(shown):
        with torch.no_grad(), torch_private.inference_mode(shown.is_inference()):
            state.decode(key, shown)
    else:
        encoded = Encoded.of(state, key)
        entry[key] = encoded if isinstance(entry, Entry) else encoded.decoded()


def _shape_of(value: Any) -> object:
    return value.arrays[0].shape if isinstance(value, Encoded) else getattr(value, "shape", None)


def _references(published: Any, ids: Collection[int] = ()) -> tuple[int, ...]:
    """Count the references to published objects: the dict, its entries, their steps and their other tensors.

    Tensors with these ids are left out.
    """
    entries = [entry for entry in published.entries.values() if isinstance(entry, dict)]
    ours = ("step", *TENSORS)
    tensors = [(key, value) for entry in entries for key in ours if isinstance(value := raw(entry).get(key), Tensor)]
    tensors = [(key, value) for key, value in tensors if id(value) not in ids]
    steps, others = ([value for key, value in tensors if (key == "step") is wanted] for wanted in (True, False))
    others += [shards.local_of(value) for value in others if shards.is_distributed(value)]
    del tensors
    value = None
    most = [max(map(sys.getrefcount, some), default=0) for some in (entries, steps, others)]
    return sys.getrefcount(published.entries), *most


def _counts(entry: dict[str, Any], key: str) -> tuple[int, ...]:
    """Count the references to a decoded tensor, to this rank's part of it, and to its memory."""
    value = raw(entry)[key]
    local, more = shards.local_of(value), int(shards.is_distributed(value))
    storage = torch_private.storage_key(local.untyped_storage())
    return sys.getrefcount(value) + more, sys.getrefcount(local) + more, torch_private.storage_use_count(storage)


_held = torch.zeros((), device="cpu")  # once more than a step, as by a `ParameterState`
_USUAL = _references(SimpleNamespace(entries={0: {"step": torch.zeros((), device="cpu"), "exp_avg": _held}}))
_USUAL_COUNTS = _counts({"exp_avg": torch.zeros((), device="cpu")}, "exp_avg")
