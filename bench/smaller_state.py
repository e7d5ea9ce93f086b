"""What smaller state does: to training, and to the time of passes.

    python bench/smaller_state.py training --json bench/results/NAME.json --picture docs/NAME.svg
    python bench/smaller_state.py passes --json bench/results/NAME.json

`training` trains one small language model many times, in each format and from changed initial weights, on one thread:
about an hour. It writes the file after each run; begun again with the same file, it goes on from there.
The formats of bitsandbytes and torchao take part where these are installed. `passes` compares passes over state in each
format with those over fp32, in interleaved pairs, and says below which memory bandwidth a format is faster; leave the
machine alone meanwhile.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console

sys.path += [str(Path(__file__).parent), str(Path(__file__).parents[1] / "examples")]  # as PYTHONSAFEPATH does not
from measures import options, state_passes, state_report
from measures.state_formats import FORMATS
from measures.state_training import Settings, Training, read_texts

from superadam.cli.usage import UsageError
from superadam.kernels import native


def train(asked: argparse.Namespace, console: Console) -> None:
    """Train what the file does not hold yet, and show all of it."""
    settings = Settings(
        width=asked.width,
        layers=asked.layers,
        steps=asked.steps,
        beta2s=tuple(asked.beta2),
        fine_tuning_steps=asked.fine_tuning_steps,
        fine_tuning_lrs=tuple(asked.fine_tuning_lr),
        perturbed=asked.perturbed,
        held_out=asked.held_out,
        formats=tuple(asked.formats),
    )
    training = Training(settings, *read_texts(asked.text, asked.other_text, settings.seq))
    results = state_report.TrainingResults.begin(training, asked.json)
    before = torch.get_num_threads(), native.get_num_threads()
    torch.set_num_threads(1)
    native.set_num_threads(1)
    try:
        missing = [run for run in training.runs() if results.of(run) is None]
        with Console(stderr=True).status("training") as status:
            for number, run in enumerate(missing):
                status.update(f"run {number + 1} of {len(missing)}: {run.part}, {run.format}, beta2 {run.beta2}")
                results.add(training.carry_out(run))
    finally:
        torch.set_num_threads(before[0])
        native.set_num_threads(before[1])
    state_report.show_training(results, console)
    if asked.picture is not None:
        state_report.draw(results).savefig(asked.picture)


def time_passes(asked: argparse.Namespace, console: Console) -> None:
    """Measure passes and their arithmetic, and show both."""
    results = state_report.PassResults(is_cpu_time=asked.cpu_time)
    formats = [name for name in asked.formats if name != "fp32"]
    number = len(formats) * len(asked.threads) * len(state_passes.PASSES)
    with Console(stderr=True).status("measuring") as status:
        results.arithmetic += state_passes.arithmetic(formats, asked.rounds)
        clock = time.process_time if asked.cpu_time else time.perf_counter
        for row in state_passes.measure(asked.numel, asked.threads, formats, asked.pairs, clock=clock):
            results.passes.append(row)
            status.update(f"{len(results.passes)} of {number} rows of passes")
    state_report.show_passes(results, console, asked.pairs)
    if asked.json is not None:
        asked.json.write_text(json.dumps(results.to_json(), indent=1) + "\n")


def main(words: Sequence[str] | None = None) -> int:
    """Measure, show the tables, and write what --json and --picture ask for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = parser.add_subparsers(dest="part", required=True)
    usual = Settings()
    runs = parts.add_parser("training", help="losses, errors of updates, drift of masters")
    count = options.count
    runs.add_argument("--width", type=count, default=usual.width, metavar="N", help="of the model (%(default)s)")
    runs.add_argument("--layers", type=count, default=usual.layers, metavar="N", help="(%(default)s)")
    runs.add_argument("--steps", type=count, default=usual.steps, metavar="N", help="from scratch (%(default)s)")
    runs.add_argument("--beta2", nargs="+", type=options.share, default=usual.beta2s, metavar="X", help="(0.95 0.999)")
    runs.add_argument(
        "--fine-tuning-steps", type=count, default=usual.fine_tuning_steps, metavar="N", help="(%(default)s)"
    )
    runs.add_argument(
        "--fine-tuning-lr",
        nargs="*",
        type=options.positive,
        default=usual.fine_tuning_lrs,
        metavar="X",
        help="learning rates (1e-5 3e-5)",
    )
    runs.add_argument(
        "--perturbed",
        type=count,
        default=usual.perturbed,
        metavar="N",
        help="further runs of each format (%(default)s)",
    )
    runs.add_argument("--held-out", type=count, default=usual.held_out, metavar="N", help="windows (%(default)s)")
    runs.add_argument("--formats", nargs="+", choices=FORMATS, default=usual.formats, help="(all)")
    runs.add_argument("--text", metavar="FILE", help="train on it (the standard library's sources)")
    runs.add_argument("--other-text", metavar="FILE", help="fine-tune on it (the sources of its tests)")
    runs.add_argument("--picture", type=options.new_file, metavar="FILE", help="draw the results there: .svg or .png")
    passes = parts.add_parser("passes", help="times of passes, and where a format is faster")
    passes.add_argument("--numel", type=count, default=16 << 20, metavar="N", help="elements (16 Mi)")
    passes.add_argument("--pairs", type=count, default=21, metavar="N", help="of each row (%(default)s)")
    passes.add_argument("--rounds", type=count, default=200, metavar="N", help="of arithmetic (%(default)s)")
    threads = list(dict.fromkeys([1, native.get_num_threads()]))
    passes.add_argument("--threads", nargs="+", type=count, default=threads, metavar="N", help="(one, and all)")
    passes.add_argument(
        "--cpu-time", action="store_true", help="ratios of this process's CPU time: where others use the machine too"
    )
    every = list(state_passes.FORMATS)
    passes.add_argument("--formats", nargs="+", choices=every, default=every, help="(all)")
    for part in (runs, passes):
        part.add_argument("--json", type=options.new_file, metavar="FILE", help="write the results there too")
    asked = parser.parse_args(words)
    try:
        (train if asked.part == "training" else time_passes)(asked, Console())
    except UsageError as error:
        parser.error(str(error))
    return 0


if __name__ == "__main__":
    sys.exit(main())
