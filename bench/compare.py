"""Compares, in interleaved pairs: passes with their floor, steps with those of peers, iterations with plain ones.

    python bench/compare.py                           all three
    python bench/compare.py steps --numel 67108864    one of them: passes, steps or overlap

Passes are measured with the first of --isa, --threads and --dtype, and then with each of them varied by itself; steps
with each number of threads; iterations with the first. Peers are torch's AdamW and those of DeepSpeed, bitsandbytes and
torchao, where these are installed. Leave the machine alone while it runs.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

sys.path.append(str(Path(__file__).parent))  # which PYTHONSAFEPATH leaves out
from measures import contests, options, overlap, peers, report
from measures.settings import settings

from superadam.cli.bench import passes
from superadam.cli.bench.report import Environment
from superadam.kernels import native
from superadam.kernels.native import Dtype

DTYPES = {"f32": Dtype.FLOAT32, "bf16": Dtype.BFLOAT16, "f16": Dtype.FLOAT16, "f64": Dtype.FLOAT64}


def main(words: Sequence[str] | None = None) -> int:
    """Measure, show the table, and write the JSON file if one is named."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    runnable = list(dict.fromkeys([native.active_isa(), *native.available_isas()]))
    threads = list(dict.fromkeys([native.get_num_threads(), 1]))
    parser.add_argument("what", nargs="?", choices=["all", "passes", "steps", "overlap"], default="all")
    parser.add_argument(
        "--numel", type=options.count, default=16 << 20, metavar="N", help="of the largest tensor (16 Mi)"
    )
    parser.add_argument("--pairs", type=options.count, default=21, metavar="N", help="of each row (%(default)s)")
    parser.add_argument("--isa", nargs="+", choices=runnable, default=runnable, help="instruction sets (all)")
    parser.add_argument("--threads", nargs="+", type=options.count, default=threads, metavar="N", help="(all, and one)")
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, default=["f32", "bf16"], help="of gradients (f32 bf16)")
    names = [peer.name for peer in peers.PEERS]
    parser.add_argument("--peers", nargs="+", choices=names, default=names, metavar="NAME", help="(all that run here)")
    parser.add_argument(
        "--minutes",
        type=options.positive,
        default=8.0,
        metavar="N",
        help="after which no step is measured (%(default)g)",
    )
    parser.add_argument("--json", type=options.new_file, metavar="FILE", help="write the results there too")
    asked = parser.parse_args(words)
    parts = ("passes", "steps", "overlap") if asked.what == "all" else (asked.what,)
    before, results = native.active_isa(), report.Results()
    native.set_active_isa(asked.isa[0])
    try:
        with Console(stderr=True).status("measuring") as status:
            if "passes" in parts:
                chosen = settings(asked.isa, asked.threads, [DTYPES[name] for name in asked.dtype])
                for row in passes.measure(asked.numel, chosen, asked.pairs):
                    results.passes.append(row)
                    status.update(f"{len(results.passes)} of {len(chosen) * len(passes.PASSES)} rows of passes")
            if "steps" in parts:
                end = time.monotonic() + 60 * asked.minutes
                status.update("which peers run here; the first time, they may compile for minutes")
                asked_for = [peer for peer in peers.PEERS if peer.name in asked.peers]
                results.peers, results.left_out = peers.choose(asked_for)
                chosen_contests = contests.contests(asked.numel, asked.threads, results.peers)
                for result in contests.measure(chosen_contests, asked.pairs, end):
                    if isinstance(result, peers.LeftOut):
                        results.left_out.append(result)
                    else:
                        results.contests.append(result)
                    status.update(f"{len(results.contests)} of {len(chosen_contests)} comparisons of steps")
            if "overlap" in parts:
                status.update("iterations with and without overlap")
                results.overlap.append(overlap.measure(asked.threads[0], asked.pairs))
        console, environment = Console(), Environment.here()
        console.print(environment.in_words(), highlight=False)
        console.print(report.to_table(results))
        for line in report.notes(results, asked.pairs):
            console.print(line, style="dim", highlight=False)
    finally:
        native.set_active_isa(before)
    if asked.json is not None:
        asked.json.write_text(report.to_text(report.to_json(environment, results)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
