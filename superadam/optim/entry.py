"""A parameter's entry in `optimizer.state`, which decodes a tensor when it is first read."""

# ruff: noqa: D102  (methods of dict)

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from superadam.kernels import torch_private
from superadam.state import compact
from superadam.state.parameter import SECONDS, ParameterState, flat
from superadam.state.places import address_of

Lock = Callable[[], AbstractContextManager[object]]
"""Returns the lock of an optimizer."""


@dataclass(frozen=True, slots=True, eq=False)
class Encoded:
    """Stands in an `Entry` for a tensor that was not read yet. It owns its values, wherever the entry goes.

    Attributes:
        arrays: what the tensor is decoded from; steps write to them while they are those of a `ParameterState`.
        encoding: how.
        dtype: of the tensor.
        parameter: as which the tensor is distributed; None for ordinary ones.
    """

    arrays: tuple[Tensor, Tensor]
    encoding: compact.Encoding
    dtype: torch.dtype
    parameter: Tensor | None

    @staticmethod
    def of(state: ParameterState, key: str) -> Encoded:
        """Return what stands for a tensor of a state, which it has."""
        return Encoded(
            (getattr(state, key), getattr(state, SECONDS[key])),
            state.encodings[key],
            state.dtype_of(key),
            state.parameter if state.is_distributed else None,
        )

    @property
    def like(self) -> Tensor:
        """This rank's part of the tensor, without memory."""
        return torch.empty_like(self.arrays[0], dtype=self.dtype, device="meta")

    def whole(self, tensor: Tensor) -> Tensor:
        """Return this rank's part as users see it: distributed as the parameter."""
        return tensor if self.parameter is None else torch_private.dtensor_like(self.parameter, tensor)

    def decode(self, values: Tensor) -> None:
        """Write what the arrays hold into a tensor in the layout of the state, of its or a narrower dtype."""
        first, second = map(flat, self.arrays)
        compact.decode(self.encoding, first, second, flat(values))

    def decoded(self) -> Tensor:
        """Return the tensor as users see it, an ordinary one whatever is being traced or transformed."""
        with torch_private.ordinary_tensors():
            first = self.arrays[0]
            values = torch.empty_strided(first.shape, first.stride(), dtype=self.dtype, device="cpu")
            self.decode(values)
            return self.whole(values)


class Entry(dict[str, Any]):
    """A dict of which some values are `Encoded` until they are read; the tensors then stay, and may be written to.

    Only what returns values differs from a dict. Copies and pickles are dicts of tensors.

    Attributes:
        lock: returns the lock of the optimizer whose steps write to what is encoded.
        decoded: tensors that were read since they were last compared with a state, what stood for them, and addresses.
    """

    __slots__ = ("decoded", "lock")  # without weak references, which dicts do not have either

    def __init__(self, values: Mapping[str, Any], lock: Lock = nullcontext) -> None:
        super().__init__(values)
        self.lock = lock
        self.decoded: dict[str, tuple[Tensor, Encoded, int]] = {}

    def __getitem__(self, key: str) -> Any:
        value = super().__getitem__(key)
        if isinstance(value, Encoded):
            with self.lock():
                value = super().__getitem__(key)  # another thread may have read it
                if isinstance(value, Encoded):
                    encoded, value = value, value.decoded()
                    self.decoded[key] = value, encoded, address_of(value)
                    super().__setitem__(key, value)
        return value

    def __iter__(self) -> Iterator[str]:  # while this is a dict's own, dict(entry) asks for no values
        return iter(self.keys())

    get: Any = MutableMapping.get
    setdefault: Any = MutableMapping.setdefault
    values: Any = MutableMapping.values
    items: Any = MutableMapping.items
    __eq__: Any = MutableMapping.__eq__
    __ne__: Any = object.__ne__  # the opposite
    __hash__ = None

    def pop(self, key: str, *default: Any) -> Any:
        self.get(key)  # which decodes it
        return super().pop(key, *default)

    def popitem(self) -> tuple[str, Any]:
        self.copy()  # which decodes all
        return super().popitem()

    def __repr__(self) -> str:
        return repr(self.copy())

    def copy(self) -> dict[str, Any]:
        with self.lock():
            return {key: self[key] for key in self}

    __copy__ = copy

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, Any]:
        return copy.deepcopy(self.copy(), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:  # as what torch.load takes for a dict with weights_only
        return OrderedDict, (), None, None, iter([*self.copy().items()])


def raw(entry: dict[str, Any]) -> dict[str, Any]:
    """Return what an entry holds, without decoding anything."""
    return dict(dict.items(entry))  # of `entry` itself it would decode


torch_private.register_tree_node(
    Entry,
    lambda entry: (list(entry.values()), list(entry)),
    lambda values, keys: dict(zip(keys, values, strict=True)),
    flatten_with_keys_fn=lambda entry: ([(torch_private.tree_key(key), entry[key]) for key in entry], list(entry)),
)
