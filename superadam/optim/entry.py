"""A parameter's entry in the optimizer's `state`, in which what is encoded is decoded when somebody asks for it."""

# ruff: noqa: D102  (methods of dict)

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from superadam.kernels import torch_private
from superadam.state import compact
from superadam.state.parameter import SECONDS, ParameterState, flat


class Encoded(NamedTuple):
    """Stands in an `Entry` for a tensor that nobody has asked for."""

    state: ParameterState
    key: str

    @property
    def arrays(self) -> list[Tensor]:
        """What it is decoded from."""
        return [getattr(self.state, name) for name in (self.key, SECONDS[self.key])]

    @property
    def like(self) -> Tensor:
        """This rank's part of the tensor, without memory."""
        shape, strides, dtype = self.state.shape, self.state.strides, self.state.dtype_of(self.key)
        return torch.empty_strided(shape, strides, dtype=dtype, device="meta")

    def decode(self, arrays: Sequence[Tensor], values: Tensor) -> None:
        """Write what copies of the arrays hold into a tensor in the layout of the state, of its or a narrower dtype."""
        first, second = map(flat, arrays)
        compact.decode(self.state.encodings[self.key], first, second, flat(values))

    def decoded(self) -> Any:
        """Return the tensor as users see it."""
        with torch_private.inference_mode(False):
            torch.set_grad_enabled(False)  # until inference_mode restores it
            values = self.state.values_of(self.key)
            return None if values is None else self.state.whole(values)


class Entry(dict[str, Any]):
    """A dict of which some values are `Encoded` until they are read; the tensors then stay, and may be written to.

    Only what returns values differs from a dict. Copies, of which pickles are one, are plain dicts of tensors.
    """

    def _value(self, key: str, value: Any) -> Any:
        if isinstance(value, Encoded):
            value = value.decoded()
            super().__setitem__(key, value)
        return value

    def __getitem__(self, key: str) -> Any:
        return self._value(key, super().__getitem__(key))

    def __iter__(self) -> Iterator[str]:  # while this is a dict's own, dict(entry) asks for no values
        return iter(self.keys())

    def get(self, key: str, default: Any = None) -> Any:
        return self[key] if key in self else default  # noqa: SIM401 (it is this)

    def setdefault(self, key: str, default: Any = None) -> Any:
        return self[key] if key in self else super().setdefault(key, default)

    def pop(self, key: str, *default: Any) -> Any:
        self.get(key)
        return super().pop(key, *default)

    def popitem(self) -> tuple[str, Any]:
        key, value = super().popitem()
        return key, value.decoded() if isinstance(value, Encoded) else value

    def values(self) -> Any:
        self._decode()
        return super().values()

    def items(self) -> Any:
        self._decode()
        return super().items()

    def __eq__(self, other: object) -> bool:
        self._decode()
        return super().__eq__(other)

    __hash__ = None

    def __repr__(self) -> str:
        self._decode()
        return super().__repr__()

    def copy(self) -> dict[str, Any]:
        return {key: self[key] for key in self}

    def __reduce__(self) -> Any:
        return dict, (self.copy(),)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.__reduce__()

    def _decode(self) -> None:
        for key in list(self):
            self[key]


def raw(entry: dict[str, Any]) -> dict[str, Any]:
    """Return what an entry holds, without decoding anything."""
    return {key: value for key, value in dict.items(entry)}  # noqa: C416 (dict() would decode)


torch_private.register_tree_node(
    Entry,
    lambda entry: (list(entry.values()), list(entry)),
    lambda values, keys: dict(zip(keys, values, strict=True)),
)
