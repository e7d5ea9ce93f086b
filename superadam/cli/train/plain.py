"""Dataclasses made of plain values from a file, with the check that each field has a type that it declares."""

from __future__ import annotations

from collections.abc import Mapping
from types import UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

Record = TypeVar("Record")


def record_of_plain(kind: type[Record], plain: Mapping[str, Any]) -> Record:
    """Return a dataclass of these values: of all its fields, each exactly of a type that it declares.

    Raises:
        TypeError: they are others.
    """
    hints = get_type_hints(kind)
    if plain.keys() != hints.keys():
        raise TypeError(f"{kind.__name__} has other fields than {', '.join(hints)}")
    for name, hint in hints.items():
        expected = get_args(hint) if isinstance(hint, UnionType) else (get_origin(hint) or hint,)
        if type(plain[name]) not in expected:
            raise TypeError(f"{name} of {kind.__name__} is a {type(plain[name]).__name__}, expected {hint}")
    return kind(**plain)
