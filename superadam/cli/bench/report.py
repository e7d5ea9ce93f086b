"""The results of benchmarks, as a table for people and as JSON for programs."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import version
from typing import Any

import torch
from rich.table import Table

import superadam
from superadam.cli.bench.pairs import Comparison
from superadam.cli.bench.passes import PassResult, Setting
from superadam.cli.console import new_table
from superadam.cli.traffic import PLAIN
from superadam.host.machine import Host


def environment() -> dict[str, Any]:
    """Return processor, instruction set, number of threads, system and versions behind the numbers.

    `isa` and `threads` are superadam's defaults; `torch_capability` is the instruction set of torch's CPU kernels.
    """
    return {
        "processor": processor_name(Host()) or platform.machine(),
        "isa": superadam.active_isa(),
        "threads": superadam.get_num_threads(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torch_capability": torch.backends.cpu.get_cpu_capability(),
        "superadam": version("superadam"),
    }


def line_of(environment: Mapping[str, Any]) -> str:
    """Return a line about an environment, which goes before a table."""
    return "superadam {superadam} ({isa}), torch {torch} ({torch_capability}), {processor}".format(**environment)


def processor_name(host: Host) -> str | None:
    """Return what the processor calls itself."""
    lines = host.read_or("/proc/cpuinfo", "").splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), None)


def pass_as_json(row: PassResult) -> dict[str, Any]:
    """Return a row as plain values: seconds, bytes, elements and ratios."""
    return {
        "pass": row.which.name.lower(),
        "norm": row.with_norm,
        "isa": row.setting.isa,
        "threads": row.setting.threads,
        **_state(row.setting),
        "numel": row.numel,
        "bytes_per_element": row.bytes_per_element,
        "bytes_per_second": row.bytes_per_second,
        "floor": asdict(row.floor),
        **asdict(row.comparison),
    }


def _state(setting: Setting) -> dict[str, str]:
    """Return the names of how master and moments are stored."""
    names = {"master": setting.storage.master.value, "moments": setting.storage.moments.value}
    return {what: "f32" if name == "fp32" else name for what, name in names.items()}


def in_words(count: float) -> str:
    """Return a number of parameters in billions, millions or thousands."""
    sizes = {"billion": 1e9, "million": 1e6}
    word, size = next(((word, size) for word, size in sizes.items() if count >= size), ("thousand", 1e3))
    return f"{count / size:.1f} {word}"


def comparisons_table() -> Table:
    """Return a table without rows: what was measured, its median time, its rate, and its ratio to something else.

    The median time of the other side is not shown: it need not agree with the median of the ratios.
    """
    table = new_table("what", "ms", "GB/s")
    table.add_column("ratio", justify="right", style="bold", no_wrap=True)
    table.add_column("quartiles", justify="right", style="dim", no_wrap=True)
    return table


def add_section(table: Table, title: str) -> None:
    """Begin a group of rows."""
    table.add_section()
    table.add_row(title, style="bold")


def add_row(table: Table, name: str, found: Comparison, bytes_per_second: float | None = None) -> None:
    """Add a comparison to the present group."""
    value, ratio = 1e3 * found.seconds.median, found.ratio
    digits = 2 if ratio.median >= 0.1 else 3
    table.add_row(
        f"  {name}",
        f"{value:.1f}" if value >= 1 else f"{value:.3f}",
        "" if bytes_per_second is None else f"{bytes_per_second / 1e9:.1f}",
        f"{ratio.median:.{digits}f}",
        f"{ratio.lower:.{digits}f}-{ratio.upper:.{digits}f}",
    )


def passes_table(setting: Setting, rows: Sequence[PassResult]) -> Table:
    """Return the table of the passes in a setting."""
    table = comparisons_table()
    state = "" if setting.storage == PLAIN else f", {'+'.join(_state(setting).values())}"
    add_section(table, f"{setting.isa}, {setting.threads} thr., bf16>bf16{state}")
    for row in rows:
        add_row(table, row.name, row.comparison, row.bytes_per_second)
    return table


def about_passes(numel: int) -> str:
    """Return what a reader needs to know of passes."""
    return (
        f"Passes run over {numel:,} elements (gradient>working copy, master+moments if not f32). Their times are over "
        "those of their floor, the fastest way to move the same memory without the arithmetic."
    )


def about_ratios(pairs: int) -> str:
    """Return what a reader needs to know of ratios."""
    return f"Ratios of time: medians and quartiles of {pairs} interleaved pairs. ms: median of superadam's runs."
