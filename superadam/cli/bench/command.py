"""`superadam bench`: its options, their checks, and the run."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from superadam.cli.bench.arrays import HYPERPARAMETERS
from superadam.cli.usage import UsageError, require_modules
from superadam.kernels import native
from superadam.kernels.native import Dtype

DTYPES = {"f32": Dtype.FLOAT32, "bf16": Dtype.BFLOAT16, "f16": Dtype.FLOAT16, "f64": Dtype.FLOAT64}
DEFAULT_NUMEL = 16 << 20
DEFAULT_PAIRS = 21
PRESETS = ("h200", "gh200", "mi300a")  # of `superadam.devices.paced`, whose import brings torch
RATIOS = [0.25, 0.5, 1.0, 1.5, 2.0, 4.0]


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
        "what",
        nargs="?",
        choices=["all", "passes", "torch", "overlap", "pace"],
        default="all",
        help="default: all but pace, which see below",
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
    pace = parser.add_argument_group(
        "pace",
        "`bench pace` runs the scheduler on a device made of time: forward, backward and copies take their time on "
        "clocks while every core is free, as with a GPU. It compares iterations with the clock alone, and with Adam "
        "after backward. It cannot show contention for host memory or links, the cost of launching kernels, or "
        "autograd's device thread. With --json FILE it also writes a picture and a trace, named after FILE. Only the "
        "first of --threads is used.",
    )
    pace.add_argument("--preset", choices=PRESETS, default=PRESETS[0], help="rates of links and memory (%(default)s)")
    pace.add_argument("--parameters", nargs="+", type=int, default=[64 << 20], metavar="N", help="of the model (64 Mi)")
    pace.add_argument("--layers", nargs="+", type=int, default=[48], metavar="N", help="tensors of the model (48)")
    pace.add_argument(
        "--ratios", nargs="+", type=float, default=RATIOS, metavar="X", help="of backward to Adam (0.25 to 4)"
    )
    pace.add_argument(
        "--free-share", type=float, default=0.5, metavar="X", help="of the state that the device has room for (0.5)"
    )
    pace.add_argument(
        "--clipped",
        type=float,
        metavar="SHARE",
        help="of the steps, 0 to 1: gradients then have norms that vary as in fine-tuning, with a limit of 1, and "
        "clipped steps count as the others do (norms that do not vary, one step in 10 clipped and left out)",
    )
    pace.add_argument("--lr", type=float, default=HYPERPARAMETERS.lr, metavar="X", help="learning rate (%(default)s)")
    pace.add_argument("--rounds", type=int, default=3, metavar="N", help="turns of each side (%(default)s)")
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
        UsageError: an option has a value that cannot be measured, or a module is not installed.
    """
    require_modules("bench", "rich", *["matplotlib"] * (arguments.what == "pace"))
    from superadam.cli.bench import contests, overlap, passes, report
    from superadam.cli.console import Console

    for option in ("numel", "pairs", "small_tensors", "small_numel", "tokens", "rounds", "parameters", "layers"):
        value = getattr(arguments, option)
        least = min(value) if isinstance(value, list) else value
        if least < 1:
            raise UsageError(f"--{option.replace('_', '-')} is {least}; expected at least 1")
    if arguments.json is not None and not arguments.json.parent.is_dir():
        raise UsageError(f"--json {arguments.json} is in a directory that does not exist; make {arguments.json.parent}")
    isas, threads = chosen_isas(arguments.isa), chosen_threads(arguments.threads)
    if arguments.what == "pace":
        return run_pace(arguments, threads[0])
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


def run_pace(arguments: argparse.Namespace, threads: int) -> int:
    """Measure on a device made of time, show the table, and write what --json asks for.

    Raises:
        UsageError: an option has a value that cannot be measured.
    """
    from superadam.cli.bench import pace, pace_report, report
    from superadam.cli.console import Console
    from superadam.devices import paced

    if not all(0.0 < ratio < math.inf for ratio in arguments.ratios):
        raise UsageError(f"--ratios are {arguments.ratios}; expected numbers above 0")
    if not 0.0 <= arguments.free_share <= 1.0:
        raise UsageError(f"--free-share is {arguments.free_share}; expected 0 to 1")
    if arguments.clipped is not None and not 0.0 <= arguments.clipped <= 1.0:
        raise UsageError(f"--clipped is {arguments.clipped}; expected 0 to 1")
    if not 0.0 <= arguments.lr < math.inf:
        raise UsageError(f"--lr is {arguments.lr}; expected a number of at least 0")
    settings = pace.Settings(
        paced.PRESETS[arguments.preset],
        threads,
        arguments.rounds,
        arguments.free_share,
        arguments.lr,
        arguments.clipped,
    )
    console, rows = Console(), []
    with Console(stderr=True).status("warming up") as status:
        for parameters in arguments.parameters:
            for layers in arguments.layers:
                for row in pace.measure(parameters, layers, arguments.ratios, settings):
                    rows.append(row)
                    status.update(f"{row.parameters:,} parameters, {layers} layers, {row.ratio:g} x Adam")
    environment = report.Environment.here()
    title = f"superadam on a clock with the rates of {arguments.preset}, {threads} threads of {environment.processor}"
    console.print(title, highlight=False)
    console.print(pace_report.to_table(rows, settings))
    for line in pace_report.notes(rows, settings):
        console.print(line, style="dim", highlight=False)
    if arguments.json is not None:
        found = pace_report.to_json(environment, settings, rows)
        pace_report.write(arguments.json, json.dumps(found, indent=1) + "\n", rows, title)
    return 0
