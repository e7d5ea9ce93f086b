"""Machines: rates and sizes of one rank's share, from TOML files, each with where it comes from."""

from __future__ import annotations

import enum
import tomllib
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from importlib import resources
from pathlib import Path
from typing import Any

from superadam.plan import UnplannableError
from superadam.plan.events import Passes


class Kind(enum.Enum):
    """How far a number can be trusted, from the most to the least."""

    EXACT = "exact"
    MEASURED = "measured"
    PUBLISHED = "published"
    ASSUMED = "assumed"


@dataclass(frozen=True, slots=True)
class Rate:
    """A number of a machine."""

    value: float
    kind: Kind
    source: str


PASSES = tuple(field.name for field in fields(Passes))
"""The passes of which a machine may have its own seconds."""


@dataclass(frozen=True, slots=True)
class Machine:
    """What one rank has; bytes, seconds and operations."""

    title: str
    gpu_memory: Rate
    gpu_reserved: Rate  # bytes of CUDA's context, workspaces and fragments
    gpu_operations: Rate  # peak of dense bf16, per second
    gpu_bandwidth: Rate  # bytes per second that kernels reach
    download: Rate  # bytes per second, as is the next
    upload: Rate
    host_memory: Rate
    cpu_bandwidth: Rate  # bytes per second that all cores reach
    cpu_cores: Rate
    cpu_clock: Rate  # hertz
    cpu_cycles: Rate  # of a core, for the arithmetic of an element
    host_reserved: Rate = Rate(1.5e9, Kind.ASSUMED, "the process, with CUDA; 8e7 to 9e7 without it were measured")
    worker_per_bucket: Rate = Rate(  # seconds of Python, as is the next
        3e-4, Kind.MEASURED, "0.2 to 0.4 ms of thread CPU time on a loaded x86 machine with 2 cores"
    )
    step_per_bucket: Rate = Rate(
        8.2e-5, Kind.MEASURED, "a bucket of 3 tensors in step(), on that machine; 38 us with 1 tensor, 195 with 9"
    )
    one_memory: bool = False  # whether CPU and GPU share it
    passes: Mapping[str, Rate] | None = None  # seconds of an element in each of `PASSES`; None: by bytes and cycles

    @property
    def rates(self) -> dict[str, Rate]:
        """All numbers by name."""
        every = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: rate for name, rate in every.items() if isinstance(rate, Rate)} | dict(self.passes or {})


def names() -> list[str]:
    """Return the machines that are described here."""
    return sorted(file.name[:-5] for file in resources.files("superadam.plan").joinpath("machines").iterdir())


def read(name: str) -> Machine:
    """Return a machine by its name, or from a file of the same form; raises `UnplannableError` for what is wrong."""
    own = resources.files("superadam.plan").joinpath("machines", f"{name}.toml")
    file = own if name in names() else Path(name)
    if not file.is_file():
        raise UnplannableError(
            f"there is no machine {name}, expected a file or one of {', '.join(names())}; write such a file"
        )
    try:
        values = tomllib.loads(file.read_text("utf-8"))
    except (ValueError, RecursionError) as error:
        raise UnplannableError(f"{name} cannot be read as TOML ({error}); correct it") from error
    known = {field.name: field.default is MISSING for field in fields(Machine)}  # whether it is needed
    if lacking := sorted(key for key in known if known[key] and key not in values):
        raise UnplannableError(f"{name} lacks {lacking[0]}, expected {', '.join(filter(known.get, known))}; add it")
    if unknown := sorted({*values} - known.keys()):
        raise UnplannableError(f"{name} has {unknown[0]}, expected none but {', '.join(known)}; correct it")
    for key, kind in {"title": str, "one_memory": bool, "passes": dict}.items():
        if not isinstance(values.get(key, kind()), kind):
            raise UnplannableError(f"{key} of {name} is {values[key]!r}, expected a {kind.__name__}; correct it")
    if wrong := sorted({*values.get("passes", PASSES)} ^ {*PASSES}):
        raise UnplannableError(f"passes of {name} have or lack {wrong[0]}, expected {', '.join(PASSES)}; correct it")
    if passes := values.get("passes"):
        values["passes"] = {key: _rate(f"passes.{key} of {name}", value) for key, value in passes.items()}
    plain = ("title", "one_memory", "passes")
    rates = {key: _rate(f"{key} of {name}", value) for key, value in values.items() if key not in plain}
    return Machine(**values | rates)


def _rate(what: str, row: Any) -> Rate:
    kinds = [kind.value for kind in Kind]
    if isinstance(row, dict) and {*row} == {"value", "kind", "source"} and row["kind"] in kinds:
        value, source = row["value"], str(row["source"])
        is_zero_allowed = what.split(" ")[0].endswith(("reserved", "per_bucket"))
        is_number = type(value) in (int, float) and (1e-30 < value < 1e30 or (is_zero_allowed and value == 0))
        if is_number and source.strip():
            return Rate(float(value), Kind(row["kind"]), source)
    raise UnplannableError(
        f"{what} is {row!r}, expected a table with value, kind ({', '.join(kinds)}) and source; correct it"
    )
