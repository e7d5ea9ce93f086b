"""Compares, in interleaved pairs: passes with their floor, steps with torch's, and iterations with and without overlap.

    python bench/compare.py                           all three
    python bench/compare.py torch --numel 67108864    one of them: passes, torch or overlap

Passes are measured with the first of --isa, --threads and --dtype, and then with each of them varied by itself; steps
and iterations with the first. Leave the machine alone while it runs.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

sys.path.append(str(Path(__file__).parent))  # which PYTHONSAFEPATH leaves out
from measures import contests, options, overlap, report
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
    parser.add_argument("what", nargs="?", choices=["all", "passes", "torch", "overlap"], default="all")
    parser.add_argument(
        "--numel", type=options.count, default=16 << 20, metavar="N", help="of the large tensor (16 Mi)"
    )
    parser.add_argument("--pairs", type=options.count, default=21, metavar="N", help="of each row (%(default)s)")
    parser.add_argument("--isa", nargs="+", choices=runnable, default=runnable, help="instruction sets (all)")
    parser.add_argument("--threads", nargs="+", type=options.count, default=threads, metavar="N", help="(all, and one)")
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, default=["f32", "bf16"], help="of gradients (f32 bf16)")
    parser.add_argument("--tokens", type=options.count, default=2048, metavar="N", help="of an iteration (%(default)s)")
    parser.add_argument("--json", type=options.new_file, metavar="FILE", help="write the results there too")
    asked = parser.parse_args(words)
    parts = ("passes", "torch", "overlap") if asked.what == "all" else (asked.what,)
    before, results = native.active_isa(), report.Results()
    native.set_active_isa(asked.isa[0])
    try:
        with Console(stderr=True).status("measuring") as status:
            if "passes" in parts:
                chosen = settings(asked.isa, asked.threads, [DTYPES[name] for name in asked.dtype])
                for row in passes.measure(asked.numel, chosen, asked.pairs):
                    results.passes.append(row)
                    status.update(f"{len(results.passes)} of {len(chosen) * len(passes.PASSES)} rows of passes")
            if "torch" in parts:
                for result in contests.measure(contests.contests(asked.numel), asked.threads[0], asked.pairs):
                    results.contests.append(result)
                    status.update(f"{len(results.contests)} comparisons with torch")
            if "overlap" in parts:
                status.update("iterations with and without overlap")
                results.overlap.append(overlap.measure(asked.threads[0], asked.pairs, tokens=asked.tokens))
        console, environment = Console(), Environment.here()
        console.print(environment.in_words(), highlight=False)
        console.print(report.to_table(results))
        for line in report.notes(results, asked.pairs):
            console.print(line, style="dim", highlight=False)
    finally:
        native.set_active_isa(before)
    if asked.json is not None:
        asked.json.write_text(json.dumps(report.to_json(environment, results), indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
