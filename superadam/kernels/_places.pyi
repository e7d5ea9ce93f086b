"""The C module of `cpu/places.c`."""

from collections.abc import Sequence
from typing import Any

def use(exchange: object, names: tuple[object, ...]) -> None:
    """Take the exchange API, and a tuple of torch's class and methods, and names of attributes."""

def look(tensors: Sequence[object], places: Any) -> None:
    """Write the places of a list of tensors, or None, into an array of int64."""

def compare(tensors: Sequence[object], known: Any, versions: Any, rows: Any) -> tuple[int, int]:
    """Compare places with those in an array; write versions, and where places differ; return how many of each do."""

def gradients(parameters: Sequence[object], layouts: Any, addresses: Any) -> tuple[list[Any], int, int]:
    """Return gradients, how many are present, and how many lie as an array says; write the addresses of those."""
