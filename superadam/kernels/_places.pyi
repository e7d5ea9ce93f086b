"""The C module of `cpu/places.c`."""

from collections.abc import Sequence
from typing import Any

def use(exchange: object, storage_of: object, bytes_of: object, key: str, version: str) -> None:
    """Take the exchange API, what returns a storage and its bytes, and names of attributes."""

def look(tensors: Sequence[object], places: Any) -> None:
    """Write the places of a list of tensors, or None, into an array of int64."""
