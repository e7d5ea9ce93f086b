"""The results of a benchmark run, as one table for people and as JSON for programs."""

from __future__ import annotations

import dataclasses
import itertools
import operator
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.table import Table

import superadam
from superadam.cli.bench.contests import ContestResult
from superadam.cli.bench.floor import Variant
from superadam.cli.bench.overlap import OverlapResult
from superadam.cli.bench.pairs import Comparison, Spread
from superadam.cli.bench.passes import PassResult, Setting
from superadam.kernels.native import Dtype

SHORT_NAMES = {
    Dtype.NONE: "-",
    Dtype.FLOAT32: "f32",
    Dtype.BFLOAT16: "bf16",
    Dtype.FLOAT16: "f16",
    Dtype.FLOAT64: "f64",
}


@dataclass(frozen=True, slots=True)
class Environment:
    """Processor, instruction set, number of threads, system and versions behind the numbers.

    `isa` and `threads` are superadam's defaults; `torch_capability` is the instruction set of torch's CPU kernels.
    """

    processor: str
    isa: str
    threads: int
    system: str
    python: str
    torch: str
    torch_capability: str
    superadam: str

    @staticmethod
    def here() -> Environment:
        """Return that of this process."""
        return Environment(
            processor=_processor(),
            isa=superadam.active_isa(),
            threads=superadam.get_num_threads(),
            system=platform.platform(),
            python=platform.python_version(),
            torch=torch.__version__,
            torch_capability=torch.backends.cpu.get_cpu_capability(),
            superadam=version("superadam"),
        )


def _processor() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        text = ""
    names = [line.partition(":")[2].strip() for line in text.splitlines() if line.startswith("model name")]
    return names[0] if names else platform.machine()


def to_json(
    environment: Environment,
    passes: Sequence[PassResult],
    contests: Sequence[ContestResult],
    overlaps: Sequence[OverlapResult] = (),
) -> dict[str, Any]:
    """Return everything as plain values: seconds, bytes, elements and ratios."""

    def comparison(found: Comparison) -> dict[str, Any]:
        return {
            "pairs": found.pairs,
            "ratio": dataclasses.asdict(found.ratio),
            "seconds": dataclasses.asdict(found.first),
            "against_seconds": dataclasses.asdict(found.second),
        }

    return {
        "environment": dataclasses.asdict(environment),
        "passes": [
            {
                "pass": row.which.name.lower(),
                "norm": row.with_norm,
                "isa": row.setting.isa,
                "threads": row.setting.threads,
                "gradient_dtype": row.setting.gradient_dtype.name.lower(),
                "out_dtype": row.setting.out_dtype.name.lower(),
                "numel": row.numel,
                "bytes_per_element": row.bytes_per_element,
                "bytes_per_second": row.bytes_per_second,
                "floor": dataclasses.asdict(row.floor),
                **comparison(row.comparison),
            }
            for row in passes
        ],
        "contests": [
            {
                "name": row.contest.name,
                "ours": row.contest.ours,
                "torch": row.contest.theirs,
                "threads": row.threads,
                "tensors": row.contest.tensors,
                "numel": row.contest.numel,
                **comparison(row.comparison),
            }
            for row in contests
        ],
        "overlap": [
            {
                **{
                    field.name: getattr(row, field.name)
                    for field in dataclasses.fields(row)
                    if field.name != "comparison"
                },
                **comparison(row.comparison),
            }
            for row in overlaps
        ],
    }


def _milliseconds(seconds: float) -> str:
    value = 1e3 * seconds
    return f"{value:.1f}" if value >= 1 else f"{value:.3f}"


def _ratio(spread: Spread) -> tuple[str, str]:
    digits = 2 if spread.median >= 0.1 else 3
    return f"{spread.median:.{digits}f}", f"{spread.lower:.{digits}f}-{spread.upper:.{digits}f}"


def _setting(setting: Setting) -> str:
    dtypes = f"{SHORT_NAMES[setting.gradient_dtype]}>{SHORT_NAMES[setting.out_dtype]}"
    return f"{setting.isa}, {setting.threads} thr., {dtypes}"


def _floor(variant: Variant) -> str:
    stores = "all" if variant.stream_state else "out" if variant.stream_out else ""
    return f"{variant.burst} {variant.prefetch >> 10}K {stores}".rstrip()


def to_table(
    passes: Sequence[PassResult], contests: Sequence[ContestResult], overlaps: Sequence[OverlapResult] = ()
) -> Table:
    """Return the one table: passes against the floor, steps against torch, iterations against plain ones."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    table.add_column("what", no_wrap=True)
    table.add_column("ms", justify="right", no_wrap=True)
    table.add_column("GB/s", justify="right", no_wrap=True)
    table.add_column("against", no_wrap=True)
    table.add_column("ms", justify="right", no_wrap=True)
    table.add_column("ratio", justify="right", style="bold", no_wrap=True)
    table.add_column("quartiles", justify="right", style="dim", no_wrap=True)
    for setting, rows in itertools.groupby(passes, operator.attrgetter("setting")):
        table.add_section()
        table.add_row(f"[bold]{_setting(setting)}")
        for row in rows:
            table.add_row(
                f"  {row.name}",
                _milliseconds(row.comparison.first.median),
                f"{row.bytes_per_second / 1e9:.1f}",
                _floor(row.floor),
                _milliseconds(row.comparison.second.median),
                *_ratio(row.comparison.ratio),
            )
    for index, result in enumerate(contests):
        if index == 0:
            table.add_section()
            table.add_row(f"[bold]{superadam.active_isa()}, {result.threads} thr., steps")
        table.add_row(
            f"  {result.contest.name}",
            _milliseconds(result.comparison.first.median),
            "",
            "torch",
            _milliseconds(result.comparison.second.median),
            *_ratio(result.comparison.ratio),
        )
    for index, overlap in enumerate(overlaps):
        if index == 0:
            table.add_section()
            table.add_row(f"[bold]{superadam.active_isa()}, {overlap.threads} thr., iterations")
        table.add_row(
            "  overlapped",
            _milliseconds(overlap.comparison.first.median),
            "",
            "plain",
            _milliseconds(overlap.comparison.second.median),
            *_ratio(overlap.comparison.ratio),
        )
    return table


def notes(
    passes: Sequence[PassResult], contests: Sequence[ContestResult], overlaps: Sequence[OverlapResult] = ()
) -> list[str]:
    """Return what a reader of the table needs: sizes, what a ratio is against, and what each side of a contest did."""
    found: list[Comparison] = [row.comparison for row in passes]
    found += [result.comparison for result in contests]
    found += [overlap.comparison for overlap in overlaps]
    lines = []
    if passes:
        lines.append(
            f"Passes run over {passes[0].numel:,} elements (gradient>working copy) against their floor: the fastest "
            "way to move the same memory without the arithmetic, named by elements in a burst, prefetch distance, and "
            "what is stored past the caches."
        )
    sides: dict[tuple[str, str], list[str]] = {}
    for result in contests:
        sides.setdefault((result.contest.ours, result.contest.theirs), []).append(result.contest.name)
    lines.extend(f"{'; '.join(names)}: {ours}, against {theirs}." for (ours, theirs), names in sides.items())
    lines.extend(
        f"overlapped: forward, backward and step of {row.parameters / 1e6:.1f} M fp32 parameters on the CPU, "
        f"{row.tokens:,} tokens, {row.buckets:g} buckets, through OffloadScheduler; taking the gradients "
        f"cost the training thread {1e6 * row.hook_seconds:.0f} us; {row.hidden_share:.0%} of the optimizer's time was "
        "hidden."
        for row in overlaps
    )
    if found:
        lines.append(
            f"Ratios are medians of {found[0].pairs} interleaved pairs, both sides warmed; below 1 superadam is faster."
        )
    return lines
