"""Checks and measures superadam on this machine's GPU, in at most eight minutes and without a network.

    python bench/gpu_check.py               writes bench/results/<GPU>-<host>-<date>-<commit>.json, .png and -trace.json
    python bench/gpu_check.py --rehearse    every stage on the CPU with tiny shapes, to test the check itself
    python bench/gpu_check.py --only rates  one stage, which has all the time

It needs an installed superadam[cli], and pytest, pytest-timeout and hypothesis for the tests; `make gpu-wheels` fetches
them for a machine without a network. Results are written after every stage, and no file is overwritten.
The exit status is 0, 1 when a test, a verification or a measurement failed, and 2 when there is no GPU; a bound that
is missed is in the results, and no failure.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path += [str(ROOT / "bench"), str(ROOT / "examples")]

NEEDED = ("torch", "superadam", "rich", "matplotlib")
RESULTS = ROOT / "bench" / "results"
REHEARSALS = ROOT / "build" / "gpu-check"

FAILED_STATUS, USAGE_STATUS = 1, 2

SECONDS = 460.0
"""For all stages; the rest of eight minutes is for Python to start and for the picture."""

SHARES = {"machine": 4, "tests": 26, "verification": 10, "rates": 8, "throughput": 46, "sanitizer": 6}
"""Of all seconds, in percent: what one stage leaves over, the next ones have."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the check, or measure something for a check that runs in another process, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rehearse", action="store_true", help="run on the CPU, tiny; for testing the check")
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder of the results (default: bench/results)")
    parser.add_argument(
        "--only", action="append", choices=SHARES, metavar="STAGE", help=f"run this stage alone: {', '.join(SHARES)}"
    )
    parser.add_argument("--seconds", type=float, default=SECONDS, metavar="S", help="for all stages (%(default)s)")
    parser.add_argument("--measure", nargs=2, metavar=("WHAT", "REQUEST"), help=argparse.SUPPRESS)
    parsed = parser.parse_args(arguments)
    missing = [module for module in NEEDED if find_spec(module) is None]
    if missing:
        return _refuse(f"{', '.join(missing)} cannot be imported by {sys.executable}; install superadam[cli] there")
    if parsed.measure is not None:
        _measure(*parsed.measure)
        return 0
    import torch

    folder: Path = parsed.out or (REHEARSALS if parsed.rehearse else RESULTS)
    if parsed.rehearse and folder.resolve() == RESULTS:
        return _refuse("a rehearsal measures nothing that belongs in bench/results; give another folder with --out")
    if not parsed.rehearse and not torch.cuda.is_available():
        return _refuse(f"torch {torch.__version__} finds no GPU; run it on a machine that has one, or with --rehearse")
    return check(folder, parsed.seconds, rehearses=parsed.rehearse, only=parsed.only)


def _refuse(sentence: str) -> int:
    sys.stderr.write(f"gpu-check: {sentence}\n")
    return USAGE_STATUS


def _measure(what: str, request: str) -> None:
    values: dict[str, Any] = json.loads(request)
    if what == "rates":
        from gpucheck import rates

        rates.measure(rates.RatesRequest(**values))
    else:
        from gpucheck import throughput

        throughput.measure(throughput.ThroughputRequest(**values))


def check(
    folder: Path, seconds: float, *, rehearses: bool, only: Sequence[str] | None = None, runner: Any = None
) -> int:
    """Run the stages, write what they found, and return the exit status.

    Args:
        folder: of the results; made if it is not there.
        seconds: for all stages.
        rehearses: run on the CPU, tiny.
        only: names of stages; None for all.
        runner: starts other programs, a `gpucheck.programs.Runner`.
    """
    import torch
    from gpucheck import checks, picture, programs, rates, report, throughput
    from gpucheck.findings import Context, Limit
    from rich.console import Console

    device = "the CPU" if rehearses else torch.cuda.get_device_name()
    date = datetime.datetime.now(datetime.UTC).astimezone().isoformat(timespec="seconds")
    folder.mkdir(parents=True, exist_ok=True)
    path = report.new_file(folder, "rehearsal" if rehearses else device, date)
    results = report.Results(device, date, sys.argv, rehearses)
    results.write(path)
    trace = path.with_name(f"{path.stem}-trace.json").resolve()
    context = Context(runner or programs.run, "cpu" if rehearses else "cuda", rehearses, str(trace))
    stages = {  # each yields what it has found so far, again and again; the last one stands
        "machine": checks.machine,
        "tests": checks.tests,
        "verification": checks.verification,
        "rates": rates.rates,
        "throughput": throughput.throughput,
        "sanitizer": checks.sanitized,
    }
    chosen = [stage for stage in stages if only is None or stage in only]
    console, end = Console(), time.monotonic()
    if not console.is_terminal:
        console.width = 120
    for stage in chosen:
        end += seconds * SHARES[stage] / sum(SHARES[each] for each in chosen)
        limit, since = Limit(end), time.monotonic()
        console.print(f"{stage}: at most {limit.left:.0f} s", style="dim", highlight=False)
        for finding in stages[stage](context, limit):
            results.add(stage, finding, time.monotonic() - since)
            results.write(path)
    console.print(report.tables(results))
    written = [path]
    if picture.write(results, path.with_suffix(".png")):
        written.append(path.with_suffix(".png"))
    if trace.exists():
        written.append(trace)
    console.print("wrote " + ", ".join(map(str, written)), soft_wrap=True, highlight=False)
    return FAILED_STATUS if results.has_failed else 0


if __name__ == "__main__":
    sys.exit(main())
