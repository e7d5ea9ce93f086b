"""Cross-builds the aarch64 wheel and checks that its name tells the truth: `python tests/arm/cross_wheel.py FOLDER`.

The wheel and, unpacked in FOLDER/package, what an aarch64 Python imports. Releases are built by cibuildwheel, in older
containers; this wheel needs the C library that the cross compiler links against, and says so in its tag.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

GLIBC = (2, 34)
"""Of the tag: the C library into which the thread functions moved; linked against a newer one, these ask for 2.34."""

# What PEP 600 lets a manylinux wheel expect of the system, as far as plain C needs it.
SYSTEM_LIBRARIES = {"libc.so.6", "libm.so.6", "libpthread.so.0", "ld-linux-aarch64.so.1"}


def build(folder: Path) -> Path:
    """Build the wheel of this checkout into `folder` and return its path."""
    shutil.rmtree(folder / "wheel", ignore_errors=True)
    settings = {
        "build-dir": folder / "wheel-build",
        "cmake.define.CMAKE_TOOLCHAIN_FILE": ROOT / "cmake" / "aarch64.cmake",
        "cmake.define.Python_INCLUDE_DIR": sysconfig.get_path("include"),
        # Through the backend, not the environment: pip would take its own build tools for aarch64.
        "env._PYTHON_HOST_PLATFORM": f"manylinux_{GLIBC[0]}_{GLIBC[1]}-aarch64",
    }
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "-w", folder / "wheel", ROOT]
    for name, value in settings.items():
        command += ["-C", f"{name}={value}"]
    subprocess.run(command, check=True)
    (wheel,) = (folder / "wheel").glob("*.whl")
    return wheel


def readelf(option: str, library: Path) -> str:
    """Return what readelf says of `library`."""
    command = ["aarch64-linux-gnu-readelf", "--wide", option, library]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def check(wheel: Path, library: Path) -> None:
    """Raise AssertionError unless `library` is what the name of `wheel` promises."""
    assert wheel.name.endswith(f"-cp311-abi3-manylinux_{GLIBC[0]}_{GLIBC[1]}_aarch64.whl"), wheel.name
    assert library.name == "_kernels.abi3.so"
    header = readelf("--file-header", library)
    assert re.search(r"Class:\s+ELF64", header)
    assert re.search(r"Machine:\s+AArch64", header)
    assert re.search(r"Type:\s+DYN", header)
    needed = set(re.findall(r"\(NEEDED\).*\[(.+)\]", readelf("--dynamic", library)))
    assert needed <= SYSTEM_LIBRARIES, f"needs {needed - SYSTEM_LIBRARIES}"
    symbols = readelf("--dyn-syms", library)
    newest = max((int(a), int(b)) for a, b in re.findall(r"GLIBC_(\d+)\.(\d+)", symbols))
    assert newest <= GLIBC, f"needs glibc {newest}; set GLIBC in {__file__}"
    exported = re.findall(r"GLOBAL\s+DEFAULT\s+\d+\s+(\w+)$", symbols, re.MULTILINE)
    assert exported == ["PyInit__kernels"], f"exports {exported}"


def main() -> None:
    """Build, check, unpack."""
    folder = Path(sys.argv[1]).resolve()
    wheel = build(folder)
    package = folder / "package"
    shutil.rmtree(package, ignore_errors=True)
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(package)
    (library,) = package.rglob("*.so")
    check(wheel, library)
    sys.stdout.write(f"{wheel}\n")


if __name__ == "__main__":
    main()
