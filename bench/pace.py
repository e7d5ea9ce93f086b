"""Runs the scheduler on a paced device, and compares iterations with that device's clock alone.

    python bench/pace.py --parameters 200000000 --ratios 0.25 0.5 1 1.5 --json NAME.json
    python bench/pace.py --ratios 1 1.5 --clipped 1    where every step is clipped
    python bench/pace.py --stretched --parameters 14800000000 --layers 280 --ratios 0.5 1 1.5

Forward, backward and copies take their time on clocks while every core is free, as with a GPU. Each row also has steps
after backward, superadam's and torch's. It cannot show contention for host memory or links, the cost of launching
kernels, or autograd's device thread.

With --stretched, the scheduler runs at a fraction of the size, with passes that last as long as those of the whole
would on a machine of `superadam plan`, and the events of a plan are shown next to it.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

sys.path.append(str(Path(__file__).parent))  # which PYTHONSAFEPATH leaves out
from measures import options, pacing, pacing_report

from superadam.cli.bench.arrays import HYPERPARAMETERS
from superadam.cli.bench.report import environment
from superadam.cli.usage import count, share
from superadam.kernels import native


def stretch(asked: argparse.Namespace) -> int:
    """Compare the scheduler with the events of a plan, and show one line for each row."""
    from measures import stretched  # which needs transformers, for the machines of plans

    from superadam.cli.plan.rates import rates_of
    from superadam.plan import machines

    rates, console, found = rates_of(machines.read(asked.stretched)), Console(), []
    for ratio in asked.ratios:
        row = stretched.measure(rates, asked.parameters, asked.layers, ratio)
        found.append(dataclasses.asdict(row))
        console.print(
            f"{row.parameters:,} parameters, {row.buckets} buckets, {ratio:g} x Adam: forward and backward "
            f"{row.clock:.4f} s, measured {row.measured:.4f} s (quickest {row.quickest:.4f}), by events "
            f"{row.events:.4f} s, {row.error:+.1%}",
            highlight=False,
        )
    if asked.json is not None:
        whole = {"environment": environment(), "machine": asked.stretched, "rows": found}
        asked.json.write_text(json.dumps(whole, indent=1) + "\n")
    return 0


def main(words: Sequence[str] | None = None) -> int:
    """Measure, show the table, and write what --json asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=count, default=64 << 20, metavar="N", help="of the model (64 Mi)")
    parser.add_argument("--layers", type=count, default=48, metavar="N", help="its tensors (%(default)s)")
    parser.add_argument(
        "--ratios",
        nargs="+",
        type=options.positive,
        default=[0.25, 0.5, 1.0, 1.5, 2.0, 4.0],
        metavar="X",
        help="of backward to Adam (0.25 to 4)",
    )
    parser.add_argument(
        "--clipped",
        type=share,
        metavar="SHARE",
        help="of the steps, 0 to 1: gradients then have norms that vary as in fine-tuning, with a limit of 1, and "
        "clipped steps count as the others do (norms that do not vary, one step in 10 clipped and left out)",
    )
    parser.add_argument("--lr", type=options.number, default=HYPERPARAMETERS.lr, metavar="X", help="(%(default)s)")
    parser.add_argument("--rounds", type=count, default=3, metavar="N", help="turns of each side (%(default)s)")
    parser.add_argument("--threads", type=count, default=native.get_num_threads(), metavar="N", help="(all)")
    parser.add_argument(
        "--stretched",
        nargs="?",
        const="gh200",
        metavar="MACHINE",
        help="compare the scheduler at a fraction of the size with a plan's events on this machine (gh200)",
    )
    parser.add_argument("--json", type=options.new_file, metavar="FILE", help="write the results there too")
    asked = parser.parse_args(words)
    if asked.stretched is not None:
        return stretch(asked)
    settings = pacing.Settings(asked.threads, asked.rounds, asked.lr, asked.clipped)
    rows, here = list[pacing.Row](), environment()
    with Console(stderr=True).status("warming up") as status:
        for row in pacing.measure(asked.parameters, asked.layers, asked.ratios, settings):
            rows.append(row)
            status.update(f"{row.ratio:.2f} x Adam")
            if asked.json is not None:
                asked.json.write_text(json.dumps(pacing_report.to_json(here, settings, rows), indent=1) + "\n")
    console, where = Console(), f"{asked.threads} threads of {here['processor']}"
    console.print(f"superadam on a paced device with the rates of an H200, {where}", highlight=False)
    console.print(pacing_report.to_table(rows))
    for line in pacing_report.notes(rows, settings):
        console.print(line, style="dim", highlight=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
