"""`superadam doctor`: its options and its exit status, which is 1 when something is broken and else 0."""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, redirect_stdout
from typing import Any

from superadam.cli.usage import require_modules
from superadam.host.local_ranks import local_rank, processes
from superadam.host.machine import Host

BROKEN_STATUS = 1
REPORT_SECONDS = 60.0
"""For how long other ranks of a node wait for the one that reports."""


def add_parser(subparsers: Any) -> None:
    """Add `doctor` to the parser of `superadam`."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "doctor",
        help="look at this machine and say what would make it faster",
        description="Look at this machine and say what is ok, what could be better, and what is broken, with the "
        "command that mends it. Changes nothing and needs no GPU. Exits with 1 when something is broken.",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run every probe, show the findings, and return the exit status.

    Raises:
        UsageError: rich is not installed.
    """
    require_modules("doctor", "rich")
    from superadam.cli.console import Console
    from superadam.cli.doctor import report
    from superadam.cli.doctor.diagnosis import diagnose

    host = Host()
    if _is_told_by_another(host):
        return 0
    quiet = _nothing_on_stdout() if arguments.json else nullcontext()
    with quiet, Console(stderr=True).status("looking at this machine"):
        findings = diagnose(host)
    found = report.to_json(findings)
    if arguments.json:
        sys.stdout.write(json.dumps(found, indent=1) + "\n")
    else:
        Console().print(report.to_table(findings))
    return BROKEN_STATUS if found["broken"] else 0


def _is_told_by_another(host: Host) -> bool:
    """Whether the first rank on this node reports for this one, too; returns when it has ended, having looked at it."""
    try:
        rank = local_rank(host)
    except ValueError:
        return False  # which the report says
    if rank.number == 0:
        return False
    first, deadline = processes(host, rank)[0], time.monotonic() + REPORT_SECONDS
    while first is not None and host.path(f"/proc/{first}/environ").exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    return True


@contextmanager
def _nothing_on_stdout() -> Iterator[None]:
    """Send to stderr what is written to stdout inside: by Python, by C, and by other programs."""
    stdout, kept = sys.stdout, os.dup(1)
    try:
        stdout.flush()
        os.dup2(2, 1)
        with redirect_stdout(sys.stderr):
            yield
    finally:
        try:
            ctypes.CDLL(None).fflush(None)  # C has a buffer of its own
            stdout.flush()  # others may hold it
        finally:
            os.dup2(kept, 1)
            os.close(kept)
