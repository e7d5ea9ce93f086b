"""The build: only kernels get vector flags, and both a build without them and a CPU without AVX2 work, and say so."""

import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from arm import emulation

import superadam
from superadam import _kernels

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
IS_X86 = platform.machine() == "x86_64"
BEYOND_BASELINE = r"%[yz]mm|\tv[a-z]" if IS_X86 else r"\b[zp]\d+\.[bhsdq]\b"
"""What the disassembly of instructions looks like that not every CPU of this architecture has."""

UNWANTED = {f"-f{name}": f"-fno-{name}" for name in ("fast-math", "unsafe-math-optimizations", "finite-math-only")}
UNWANTED |= {"-ffp-contract=fast": "-ffp-contract=off"}
"""Options of users, and what has to come after them."""


def cmake(*arguments: str | Path, status: int = 0, **environment: str) -> str:
    """Return what CMake says of errors, on one line."""
    command = [sys.executable, "-m", "cmake", *arguments]
    done = subprocess.run(command, env=os.environ | environment, check=False, capture_output=True, text=True)
    assert done.returncode == status, done.stdout + done.stderr
    return " ".join(done.stderr.split())


def configure(build: Path, *options: str, **how: Any) -> str:
    return cmake("-S", ROOT, "-B", build, f"-DPython_EXECUTABLE={sys.executable}", *options, **how)


@pytest.fixture(scope="module")
def scalar_kernels(tmp_path_factory):
    """Return the module built without any vector kernels, and with little optimization, which takes less time.

    What is tested depends on the flags for instruction sets, which are those of every build.
    """
    build = tmp_path_factory.mktemp("scalar")
    configure(build, "-DSUPERADAM_SIMD=OFF", "-DCMAKE_BUILD_TYPE=Quick", "-DCMAKE_C_FLAGS=-O1")
    cmake("--build", build)
    (module,) = build.glob("_kernels*.so")
    return module


def run_elsewhere(kernels: Path, command: Sequence[str] = (), **environment: str) -> Any:
    """Return what the program reports, or else what it says of its failure."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("SUPERADAM_")}
    clean["OPENBLAS_CORETYPE"] = "Nehalem"  # numpy's own choice may not run in an emulator
    words = [*command, sys.executable, ROOT / "tests/support/kernels_elsewhere.py", kernels, *superadam.__path__]
    done = subprocess.run(words, env=clean | environment, check=False, capture_output=True, text=True)
    return done.stderr if done.returncode == 1 else json.loads(done.stdout)


def check_is_scalar_and_says_so(report: Mapping[str, Any], status: str) -> None:
    vector_isas = [name for name in report["known"] if name != "scalar"]
    assert vector_isas
    assert [report["known"][name] for name in vector_isas] == [status] * len(vector_isas)
    assert (report["available"], report["active"]) == (["scalar"], "scalar")
    (warning,) = report["warnings"]
    assert "scalar kernels" in warning
    assert all(f"{name} is {status}" in warning for name in vector_isas)


def test_a_build_without_vector_kernels_works_and_says_so(scalar_kernels):
    check_is_scalar_and_says_so(run_elsewhere(scalar_kernels), "not compiled")


def test_what_runs_before_dispatch_uses_baseline_instructions(scalar_kernels):
    """Everything but the vector kernels; that the files get the same flags in a full build is the next test."""
    done = subprocess.run(["objdump", "-d", scalar_kernels], check=True, capture_output=True, text=True)
    assert "<superadam_run>:" in done.stdout
    assert "<superadam_kernel_scalar>:" in done.stdout
    assert [line for line in done.stdout.splitlines() if re.search(BEYOND_BASELINE, line)] == []


def test_only_vector_kernels_get_vector_flags(tmp_path):
    configure(tmp_path, "-DCMAKE_EXPORT_COMPILE_COMMANDS=ON", CFLAGS=" ".join(UNWANTED))
    for command in json.loads((tmp_path / "compile_commands.json").read_text()):
        path = Path(command["file"])
        flags = [flag for flag in command["command"].split() if flag.startswith("-m")]
        baseline = path.parent.name != "isa" or path.stem in ("kernels_scalar", "kernels_float64")
        assert not (baseline and flags), path
        assert baseline or flags, path
        for given, wanted in UNWANTED.items():
            assert command["command"].rindex(wanted) > command["command"].rindex(given), path


def test_without_a_compiler_the_build_says_so_in_one_sentence(tmp_path):
    said = configure(tmp_path, "-DCMAKE_MAKE_PROGRAM=/bin/true", status=1, PATH=str(tmp_path), CC="")
    assert "superadam is compiled here and found no C compiler; install gcc or clang, or install a wheel." in said


def test_a_compiler_that_lacks_a_vector_instruction_set_is_refused(tmp_path):
    old = tmp_path / "old"
    old.write_text('#!/bin/sh\ncase "$*" in *-mavx512bw*|*+sve*) exit 1; esac\nexec cc "$@"\n')
    old.chmod(0o755)
    said = configure(tmp_path / "build", f"-DCMAKE_C_COMPILER={old}", status=1)
    assert f"superadam's {'avx512' if IS_X86 else 'sve'} kernels need a compiler that takes" in said
    assert "SUPERADAM_SIMD=OFF" in said


def emulate(cpu: str) -> list[str]:
    """Return the command of the emulator, which is installed where root may; else skip."""
    if missing := emulation.missing_tools():
        pytest.skip(missing)
    return ["qemu-x86_64-static", "-cpu", cpu]


INSTALLED = Path(_kernels.__file__)

if IS_X86:

    def test_a_cpu_without_avx2_works_and_says_so():
        check_is_scalar_and_says_so(run_elsewhere(INSTALLED, emulate("Nehalem")), "not supported")

    def test_a_cpu_without_avx2_refuses_it():
        said = run_elsewhere(INSTALLED, emulate("Nehalem"), SUPERADAM_ISA="avx2")
        assert "SUPERADAM_ISA 'avx2' is not supported; available here: scalar" in said

    def test_a_cpu_without_avx512_uses_avx2():
        report = run_elsewhere(INSTALLED, emulate("Haswell"))
        assert (report["available"], report["active"]) == (["avx2", "scalar"], "avx2")
        assert report["warnings"] == []
