"""The `superadam` command: its parser, the exit status, and how errors are shown.

Each module in `COMMANDS` is one subcommand. It exposes `add_parser(subparsers)`, which adds its parser and sets `run=`,
a function from the parsed arguments to the exit status.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from importlib.metadata import version
from typing import NoReturn

from superadam.cli.usage import UsageError

COMMANDS = ("superadam.cli.train.command", "superadam.cli.doctor.command", "superadam.cli.bench.command")
"""Modules that each add one subcommand, in the order in which `superadam --help` lists them."""

USAGE_STATUS = 2
"""Exit status for input that has to be corrected first, as in argparse."""

INTERRUPTED_STATUS = 130
"""Exit status after Ctrl-C, as shells count: 128 and the number of SIGINT."""


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one sentence instead of a page of usage."""

    def error(self, message: str) -> NoReturn:
        """Exit with `message` on stderr."""
        self.exit(USAGE_STATUS, f"{self.prog}: {message}; see '{self.prog} --help'\n")


def build_parser() -> Parser:
    """Return the parser of `superadam` with every subcommand."""
    parser = Parser(prog="superadam", description="Speculative Adam on the CPU that never changes a bit.")
    parser.add_argument("--version", action="version", version=f"superadam {version('superadam')}")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True, parser_class=Parser)
    for name in COMMANDS:
        importlib.import_module(name).add_parser(subparsers)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status; `arguments` are the words after `superadam`."""
    parser = build_parser()
    parsed = parser.parse_args(arguments)
    try:
        return int(parsed.run(parsed))
    except UsageError as error:
        sys.stderr.write(f"{parser.prog}: {error}\n")
        return USAGE_STATUS
    except KeyboardInterrupt:
        sys.stderr.write(f"{parser.prog}: interrupted\n")
        return INTERRUPTED_STATUS
