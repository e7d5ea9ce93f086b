"""Machines: rates and sizes of one rank's share, from TOML files, each with where it comes from."""

from __future__ import annotations

import enum
import math
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from importlib import resources
from pathlib import Path
from typing import Any

from superadam.kernels.native import Dtype, Format, Pass
from superadam.kernels.traffic import bytes_per_element
from superadam.plan import UnplannableError
from superadam.plan.events import Passes, Rates


class Kind(enum.Enum):
    """How far a number can be trusted, from the most to the least."""

    EXACT = "exact"
    MEASURED = "measured"
    PUBLISHED = "published"
    ASSUMED = "assumed"

    @staticmethod
    def weakest(kinds: Iterable[Kind]) -> Kind:
        """Return that of what was computed from such numbers."""
        return max(kinds, key=list(Kind).index, default=Kind.EXACT)


@dataclass(frozen=True, slots=True)
class Rate:
    """A number of a machine."""

    value: float
    kind: Kind
    source: str


PASSES = {
    "norm": Pass.NORM,
    "speculate": Pass.SPECULATE,
    "commit": Pass.COMMIT,
    "fused": Pass.COMMIT_AND_SPECULATE,
    "update": Pass.UPDATE,
}
"""The kernels' pass of each field of `Passes`."""


@dataclass(frozen=True, slots=True)
class Machine:
    """What one rank has; bytes, seconds and operations.

    Attributes:
        title: in words.
        one_memory: whether CPU and GPU share one memory.
        gpu_memory, gpu_reserved: bytes, and those of CUDA's context, workspaces and fragments.
        gpu_operations: peak of dense bf16, operations per second.
        gpu_bandwidth, download, upload: bytes per second that kernels and copies reach.
        host_memory, host_reserved: bytes of this rank, and those of the process itself.
        cpu_bandwidth: bytes per second that all cores of the rank reach.
        cpu_cores, cpu_clock, cpu_cycles: how many, in hertz, and cycles of a core for the arithmetic of an element.
        worker_per_bucket, step_per_bucket: seconds of Python.
        passes: seconds of an element, by the names of `PASSES`, as `superadam bench` measures them; else of bytes
            and cycles.
    """

    title: str
    gpu_memory: Rate
    gpu_reserved: Rate
    gpu_operations: Rate
    gpu_bandwidth: Rate
    download: Rate
    upload: Rate
    host_memory: Rate
    host_reserved: Rate
    cpu_bandwidth: Rate
    cpu_cores: Rate
    cpu_clock: Rate
    cpu_cycles: Rate
    worker_per_bucket: Rate
    step_per_bucket: Rate
    one_memory: bool = False
    passes: Mapping[str, Rate] | None = None

    @property
    def rates(self) -> dict[str, Rate]:
        """All numbers by name."""
        every = {one.name: getattr(self, one.name) for one in fields(self)}
        return {name: one for name, one in every.items() if isinstance(one, Rate)} | dict(self.passes or {})

    def kind_of(self, *names: str) -> Kind:
        """Return the weakest kind of these rates."""
        return Kind.weakest(getattr(self, name).kind for name in names)

    @property
    def kind_of_time(self) -> Kind:
        """Return the weakest kind of what a step's time depends on, but for the GPU's efficiency."""
        names = ["gpu_bandwidth", "download", "upload", "worker_per_bucket", "step_per_bucket"]
        if self.passes is None:
            names += ["cpu_bandwidth", "cpu_cores", "cpu_clock", "cpu_cycles"]
        found = [one.kind for one in (self.passes or {}).values()]
        return Kind.weakest([self.kind_of(*names), *found])

    def seconds_of(self, form: Format = Format.PLAIN, size: int = 2) -> Passes:
        """Return the seconds of an element in each pass over state of a format.

        Copies take their bytes from the CPU's bandwidth. A pass takes as long as its bytes or its arithmetic. `size` is
        the bytes of a gradient and of a working copy.
        """
        dtype = {2: Dtype.BFLOAT16, 4: Dtype.FLOAT32}[size]
        moved = {name: bytes_per_element(which, dtype, dtype, form) for name, which in PASSES.items()}
        if self.passes is not None:
            plain = {name: bytes_per_element(which, dtype, dtype) for name, which in PASSES.items()}
            return Passes(**{name: self.passes[name].value * moved[name] / plain[name] for name in PASSES})
        busy = 1 + 2 * size / moved["fused"]
        arithmetic = self.cpu_cycles.value / (self.cpu_cores.value * self.cpu_clock.value)
        of = {name: max(busy * each / self.cpu_bandwidth.value, arithmetic) for name, each in moved.items()}
        return Passes(**of | {"norm": busy * moved["norm"] / self.cpu_bandwidth.value})

    def events(self, form: Format = Format.PLAIN) -> Rates:
        """Return the rates that the events of a step are made of."""
        return Rates(
            self.gpu_bandwidth.value,
            self.download.value,
            self.upload.value,
            self.seconds_of(form),
            self.worker_per_bucket.value,
            self.step_per_bucket.value,
            self.cpu_bandwidth.value,
        )


def names() -> list[str]:
    """Return the machines that are described here."""
    return sorted(file.name[:-5] for file in resources.files("superadam.plan").joinpath("machines").iterdir())


def read(name: str) -> Machine:
    """Return a machine by its name, or from a file of the same form.

    Raises:
        UnplannableError: there is none, or a number is missing, unknown, below 0 or without a source.
    """
    if name in names():
        text = resources.files("superadam.plan").joinpath("machines", f"{name}.toml").read_text()
    elif Path(name).is_file():
        text = Path(name).read_text()
    else:
        raise UnplannableError(
            f"there is no machine {name}, expected a file or one of {', '.join(names())}; write such a file"
        )
    try:
        values = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UnplannableError(f"{name} cannot be read as TOML ({error}); correct it") from error
    known = {one.name for one in fields(Machine)}
    if wrong := sorted({*values} - known | known - {*values, "one_memory", "passes"}):
        raise UnplannableError(f"{name} has or lacks {wrong[0]}, expected {', '.join(sorted(known))}; correct it")
    if wrong := sorted({*values.get("passes", PASSES)} ^ {*PASSES}):
        raise UnplannableError(f"passes of {name} have or lack {wrong[0]}, expected {', '.join(PASSES)}; correct it")
    plain = {key: values.pop(key) for key in ("title", "one_memory") if key in values}
    passes = values.pop("passes", None)
    every = {key: _rate(f"{key} of {name}", one) for key, one in values.items()}
    found = None if passes is None else {key: _rate(f"passes.{key} of {name}", one) for key, one in passes.items()}
    return Machine(**plain, **every, passes=found)  # type: ignore[arg-type]


def _rate(what: str, row: Any) -> Rate:
    kinds = [one.value for one in Kind]
    expected = f"expected a table with value, kind ({', '.join(kinds)}) and source; correct it"
    if not isinstance(row, dict) or {*row} != {"value", "kind", "source"} or row["kind"] not in kinds:
        raise UnplannableError(f"{what} is {row!r}, {expected}")
    value, source = row["value"], row["source"]
    is_zero_allowed = "reserved" in what or "per_bucket" in what
    is_number = (
        isinstance(value, int | float) and math.isfinite(value) and (value > 0 or (is_zero_allowed and value == 0))
    )
    if not is_number or not str(source).strip():
        raise UnplannableError(f"{what} is {row!r}, {expected}")
    return Rate(float(value), Kind(row["kind"]), str(source))
