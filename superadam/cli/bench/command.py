"""`superadam bench`: its options, their checks, and the run."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from superadam.cli.bench.passes import PASSES, Setting, measure
from superadam.cli.usage import UsageError, count, require_modules, writable, write
from superadam.kernels import native
from superadam.state.storage import Master, Moments, Storage

NUMEL = 16 << 20
"""Elements that each pass runs over: with bf16 gradients, 288 MiB."""

PAIRS = 21


def add_parser(subparsers: Any) -> None:
    """Add `bench` to the parser of `superadam`."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "bench",
        help="measure the passes over optimizer state against this machine's memory",
        description="Measure every pass over the optimizer's state, with bf16 gradients and weights, against its "
        "floor: the fastest way to move the same memory without the arithmetic.",
        epilog="Leave the machine alone while it runs.",
    )
    parser.add_argument("--isa", metavar="NAME", help="instruction set (the best one that can run)")
    parser.add_argument("--threads", type=count, metavar="N", help="number of threads (as many as training uses)")
    moments, masters = ([way.value for way in formats] for formats in (Moments, Master))
    parser.add_argument("--moments", choices=moments, default="fp32", help="how moments are stored (default: fp32)")
    parser.add_argument("--master", choices=masters, default="fp32", help="how masters are stored (default: fp32)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there too")
    parser.set_defaults(run=run)


def setting_of(
    isa: str | None = None, threads: int | None = None, moments: str = "fp32", master: str = "fp32"
) -> Setting:
    """Return where the passes run, and over which state; None stands for the default.

    Raises:
        UsageError: an option, `SUPERADAM_ISA` or `SUPERADAM_THREADS` names what cannot run here.
    """
    runnable = native.available_isas()
    if isa is not None and isa not in runnable:
        raise UsageError(f"--isa {isa} cannot run on this machine; choose from {', '.join(runnable)}")
    try:
        usual = native.active_isa(), native.get_num_threads()  # which the report tells in any case
    except ValueError as error:
        raise UsageError(str(error)) from error
    return Setting(isa or usual[0], threads or usual[1], Storage(Moments(moments), Master(master)))


def run(arguments: argparse.Namespace) -> int:
    """Measure, show the table, and write the JSON file if one is named.

    Raises:
        UsageError: an option has a value that cannot be used, or a module is not installed.
    """
    require_modules("bench", "rich")
    from superadam.cli.bench import report
    from superadam.cli.console import Console

    writable("--json", arguments.json)
    setting, rows = setting_of(arguments.isa, arguments.threads, arguments.moments, arguments.master), []
    with Console(stderr=True).status("warming up") as status:
        for row in measure(NUMEL, setting, PAIRS):
            rows.append(row)
            status.update(f"{len(rows)} of {len(PASSES)} passes")
    environment, console = report.environment(), Console()
    if arguments.json is not None:  # first: the reader of the table may end before all of it is printed
        found = {"environment": environment, "passes": [report.pass_as_json(row) for row in rows]}
        write(arguments.json, json.dumps(found, indent=1) + "\n")
    console.print(report.line_of(environment))
    console.print(report.passes_table(setting, rows))
    for line in (report.about_passes(rows[0].numel), report.about_ratios(PAIRS)):
        console.print(line, style="dim")
    return 0
