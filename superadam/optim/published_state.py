"""The optimizer's `state` dict as users and frameworks see it.

What they write into it is read before a step; what steps change is written back before it shows. A tensor that kernels
cannot work on stays there as a *stand-in*: a decoded one, or one that a program has put there in another dtype, layout
or place. It is compared with the state before each step, and gets its values after it, for as long as a program has it.
"""

from __future__ import annotations

import itertools
import sys
import weakref
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from superadam.distributed import shards
from superadam.handles.gradient_handle import is_held, is_uncounted
from superadam.kernels import torch_private
from superadam.kernels.hyperparameters import number_of
from superadam.optim import checkpoint
from superadam.optim.entry import Encoded, Entry, Lock, raw
from superadam.state.parameter import TENSORS, ParameterState, differing
from superadam.state.places import VERSION, address_of, places_of, sharing
from superadam.state.table import ParameterTable


class PublishedState:
    """The published dict, and how it follows the rows of a `ParameterTable`.

    Attributes:
        entries: per parameter `step`, `exp_avg`, `exp_avg_sq` (`max_exp_avg_sq`, `master`), as users see it.
        stays_encoded: whether state dicts have stand-ins for what is encoded.
    """

    def __init__(self, entries: defaultdict[Tensor, Any], lock: Lock) -> None:
        self.entries = entries
        self._lock = lock
        self.stays_encoded = False
        self._apart: list[tuple[int, str, list[int]]] = []  # what was edited and shared no memory: row, key, place

    def read_edited(self, table: ParameterTable) -> None:
        """Bring rows up to date with those entries, among the ones that programs may hold, that they have edited."""
        held, moved = table.held_states(), table.moved_arrays(np.flatnonzero(table.is_held))
        edited = [state for state in held if state.row in moved or not self._is_as_read(state, table)]
        # Each is asked for twice: a list of the tensors would be references, as programs have them.
        places = places_of([tensor for state in edited for _, tensor in self._tensors_of(state)])[:, :VERSION].tolist()
        keys = [(state.row, key) for state in edited for key, _ in self._tensors_of(state)]
        apart = [(*key, place) for key, place in zip(keys, places, strict=True)]
        if apart and apart != self._apart:  # stand-ins that programs keep come with each step
            self.refuse_shared_memory(table.states, [state.name for state in table.states])
            self._apart = apart
        for state in edited:  # none is accepted: speculation reads no state that programs may hold
            self.read(state, table, moved.get(state.row, ()))
        self.let_go(edited)

    def refuse_shared_memory(self, states: Sequence[ParameterState], names: Sequence[str]) -> None:
        """Raise ValueError if entries have tensors in the same memory, to which the steps of several would write."""
        self._apart = []
        found = [
            (tensor, f"{key} of {name}")
            for state, name in zip(states, names, strict=True)
            for key, tensor in self._tensors_of(state)
        ]
        if shared := sharing([tensor for tensor, _ in found]):
            first, second = (found[position][1] for position in shared)
            raise ValueError(
                f"{first} and {second} share memory, expected state of its own for each; clone() one of them"
            )

    def _tensors_of(self, state: ParameterState) -> Iterator[tuple[str, Tensor]]:
        """Yield which of `TENSORS` a parameter's entry has, and what has the memory of this rank's part."""
        entry = self.entries.get(state.parameter)
        values = entry if type(entry) is dict else raw(entry) if isinstance(entry, dict) else {}
        for key in TENSORS:
            value = values.get(key)
            if isinstance(value, Tensor | Encoded):
                yield key, value.arrays[0] if isinstance(value, Encoded) else shards.local_of(value)

    def contents(self) -> list[object]:
        """Return which keys and objects are in the entries; nothing is equal to it where one of these is no dict."""
        entries = self.entries.values()
        if not all(map(isinstance, entries, itertools.repeat(dict))):
            return [object()]
        keys = itertools.chain.from_iterable(map(dict.keys, entries))
        return [*map(id, self.entries), *keys, *map(id, itertools.chain.from_iterable(map(dict.values, entries)))]

    def look(self, table: ParameterTable) -> None:
        """Find out of which rows, among those that may be held, programs hold anything; changes nothing that they see.

        A row that was edited counts as held until it is read.
        """
        rows = np.flatnonzero(table.is_held)
        moved = table.moved_arrays(rows)
        if sys.getrefcount(self.entries) <= _ALONE + 1:
            for row in rows.tolist():
                state = table.states[row]
                self._encode_again(state)
                table.is_held[row] = row in moved or not self._is_as_read(state, table) or self._is_held(state)
        table.is_exposed, table.is_any_held = False, bool(table.is_held.any())

    def _encode_again(self, state: ParameterState) -> None:
        """Let go of what an entry has decoded, if no program has it or has written to it."""
        entry = self.entries.get(state.parameter)
        if not isinstance(entry, Entry) or sys.getrefcount(self.entries[state.parameter]) > _ALONE + 2:
            return
        for key in [*entry.decoded]:
            if not _was_read_from(state, key, entry) or _is_referenced(raw(entry), key, _STAND_IN):
                continue
            value, encoded = shards.local_of(entry.decoded[key][0]), entry.decoded[key][1]
            is_alike = (value.shape, value.dtype) == (state.shape, encoded.dtype) and state.has_layout(value)
            if is_alike and not differing(value, shards.local_of(encoded.decoded())).any():
                entry[key] = encoded
                del entry.decoded[key]

    def let_go(self, states: Sequence[ParameterState]) -> None:
        """Let go of stand-ins that no program has. Call `read` first: a write to one of them would be lost."""
        is_dict_held = sys.getrefcount(self.entries) > _ALONE + 1
        for state in states:
            for key in self._stand_ins(state):
                if not _is_referenced(raw(self.entries[state.parameter]), key, _STAND_IN):
                    is_entry_held = sys.getrefcount(self.entries[state.parameter]) > _ALONE + 1
                    self._let_go_of(state, key, is_entry_held=is_dict_held or is_entry_held)

    def _let_go_of(self, state: ParameterState, key: str, *, is_entry_held: bool) -> None:
        entry = self.entries[state.parameter]
        is_decoding = isinstance(entry, Entry) and key in state.encodings
        if is_entry_held and not is_decoding:  # a program would find another dtype or layout
            return
        if key in state.encodings and not is_decoding:
            entry = self.entries[state.parameter] = Entry(entry, self._lock)
        _put(entry, key, state)

    def _is_held(self, state: ParameterState) -> bool:
        """Whether a program refers to a parameter's entry or to anything in it, or that cannot be told."""
        if state.parameter not in self.entries:
            return False
        is_entry_held = sys.getrefcount(self.entries[state.parameter]) > _ALONE + 1
        if state.arrays or is_entry_held:
            return True
        values = raw(self.entries[state.parameter])
        return any(
            _is_referenced(values, key, _STEP if key == "step" else _NATIVE)
            for key in checkpoint.OURS
            if isinstance(values.get(key), Tensor)
        )

    def _is_as_read(self, state: ParameterState, table: ParameterTable) -> bool:
        """Whether an entry holds what the row does, in the same tensors, and no stand-in that may be written to."""
        if state.has_state and not table.is_published[state.row]:  # the row is the newer
            return True
        entry = self.entries.get(state.parameter)
        if not isinstance(entry, dict) or "step" not in entry:
            return not entry and all(getattr(state, key) is None for key in TENSORS)  # moments may lack a master
        values = entry if type(entry) is dict else raw(entry)
        for key in TENSORS:
            value, had = values.get(key), getattr(state, key)
            if isinstance(value, Encoded):
                value = value.arrays[0]
            if value is not had and shards.local_of(value) is not had:
                return False
        step, count = values["step"], int(table.steps[state.row])
        return checkpoint.counts_in_place(step, count) and number_of(step) == count

    def _stand_ins(self, state: ParameterState) -> list[str]:
        entry = self.entries.get(state.parameter)
        values = raw(entry) if isinstance(entry, dict) else {}
        return [key for key, shown in state.shown.items() if values.get(key) is shown]

    def write(self, table: ParameterTable, states: Sequence[ParameterState]) -> None:
        """Bring `entries` up to date with those of these states, on the host, whose rows are newer.

        Other entries, which users may have edited, stay.
        """
        for state in states:
            if table.is_published[state.row]:
                continue
            entry = self.entries.get(state.parameter)
            if entry is None:
                entry = self.entries[state.parameter] = Entry({}, self._lock) if state.encodings else {}
            count = int(table.steps[state.row])
            entry["step"] = checkpoint.fitted_step(entry.get("step"), count)
            entry["step"].fill_(count)
            for key in TENSORS:
                if getattr(state, key) is not None:
                    _show(entry, key, state)
            table.is_published[state.row] = True

    def read(self, state: ParameterState, table: ParameterTable, moved: Collection[str] = ()) -> None:
        """Bring a row of the table up to date with `entries`, unless the row is the newer.

        `moved` are the names of its arrays that have moved since they were bound.
        """
        if state.has_state and not table.is_published[state.row]:
            if moved:
                checkpoint.check_arrays(state)
                state.put({name: getattr(state, name) for name in moved})
            return
        entry = self.entries.get(state.parameter)
        if not entry or checkpoint.is_of_others(entry):
            for key in TENSORS:
                state.forget(key)
            table.steps[state.row] = 0
            return
        if not isinstance(entry, dict) or "step" not in entry:
            checkpoint.check_entry(entry, state)
        is_new, master = False, state.master
        if isinstance(entry, Entry):
            entry.lock = self._lock  # from loading, or of another optimizer
        for key, value in raw(entry).items():
            if isinstance(value, Encoded):
                if state.take_encoded(key, value.encoding, value.arrays):
                    entry[key], is_new = Encoded.of(state, key), True
                else:
                    entry[key]  # of another layout or format: decoded, to be stored again
        kept = checkpoint.local_entry(raw(entry), state)
        given = kept.get("master")
        is_resized = isinstance(given, Tensor) and not given.is_nested and given.shape != state.shape
        is_stale = state.is_own_master or given is None or is_resized
        if is_stale:
            kept.pop("master", None)
        shown = [key for key in self._stand_ins(state) if key in kept and getattr(state, key) is not None]
        new = [key for key in TENSORS if key not in shown and _is_new(kept.get(key), state, key, moved)]
        is_new |= bool(new)
        if is_new or shown:
            checkpoint.check_entry(kept, state)
            for key in shown:
                if state.adopt(key, kept[key]):
                    _show(entry, key, state)
            for key in new:
                _store(entry, key, kept.get(key), state)
        if is_new:
            if state.is_distributed:
                plain = [key for key in TENSORS if kept.get(key) is not None and kept[key] is getattr(state, key)]
                state.wholes = {key: entry[key] for key in plain}
            if state.master is not master or "master" in moved:
                table.fingerprints.distrust(state.row)
        if is_stale and "master" in entry:
            del entry["master"]  # from when the parameter had another dtype, device, layout or shape
        step = checkpoint.read_step(entry["step"], state.name)
        table.steps[state.row] = step
        entry["step"] = checkpoint.fitted_step(entry["step"], step)
        if isinstance(entry, Entry):
            entry.decoded.clear()


def _was_read_from(state: ParameterState, key: str, entry: dict[str, Any]) -> bool:
    """Whether an entry has a tensor that was decoded from this state, so that only its values may be others."""
    if not isinstance(entry, Entry) or key not in entry.decoded:
        return False
    value, encoded, address = entry.decoded[key]
    is_same = value is raw(entry).get(key) and address_of(value) == address
    return is_same and encoded.arrays[0] is getattr(state, key)


def _is_new(value: Any, state: ParameterState, key: str, moved: Collection[str]) -> bool:
    """Whether this is another object than the state's, or in another place, so that its values replace the state's."""
    return not isinstance(value, Encoded) and (value is not getattr(state, key) or key in moved)  # that was taken


def _store(entry: dict[str, Any], key: str, value: Tensor | None, state: ParameterState) -> None:
    """Give a state the value of an entry, this rank's part of it, which was checked."""
    state.arrays.discard(key)
    if value is None:
        state.forget(key)
    elif key not in state.encodings and value.dtype == state.dtype_of(key) and state.has_layout(value):
        state.shown.pop(key, None)
        if is_uncounted(value):
            state.arrays.add(key)
        state.put({key: value})
    else:
        is_changed = state.store(key, value, in_place=_was_read_from(state, key, entry))
        state.shown[key] = raw(entry)[key]
        if is_changed:
            _show(entry, key, state)


def _show(entry: dict[str, Any], key: str, state: ParameterState) -> None:
    """Let an entry have a tensor of the state: in the stand-in for it, if there is one that still fits."""
    whole = raw(entry).get(key)
    shown = shards.local_of(whole) if whole is not None and state.shown.get(key) is whole else None
    if shown is not None and shown.shape == state.shape:
        with torch_private.inference_mode(shown.is_inference()), torch.no_grad():  # the first enables it
            state.show(key, shown)
    else:
        _put(entry, key, state)


def _put(entry: dict[str, Any], key: str, state: ParameterState) -> None:
    """Put what the state has into an entry, or what decodes it when it is read."""
    state.shown.pop(key, None)
    if key not in state.encodings:
        entry[key] = state.whole_of(key) if state.is_distributed else getattr(state, key)
    elif isinstance(entry, Entry):
        entry[key] = Encoded.of(state, key)
    else:
        entry[key] = state.shown[key] = Encoded.of(state, key).decoded()


# ---- references: what shares memory with a tensor counts, too --------------------------------------------------------

_ALONE = 1
"""What `sys.getrefcount` returns of an expression's value to which nothing refers: the reference that it is passed."""
_STEP, _STAND_IN, _NATIVE = 1, 2, 3
"""References to tensors: by an entry; by a `ParameterState` as well; and by a `ParameterTable`."""


def _is_referenced(values: dict[str, Any], key: str, usual: int) -> bool:
    """Whether a program refers to a tensor in a copy of an entry, to which this many objects usually refer."""
    if not shards.is_distributed(values[key]):
        return is_held(values, key, usual)
    count = sys.getrefcount(values[key]) + weakref.getweakrefcount(values[key])
    if count > _ALONE + 1 + min(usual, _STAND_IN):  # `wholes` of a `ParameterState`
        return True
    return is_held({key: shards.local_of(values[key])}, key, _NATIVE if usual == _NATIVE else _STEP)
