"""The `superadam` command: its parser, the exit status, and how errors are shown.

Each module `command` is one subcommand. It exposes `add_parser(subparsers)`, which adds its parser and sets `run=`, a
function from the parsed arguments to the exit status.
"""

from __future__ import annotations

import argparse
import io
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib.metadata import version
from typing import IO, Any, NoReturn

from superadam.cli.usage import UsageError

USAGE_STATUS = 2  # for input that has to be corrected first, as in argparse
PIPE_STATUS = 128 + signal.SIGPIPE  # when the reader of the output has gone, as in `| head -1`
INTERRUPTED_STATUS = 128 + signal.SIGINT  # after Ctrl-C


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one sentence instead of a page of usage, and that guesses no option."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **{"allow_abbrev": False, **named})

    def error(self, message: str) -> NoReturn:
        """Exit with `message` on stderr."""
        self.exit(USAGE_STATUS, f"{self.prog}: {' '.join(message.splitlines())}; see '{self.prog} --help'\n")

    def _print_message(self, message: str, file: Any = None) -> None:
        """Write all of `message`; argparse's own ignores that it cannot."""
        file.write(message)
        file.flush()


def build_parser() -> Parser:
    """Return the parser of `superadam` with every subcommand, all of which need torch."""
    from superadam.cli.bench import command as bench
    from superadam.cli.convert import command as convert
    from superadam.cli.doctor import command as doctor
    from superadam.cli.plan import command as plan

    parser = Parser(prog="superadam", description="Speculative Adam on the CPU, with the bits of a plain step.")
    parser.add_argument("--version", action="version", version=f"superadam {version('superadam')}")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", parser_class=Parser)
    parser.set_defaults(run=lambda parsed: sys.stdout.write(parser.format_help()) and 0)
    for command in (doctor, bench, plan, convert):
        command.add_parser(subparsers)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status; `arguments` are the words after `superadam`."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 - for as long as the process lives
    if isinstance(sys.stdout, io.TextIOWrapper):  # stderr never fails for a character
        sys.stdout.reconfigure(errors="replace")
    try:
        import torch  # noqa: F401 - every command needs it
    except (ImportError, OSError) as error:
        return _failed(f"torch cannot be imported ({error}), expected 2.10 or later; pip install torch", USAGE_STATUS)
    try:
        parsed = build_parser().parse_args(arguments)
        status = int(parsed.run(parsed))
        sys.stdout.flush()
        return status
    except UsageError as error:
        return _failed(str(error), USAGE_STATUS)
    except KeyboardInterrupt:
        return _failed("interrupted", INTERRUPTED_STATUS)
    except OSError as error:
        _abandon(sys.stdout)
        if isinstance(error, BrokenPipeError):
            return PIPE_STATUS
        subject = "write the output" if error.filename is None else f"use {error.filename}"
        words = f"cannot {subject}: {error.strerror or error}; free some space or choose another place"
        return _failed(words, USAGE_STATUS)


def _failed(sentence: str, status: int) -> int:
    try:
        sys.stderr.write(f"superadam: {' '.join(sentence.splitlines())}\n")  # names may have line breaks
        sys.stderr.flush()
    except OSError:
        _abandon(sys.stderr)
    return status


def _abandon(stream: IO[str]) -> None:
    """Discard what `stream` still holds, which the interpreter would write when it ends."""
    with suppress(OSError):  # it has no descriptor
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
