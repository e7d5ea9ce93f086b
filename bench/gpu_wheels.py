"""Fetches what `gpu_check.py` needs besides superadam, torch and numpy, for a machine without a network.

    make gpu-wheels                                     wheels for this machine's architecture, into build/gpu-wheels
    make gpu-wheels ARGS="--arch aarch64 --out DIR"     for another
    make gpu-wheels ARGS="--python 3.12"                for one version of Python, a third as much

There: python3 -m pip install --no-index --find-links build/gpu-wheels superadam[cli] pytest pytest-timeout hypothesis.
Wheels are for all of `PYTHONS`; the folder stays within 64 MiB, which is why numpy is not among them.
"""

from __future__ import annotations

import argparse
import platform
import subprocess
import sys
import zipfile
from collections.abc import Iterator, Sequence
from email.parser import Parser
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]

PYTHONS = ("3.11", "3.12", "3.13")

COMPILED = ("cffi", "matplotlib", "contourpy", "kiwisolver", "pillow", "hypothesis")
"""A wheel for each Python and architecture."""

PLAIN = (
    *("rich", "markdown-it-py", "mdurl", "pygments"),
    *("fonttools", "cycler", "packaging", "pyparsing", "python-dateutil", "six", "tzdata"),
    *("pytest", "pytest-timeout", "iniconfig", "pluggy", "sortedcontainers", "pycparser"),
)
"""One wheel for all; fonttools has compiled ones, too, of four times the size."""

THERE = {"torch", "numpy", "triton"}
"""What the other machine has already."""

GLIBCS = ("2_17", "2_27", "2_28")
"""Versions of which wheels are taken, as their names have them: pip compares these words."""

MOST_BYTES = 64 << 20


def commands(arch: str, pythons: Sequence[str], folder: Path) -> Iterator[list[str]]:
    """Yield the commands that fill a folder."""
    download = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    download += ["--only-binary=:all:", "-c", str(ROOT / "constraints.txt"), "-d", str(folder)]
    platforms = [f"--platform=manylinux_{glibc}_{arch}" for glibc in GLIBCS]
    for python in pythons:
        yield [*download, "--python-version", python, "--implementation", "cp", *platforms, *COMPILED]
        yield [*download, "--python-version", python, "--platform", "any", *PLAIN]
    if arch == platform.machine():
        yield [*download[:3], "wheel", *download[4:7], "--wheel-dir", str(folder), str(ROOT)]


def missing(folder: Path) -> set[str]:
    """Return what wheels of a folder need, on any of the Pythons, and neither it nor the other machine has."""
    has, needs = set(THERE), set()
    for path in folder.glob("*.whl"):
        has.add(canonicalize_name(path.name.split("-")[0]))
        with zipfile.ZipFile(path) as wheel:
            (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
            lines = Parser().parsestr(wheel.read(name).decode()).get_all("Requires-Dist", [])
        for need in map(Requirement, lines):
            environments = ({"python_version": python, "sys_platform": "linux", "extra": ""} for python in PYTHONS)
            if need.marker is None or any(map(need.marker.evaluate, environments)):
                needs.add(canonicalize_name(need.name))
    return needs - has


def main(arguments: Sequence[str] | None = None) -> int:
    """Replace the folder's wheels, and return the exit status: 1 if it lacks something or is too large."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", choices=("x86_64", "aarch64"), default=platform.machine(), help="of the processor")
    parser.add_argument("--python", action="append", choices=PYTHONS, help="take this version alone")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "gpu-wheels", metavar="DIR", help="(%(default)s)")
    parsed = parser.parse_args(arguments)
    parsed.out.mkdir(parents=True, exist_ok=True)
    for path in parsed.out.glob("*.whl"):
        path.unlink()
    for command in commands(parsed.arch, parsed.python or PYTHONS, parsed.out):
        subprocess.run(command, check=True)
    wheels = list(parsed.out.glob("*.whl"))
    size = sum(path.stat().st_size for path in wheels)
    lacking = ", ".join(sorted(missing(parsed.out)))
    sys.stdout.write(f"{len(wheels)} wheels, {size / (1 << 20):.1f} MiB, in {parsed.out}\n")
    if lacking:
        sys.stderr.write(f"gpu-wheels: {lacking} is needed by other wheels; add it to bench/gpu_wheels.py\n")
    if size > MOST_BYTES:
        sys.stderr.write(f"gpu-wheels: expected at most {MOST_BYTES >> 20} MiB; see what has grown\n")
    return 1 if lacking or size > MOST_BYTES else 0


if __name__ == "__main__":
    sys.exit(main())
