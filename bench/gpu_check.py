"""Checks and measures superadam on this machine's GPU, in at most eight minutes and without a network.

    python bench/gpu_check.py               writes bench/results/<GPU>-<date>.json, .png and -trace.json
    python bench/gpu_check.py --rehearse    every stage on the CPU with tiny shapes, to test the check itself

It needs an installed superadam[cli], and pytest and hypothesis for the tests. Results are written after every stage.
The exit status is 0, 1 when a test, a verification or a measurement failed, and 2 when there is no GPU.
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
sys.path.append(str(ROOT / "bench"))

NEEDED = ("torch", "superadam", "rich", "matplotlib")
RESULTS = ROOT / "bench" / "results"

FAILED_STATUS, USAGE_STATUS = 1, 2

SECONDS = 460.0
"""For all stages; the rest of eight minutes is for Python to start and for the picture."""

ENDS = {"machine": 0.06, "tests": 0.34, "verification": 0.46, "rates": 0.52, "throughput": 0.9, "sanitizer": 1.0}
"""When each stage has to be over, as a share of all seconds: what one leaves over, the next ones have."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the check, or measure something for a check that runs in another process, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rehearse", action="store_true", help="run on the CPU, tiny; for testing the check")
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder of the results (default: bench/results)")
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

    if parsed.rehearse and (parsed.out is None or parsed.out.resolve() == RESULTS):
        return _refuse("a rehearsal measures nothing that belongs in bench/results; give another folder with --out")
    if not parsed.rehearse and not torch.cuda.is_available():
        return _refuse(f"torch {torch.__version__} finds no GPU; run it on a machine that has one, or with --rehearse")
    return check(parsed.out or RESULTS, parsed.seconds, rehearses=parsed.rehearse)


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


def check(folder: Path, seconds: float, *, rehearses: bool, run: Any = None) -> int:
    """Run every stage, write what it found, and return the exit status.

    Args:
        folder: of the results; made if it is not there.
        seconds: for all stages.
        rehearses: run on the CPU, tiny.
        run: starts other programs, a `gpucheck.programs.Runner`.
    """
    import torch
    from gpucheck import checks, picture, programs, rates, report, throughput
    from gpucheck.findings import Context, Limit
    from rich.console import Console

    device = "CPU" if rehearses else torch.cuda.get_device_name()
    now = datetime.datetime.now(datetime.UTC).astimezone()
    name = f"{'rehearsal' if rehearses else report.slug(device)}-{now.date().isoformat()}"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    results = report.Results(device, now.isoformat(timespec="seconds"), sys.argv, rehearses)
    trace = str((folder / f"{name}-trace.json").resolve())
    context = Context(run or programs.run, "cpu" if rehearses else "cuda", rehearses, trace)
    stages = {
        "machine": checks.machine,
        "tests": checks.tests,
        "verification": checks.verification,
        "rates": rates.rates,
        "throughput": throughput.throughput,
        "sanitizer": checks.sanitized,
    }
    console, begin = Console(), time.monotonic()
    if not console.is_terminal:
        console.width = 120
    for stage, work in stages.items():
        limit, since = Limit(begin + ENDS[stage] * seconds), time.monotonic()
        console.print(f"{stage}: at most {limit.left:.0f} s", style="dim", highlight=False)
        for finding in work(context, limit):
            results.add(stage, finding, time.monotonic() - since)
            results.write(path)
    console.print(report.tables(results))
    written = [path]
    if picture.write(results, path.with_suffix(".png")):
        written.append(path.with_suffix(".png"))
    if Path(trace).exists():
        written.append(Path(trace))
    console.print("wrote " + ", ".join(map(str, written)), soft_wrap=True, highlight=False)
    return FAILED_STATUS if results.has_failed else 0


if __name__ == "__main__":
    sys.exit(main())
