"""Builds what is released, with zig as the only compiler: `python tools/wheels.py [FOLDER]`, as `make wheels` does.

The folder, dist/ by default, then holds the sdist, the wheels that were built from it, and SHA256SUMS. With the same
tools and minor version of Python, the same sources give the same bytes, on any machine and in any folder.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from importlib.util import find_spec
from pathlib import Path

sys.path.append(str(Path(__file__).parent))  # which PYTHONSAFEPATH leaves out
from check_wheel import GLIBC, KERNELS, refusals, tag_of

ROOT = Path(__file__).resolve().parents[1]


def cmake_definitions(architecture: str) -> dict[str, str]:
    """Return what lets CMake compile for an architecture, and the oldest C library of a wheel, with zig."""
    found = find_spec("ziglang")
    if found is None or found.origin is None:
        sys.exit("zig is missing, which compiles wheels and the kernels for Arm; run pip install --group wheels")
    headers = sysconfig.get_path("include")
    if not Path(headers, "Python.h").exists():
        sys.exit(f"{headers} lacks Python.h; install the headers of this Python (Debian: python3-dev)")
    zig = Path(found.origin).with_name("zig")
    target = f"{architecture}-linux-gnu.{GLIBC[0]}.{GLIBC[1]}"  # without one, for this very CPU
    return {
        "CMAKE_SYSTEM_NAME": "Linux",
        "CMAKE_SYSTEM_PROCESSOR": architecture,
        "CMAKE_C_COMPILER": f"{zig};cc;-target;{target}",
        "CMAKE_TRY_COMPILE_CONFIGURATION": "Release",  # or it compiles its own libraries twice
        "CMAKE_MODULE_LINKER_FLAGS": "-Wl,-s",  # or its debug information comes along, with paths
        "Python_EXECUTABLE": sys.executable,
        "Python_INCLUDE_DIR": headers,  # the stable ABI makes those of this machine do
    }


def run(*command: str | Path, folder: Path) -> None:
    """Run a command of the build; where it fails, end with all that it said."""
    environment = {**os.environ, "LC_ALL": "C"}
    done = subprocess.run(command, cwd=folder, env=environment, check=False, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"{done.stdout}{done.stderr}{' '.join(map(str, command))} ended with {done.returncode}")


def build_sdist(folder: Path) -> Path:
    """Build the sdist of this checkout into `folder`."""
    run(sys.executable, "-c", f"from scikit_build_core import build; build.build_sdist({str(folder)!r})", folder=ROOT)
    (sdist,) = folder.glob("*.tar.gz")
    return sdist


def build_wheel(sdist: Path, architecture: str, folder: Path, **definitions: str) -> Path:
    """Build the wheel of an sdist into `folder`; more definitions for CMake come last."""
    settings = {"wheel.tags": tag_of(architecture), "wheel.reproducible": "true", "install.strip": "false"}
    for name, value in {**cmake_definitions(architecture), **definitions}.items():
        settings[f"cmake.define.{name}"] = value
    options = [f"--config-settings={name}={value}" for name, value in settings.items()]
    offline = ["--no-build-isolation", "--no-deps", "--no-index", "--no-cache-dir"]
    run(sys.executable, "-m", "pip", "wheel", *offline, *options, "--wheel-dir", folder, sdist, folder=folder)
    (wheel,) = folder.glob(f"*{tag_of(architecture)}.whl")
    return wheel


def main() -> None:
    """Build all, and put them where they belong if nothing is wrong with them."""
    target = Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / "dist").resolve()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        sdist = build_sdist(folder)
        wheels = [build_wheel(sdist, architecture, folder) for architecture in KERNELS]
        if found := [f"{wheel.name}: {what}" for wheel in wheels for what in refusals(wheel)]:
            sys.exit("\n".join(found))
        files = sorted([sdist, *wheels])
        sums = "".join(f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.name}\n" for file in files)
        target.mkdir(parents=True, exist_ok=True)
        for old in target.glob("superadam-*"):
            old.unlink()
        for file in files:
            shutil.copyfile(file, target / file.name)
        (target / "SHA256SUMS").write_text(sums)
        sys.stdout.write(sums)


if __name__ == "__main__":
    main()
