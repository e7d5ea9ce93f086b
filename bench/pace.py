"""Runs the scheduler on a device made of time, and compares iterations with that device's clock alone.

    python bench/pace.py --parameters 200000000 --ratios 0.25 0.5 1 1.5 --json NAME.json
    python bench/pace.py --ratios 1 1.5 --clipped 1    where every step is clipped

Forward, backward and copies take their time on clocks while every core is free, as with a GPU. Each row also has steps
after backward, superadam's and torch's. It cannot show contention for host memory or links, the cost of launching
kernels, or autograd's device thread. With --json NAME.json it also writes NAME.png and NAME.trace.json.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

sys.path.append(str(Path(__file__).parent))  # which PYTHONSAFEPATH leaves out
from measures import options, pacing, pacing_report
from measures.paced_device import PRESETS

from superadam.cli.bench.arrays import HYPERPARAMETERS
from superadam.cli.bench.report import Environment
from superadam.kernels import native


def main(words: Sequence[str] | None = None) -> int:
    """Measure, show the table, and write what --json asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    count, threads = options.count, native.get_num_threads()
    parser.add_argument("--preset", choices=PRESETS, default="h200", help="rates of links and memory (%(default)s)")
    parser.add_argument(
        "--parameters", nargs="+", type=count, default=[64 << 20], metavar="N", help="of models (64 Mi)"
    )
    parser.add_argument("--layers", nargs="+", type=count, default=[48], metavar="N", help="tensors of models (48)")
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
        type=options.share,
        metavar="SHARE",
        help="of the steps, 0 to 1: gradients then have norms that vary as in fine-tuning, with a limit of 1, and "
        "clipped steps count as the others do (norms that do not vary, one step in 10 clipped and left out)",
    )
    parser.add_argument(
        "--last-share",
        type=options.share,
        metavar="X",
        help="of the elements: in the tensor whose gradient comes last, as an embedding's (all tensors have one size)",
    )
    parser.add_argument("--lr", type=options.number, default=HYPERPARAMETERS.lr, metavar="X", help="(%(default)s)")
    parser.add_argument("--rounds", type=count, default=3, metavar="N", help="turns of each side (%(default)s)")
    parser.add_argument("--threads", type=count, default=threads, metavar="N", help="of the CPU (all)")
    parser.add_argument("--json", type=options.new_file, metavar="FILE", help="write the results there too")
    asked = parser.parse_args(words)
    settings = pacing.Settings(
        PRESETS[asked.preset],
        asked.threads,
        asked.rounds,
        asked.lr,
        asked.clipped,
        asked.last_share,
    )
    rows: list[pacing.Row] = []
    with Console(stderr=True).status("warming up") as status:
        for parameters in asked.parameters:
            for layers in asked.layers:
                for row in pacing.measure(parameters, layers, asked.ratios, settings):
                    rows.append(row)
                    status.update(f"{row.parameters:,} parameters, {layers} layers, {row.ratio:g} x Adam")
    console, environment = Console(), Environment.here()
    title = f"superadam on a clock with the rates of {asked.preset}, {asked.threads} threads of {environment.processor}"
    console.print(title, highlight=False)
    console.print(pacing_report.to_table(rows, settings))
    for line in pacing_report.notes(rows, settings):
        console.print(line, style="dim", highlight=False)
    if asked.json is not None:
        found = pacing_report.to_json(environment, settings, rows)
        pacing_report.write(asked.json, json.dumps(found, indent=1) + "\n", rows, title)
    return 0


if __name__ == "__main__":
    sys.exit(main())
