"""What smaller state does to training.

    python bench/smaller_state.py --json bench/results/NAME.json --picture docs/NAME.svg

It trains one small language model many times, in each format and from changed initial weights, on one thread: about an
hour. It writes the file after each run; begun again with the same file, it goes on from there. The formats of
bitsandbytes and torchao take part where these are installed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

sys.path += [str(Path(__file__).parent), str(Path(__file__).parents[1] / "examples")]  # as PYTHONSAFEPATH does not
from measures import options, state_report
from measures.state_training import Settings, Training, read_texts
from measures.threads import computing_threads

from superadam.cli.usage import UsageError


def train(asked: argparse.Namespace, console: Console) -> None:
    """Train what the file does not hold yet, and show all of it."""
    settings = Settings(steps=asked.steps, beta2s=tuple(asked.beta2), perturbed=asked.perturbed)
    training = Training(settings, *read_texts(settings.seq))
    results = state_report.TrainingResults.begin(training, asked.json)
    missing = [run for run in training.runs() if results.of(run) is None]
    with computing_threads(1), Console(stderr=True).status("training") as status:
        for number, run in enumerate(missing):
            status.update(f"run {number + 1} of {len(missing)}: {run.part}, {run.format}, beta2 {run.beta2}")
            results.add(training.carry_out(run))
    state_report.show_training(results, console)
    if asked.picture is not None:
        state_report.draw(results).savefig(asked.picture)


def main(words: Sequence[str] | None = None) -> int:
    """Measure, show the tables, and write what --json and --picture ask for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    usual, count = Settings(), options.count
    parser.add_argument("--steps", type=count, default=usual.steps, metavar="N", help="from scratch (%(default)s)")
    parser.add_argument(
        "--beta2", nargs="+", type=options.share, default=usual.beta2s, metavar="X", help="(0.95 0.999)"
    )
    more = "further runs of each format (%(default)s)"
    parser.add_argument("--perturbed", type=count, default=usual.perturbed, metavar="N", help=more)
    parser.add_argument("--picture", type=options.new_file, metavar="FILE", help="draw the results there: .svg or .png")
    parser.add_argument("--json", type=options.new_file, metavar="FILE", help="write the results there too")
    asked = parser.parse_args(words)
    try:
        train(asked, Console())
    except UsageError as error:
        parser.error(str(error))
    return 0


if __name__ == "__main__":
    sys.exit(main())
