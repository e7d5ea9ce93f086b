"""`superadam bench`: its options, their checks, and the run."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from superadam.cli.usage import UsageError
from superadam.kernels import native
from superadam.kernels.native import Dtype

DTYPES = {"f32": Dtype.FLOAT32, "bf16": Dtype.BFLOAT16, "f16": Dtype.FLOAT16, "f64": Dtype.FLOAT64}
DEFAULT_NUMEL = 16 << 20
DEFAULT_PAIRS = 21


def add_parser(subparsers: Any) -> None:
    """Add `bench` to the parser of `superadam`."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "bench",
        help="measure the passes against this machine's memory, steps against torch, and overlap against none",
        description="Measure every pass against the floor of its memory traffic, whole steps against torch's "
        "clip_grad_norm_ and AdamW(fused=True), and overlapped iterations against plain ones, in interleaved pairs.",
        epilog="By default each of --isa, --threads and --dtype is varied by itself around its first value; --cross "
        "measures all combinations. Leave the machine alone while it runs.",
    )
    parser.add_argument(
        "what", nargs="?", choices=["all", "passes", "torch", "overlap"], default="all", help="default: all"
    )
    parser.add_argument(
        "--numel", type=int, default=DEFAULT_NUMEL, metavar="N", help="elements of the large tensor (%(default)s)"
    )
    parser.add_argument(
        "--pairs", type=int, default=DEFAULT_PAIRS, metavar="N", help="interleaved pairs of each row (%(default)s)"
    )
    parser.add_argument("--isa", nargs="+", metavar="NAME", help="instruction sets (all that are runnable)")
    parser.add_argument("--threads", nargs="+", type=int, metavar="N", help="numbers of threads (all, and one)")
    parser.add_argument(
        "--dtype", nargs="+", choices=DTYPES, default=["f32", "bf16"], help="gradient dtypes of passes (f32 bf16)"
    )
    parser.add_argument("--cross", action="store_true", help="measure all combinations")
    parser.add_argument(
        "--small-tensors", type=int, default=10_000, metavar="N", help="tensors of the contest of many (%(default)s)"
    )
    parser.add_argument("--small-numel", type=int, default=1_000, metavar="N", help="elements of each (%(default)s)")
    parser.add_argument(
        "--tokens", type=int, default=2048, metavar="N", help="tokens of an overlapped iteration (%(default)s)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there too")
    parser.set_defaults(run=run)


def chosen_isas(named: Sequence[str] | None) -> list[str]:
    """Return the instruction sets to measure: those named, or the active one and then all other runnable ones.

    Raises:
        UsageError: a name, or `SUPERADAM_ISA`, is unknown or cannot run here.
    """
    runnable = native.available_isas()
    for name in named or ():
        if name not in runnable:
            raise UsageError(f"--isa {name} cannot run on this machine; choose from {', '.join(runnable)}")
    if named:
        return list(dict.fromkeys(named))
    try:
        return list(dict.fromkeys([native.active_isa(), *runnable]))
    except ValueError as error:
        raise UsageError(str(error)) from error


def chosen_threads(named: Sequence[int] | None) -> list[int]:
    """Return the numbers of threads to measure: those named, or the default and one.

    Raises:
        UsageError: a number is below 1, or `SUPERADAM_THREADS` is not one.
    """
    for count in named or ():
        if count < 1:
            raise UsageError(f"--threads {count} is below 1; name at least one thread")
    try:
        return list(dict.fromkeys(named or [native.get_num_threads(), 1]))
    except ValueError as error:
        raise UsageError(str(error)) from error


def run(arguments: argparse.Namespace) -> int:
    """Measure, show the table, and write the JSON file if one is named.

    Raises:
        UsageError: an option has a value that cannot be measured.
    """
    from rich.console import Console

    from superadam.cli.bench import contests, overlap, passes, report

    for option in ("numel", "pairs", "small_tensors", "small_numel", "tokens"):
        if getattr(arguments, option) < 1:
            raise UsageError(f"--{option.replace('_', '-')} is {getattr(arguments, option)}; expected at least 1")
    if arguments.json is not None and not arguments.json.parent.is_dir():
        raise UsageError(f"--json {arguments.json} is in a directory that does not exist; make {arguments.json.parent}")
    isas, threads = chosen_isas(arguments.isa), chosen_threads(arguments.threads)
    settings = passes.settings(isas, threads, [DTYPES[name] for name in arguments.dtype], crossed=arguments.cross)
    games = contests.contests(arguments.numel, arguments.small_tensors, arguments.small_numel)
    before = native.active_isa()
    native.set_active_isa(isas[0])
    console, progress = Console(), Console(stderr=True)
    pass_rows: list[passes.PassResult] = []
    contest_rows: list[contests.ContestResult] = []
    overlap_rows: list[overlap.OverlapResult] = []
    try:
        with progress.status("warming up") as status:
            if arguments.what in ("all", "passes"):
                for row in passes.measure(arguments.numel, settings, arguments.pairs):
                    pass_rows.append(row)
                    status.update(f"{len(pass_rows)} of {len(settings) * len(passes.PASSES)} rows of passes")
            if arguments.what in ("all", "torch"):
                for result in contests.measure(games, threads[0], arguments.pairs):
                    contest_rows.append(result)
                    status.update(f"{len(contest_rows)} of {len(games)} comparisons with torch")
            if arguments.what in ("all", "overlap"):
                status.update("iterations with and without overlap")
                overlap_rows.append(overlap.measure(threads[0], arguments.pairs, tokens=arguments.tokens))
        environment = report.Environment.here()
        console.print(
            f"superadam {environment.superadam}, torch {environment.torch} ({environment.torch_capability}), "
            f"{environment.processor}",
            highlight=False,
        )
        console.print(report.to_table(pass_rows, contest_rows, overlap_rows))
        for line in report.notes(pass_rows, contest_rows, overlap_rows):
            console.print(line, style="dim", highlight=False)
    finally:
        native.set_active_isa(before)
    if arguments.json is not None:
        found = report.to_json(environment, pass_rows, contest_rows, overlap_rows)
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0
