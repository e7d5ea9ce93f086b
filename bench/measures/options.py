"""Types of the command line's options; argparse puts the option's name before what they say is wrong."""

from __future__ import annotations

import argparse
import math
from pathlib import Path


def number(text: str) -> float:
    """Return a finite number of at least 0."""
    if not 0.0 <= (value := float(text)) < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is no finite number of at least 0")
    return value


def positive(text: str) -> float:
    """Return a finite number above 0."""
    if (value := number(text)) == 0.0:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return value


def new_file(text: str) -> Path:
    """Return the path of a file that is or can be in a folder that exists."""
    if (path := Path(text)).is_dir() or not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text} is no file, or is in a directory that does not exist; name one")
    return path
