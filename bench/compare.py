"""Compares steps with those of peers, in interleaved pairs.

    python bench/compare.py --numel 67108864

Peers are torch's AdamW and those of DeepSpeed, bitsandbytes and torchao, where these are installed. `superadam bench`
measures passes, `bench/pace.py` iterations. Leave the machine alone while it runs.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

sys.path.append(str(Path(__file__).parent))  # which PYTHONSAFEPATH leaves out
from measures import contests, options, peers, report

from superadam.cli.bench.report import environment, line_of
from superadam.cli.usage import count
from superadam.kernels import native


def main(words: Sequence[str] | None = None) -> int:
    """Measure, show the table, and write the JSON file if one is named."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    threads = list(dict.fromkeys([native.get_num_threads(), 1]))
    parser.add_argument("--numel", type=count, default=16 << 20, metavar="N", help="of the largest tensor (16 Mi)")
    parser.add_argument("--pairs", type=count, default=21, metavar="N", help="of each row (%(default)s)")
    parser.add_argument("--threads", nargs="+", type=count, default=threads, metavar="N", help="(all, and one)")
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
    results, here = report.Results(), environment()
    with Console(stderr=True).status("measuring") as status:
        end = time.monotonic() + 60 * asked.minutes
        status.update("which peers run here; the first time, they may compile for minutes")
        asked_for = [peer for peer in peers.PEERS if peer.name in asked.peers]
        results.peers, results.left_out = peers.choose(asked_for)
        chosen = contests.contests(asked.numel, asked.threads, results.peers)
        for result in contests.measure(chosen, asked.pairs, end):
            if isinstance(result, peers.LeftOut):
                results.left_out.append(result)
            else:
                results.contests.append(result)
            status.update(f"{len(results.contests)} of {len(chosen)} comparisons")
            if asked.json is not None:
                asked.json.write_text(report.to_text(report.to_json(here, results)))
    console = Console()
    console.print(line_of(here), highlight=False)
    console.print(report.to_table(results))
    for line in report.notes(results, asked.pairs):
        console.print(line, style="dim", highlight=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
