"""`superadam convert`: its options, and the file that it reads."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from superadam.cli.convert.translation import translated
from superadam.cli.usage import UsageError


def add_parser(subparsers: Any) -> None:
    """Add `convert` to the parser of `superadam`."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "convert",
        help="say what a configuration of DeepSpeed is called here",
        description="Print the arguments of superadam, of a Trainer and of FSDP2 that mean what a JSON file of "
        "DeepSpeed 0.19.8 says, and a line for each key that has no counterpart. Needs no DeepSpeed.",
    )
    parser.add_argument("config", type=Path, metavar="ds_config.json", help="as passed to DeepSpeed or a Trainer")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the translation.

    Raises:
        UsageError: the file is no configuration of DeepSpeed.
    """
    try:
        sys.stdout.write(translated(_read(arguments.config)))
    except RecursionError as error:
        raise UsageError(f"{arguments.config} is nested too deeply, expected a configuration of DeepSpeed") from error
    return 0


def _read(path: Path) -> dict[str, Any]:
    """Return what a file holds: JSON, perhaps with comments and with commas before brackets, as DeepSpeed reads it."""
    try:
        text = _without(r"(?:#|//)[^\n]*|/\*.*?\*/", path.read_text(encoding="utf-8-sig"))
        config = json.loads(_without(r",(?=\s*[}\]])", text), object_pairs_hook=_without_doubles)
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}; pass the JSON file of DeepSpeed") from error
    except json.JSONDecodeError as error:
        raise UsageError(f"{path} is no JSON: line {error.lineno}: {error.msg}; correct it") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is no text ({error.reason}), expected JSON; pass the file of DeepSpeed") from error
    except ValueError as error:  # of int()
        raise UsageError(f"{path} has a number of thousands of digits, expected one that DeepSpeed has") from error
    if not isinstance(config, dict):
        raise UsageError(f"{path} holds a {type(config).__name__}, expected an object; pass the file of DeepSpeed")
    return config


def _without(pattern: str, text: str) -> str:
    """Return a text of which spaces stand for what a pattern finds outside of strings."""
    found = re.compile(rf'"(?:\\.|[^"\\])*"|({pattern})', re.DOTALL)
    return found.sub(lambda match: re.sub(".", " ", match[0]) if match[1] else match[0], text)


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    doubles = [key for key, count in Counter(key for key, _ in pairs).items() if count > 1]
    if doubles:
        raise UsageError(f"{doubles[0]} stands in it twice, which DeepSpeed refuses; remove one of them")
    return dict(pairs)
