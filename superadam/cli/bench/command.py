"""`superadam bench`: its options, their checks, and the run."""

from __future__ import annotations

import argparse
from typing import Any

from superadam.cli.bench.passes import PASSES, Setting, measure
from superadam.cli.usage import UsageError, require_modules
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
        "floor: the fastest way to move the same memory without the arithmetic. Instruction set and threads are those "
        "of training, or of SUPERADAM_ISA and SUPERADAM_THREADS.",
        epilog="Leave the machine alone while it runs.",
    )
    moments, masters = ([way.value for way in formats] for formats in (Moments, Master))
    parser.add_argument("--moments", choices=moments, default="fp32", help="how moments are stored (default: fp32)")
    parser.add_argument("--master", choices=masters, default="fp32", help="how masters are stored (default: fp32)")
    parser.set_defaults(run=run)


def setting_of(moments: str = "fp32", master: str = "fp32") -> Setting:
    """Return where training runs its passes, over state that is stored so.

    Raises:
        UsageError: `SUPERADAM_ISA` or `SUPERADAM_THREADS` names what cannot run here.
    """
    try:
        isa, threads = native.active_isa(), native.get_num_threads()
    except ValueError as error:
        raise UsageError(str(error)) from error
    return Setting(isa, threads, Storage(Moments(moments), Master(master)).format)


def run(arguments: argparse.Namespace) -> int:
    """Measure, and show the table.

    Raises:
        UsageError: the environment has a value that cannot be used, or a module is not installed.
    """
    require_modules("bench", "rich")
    from superadam.cli.bench import report
    from superadam.cli.console import Console

    setting, rows = setting_of(arguments.moments, arguments.master), []
    with Console(stderr=True).status("warming up") as status:
        for row in measure(NUMEL, setting, PAIRS):
            rows.append(row)
            status.update(f"{len(rows)} of {len(PASSES)} passes")
    console = Console()
    console.print(report.Environment.here().in_words(), highlight=False)
    console.print(report.passes_table(setting, rows))
    for line in (report.about_passes(rows[0].numel), report.about_ratios(PAIRS)):
        console.print(line, style="dim", highlight=False)
    return 0
