"""The kernels of another architecture, run on this machine: compiled by zig, as those of the wheel, and emulated.

Owns the tools it needs, the build in `build/arm/cross`, and the file of jobs that `runner.c` reads. It compares
nothing: tests do that.
"""

import enum
import io
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import capstone
import filelock
import numpy as np
import numpy.typing as npt
from elftools.elf.constants import SH_FLAGS
from elftools.elf.elffile import ELFFile
from support.kernel_arrays import Array, Job, coefficient_table
from wheels import cmake_definitions

from superadam.kernels import native

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build" / "arm" / "cross"
PACKAGES = ("qemu-user-static", "libc6-arm64-cross")
EMULATOR = "qemu-aarch64-static"
LIBRARIES = Path("/usr/aarch64-linux-gnu")
"""Where the second package has the C library for Arm."""
ARRAYS = tuple(native.SEGMENT.names or ())[:12]
"""Fields of a segment that are arrays, in the order in which they stand in a file of jobs."""
LIST = tuple(native.UNCERTAIN.names or ())[2:]
"""Fields of a list of uncertain elements that are arrays, in the order in which results have them."""


class Cpu(enum.Enum):
    """Emulated CPUs, as the emulator's `-cpu` takes them. SVE vector lengths are in bytes there, in bits here."""

    CORTEX_A72 = "cortex-a72"
    NEON = "max,sve=off"
    SVE_128 = "max,sve-default-vector-length=16"
    SVE_256 = "max,sve-default-vector-length=32"
    SVE_384 = "max,sve384=on,sve-default-vector-length=48"
    SVE_512 = "max,sve-default-vector-length=64"
    SVE_2048 = "max,sve-default-vector-length=256"
    SVE_512_WITHOUT_BF16 = "a64fx"


@dataclass(frozen=True)
class EmulatedJob:
    """A job, with the arrays that it begins with, and how `runner.c` is to run it."""

    job: Job
    threads: int = 1  # at most
    stream: bool = False  # whether kernels store past the caches, which `superadam_run` does from 4 Mi elements on
    at_end: bool = False  # whether the inaccessible page follows each array; else it precedes it
    fpcr: int = 0  # the floating-point control register of the caller


def write_jobs(path: Path, jobs: Sequence[EmulatedJob]) -> None:
    with path.open("wb") as file:
        file.write(np.int64(len(jobs)).tobytes())
        for emulated in jobs:
            job = emulated.job
            counts = [len(job.sets), len(job.segments)]
            header = [job.which, emulated.threads, emulated.stream, emulated.at_end, emulated.fpcr, *counts]
            file.write(np.array(header, np.int64).tobytes())
            file.write(coefficient_table(job.sets).tobytes())
            file.write(job.table().tobytes())
            for segment in job.segments:
                for name in ARRAYS:
                    if name in segment.arrays:
                        array = segment.arrays[name].view
                        file.write(np.int64(array.nbytes).tobytes() + array.tobytes())


def read_results(path: Path, jobs: Sequence[EmulatedJob]) -> list[list[dict[str, Array]]]:
    """Return the arrays of each segment of each job after the run, and those of its list with `listed ` before them."""
    file = io.BytesIO(path.read_bytes())

    def take(count: int, dtype: npt.DTypeLike) -> Array:
        return np.frombuffer(file.read(count * np.dtype(dtype).itemsize), dtype)

    results = []
    for emulated in jobs:
        (code,) = take(1, np.int64)
        assert code == native.lib.SUPERADAM_OK, f"superadam_run returned {code}"
        results.append([])
        for segment in emulated.job.segments:
            kept = {name: segment.arrays[name].view for name in ARRAYS if name in segment.arrays}
            arrays = {name: take(len(array), array.dtype) for name, array in kept.items()}
            if segment.uncertain:
                kinds = {"index": np.uint32, "gradient": kept["gradient"].dtype}
                (count,) = take(1, np.int64)
                for name in LIST:
                    arrays[f"listed {name}"] = take(segment.length, kinds.get(name, np.float32))[:count]
            results[-1].append(arrays)
    assert not file.read()
    return results


def missing_tools() -> str | None:
    """Return what this machine lacks to emulate, in one sentence, after trying to install it when root.

    One process at a time installs; the others wait for it.
    """
    BUILD.mkdir(parents=True, exist_ok=True)
    with filelock.FileLock(BUILD / "lock"):
        if not _has_tools() and os.geteuid() == 0 and shutil.which("apt-get"):
            environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
            install = ["apt-get", "install", "-y", "-qq", "--no-install-recommends", *PACKAGES]
            for command in (["apt-get", "update", "-qq"], install):
                subprocess.run(command, check=False, env=environment, capture_output=True)
    if _has_tools():
        return None
    return f"other CPUs need {EMULATOR} and {LIBRARIES}; install the packages {' and '.join(PACKAGES)}"


def _has_tools() -> bool:
    return shutil.which(EMULATOR) is not None and LIBRARIES.exists()


def build() -> Path:
    """Compile this checkout for 64-bit Arm, one process at a time, and return the path of the runner."""
    definitions = cmake_definitions("aarch64")
    cache, zig = BUILD / "CMakeCache.txt", definitions["CMAKE_C_COMPILER"].split(";")[0]
    options = [f"-D{name}={value}" for name, value in definitions.items()]
    BUILD.mkdir(parents=True, exist_ok=True)
    with filelock.FileLock(BUILD / "lock"):
        # At another compiler, that of another environment, CMake would forget all other definitions.
        fresh = ["--fresh"] if cache.exists() and zig not in cache.read_text() else []
        _cmake(*fresh, "-S", ROOT, "-B", BUILD, "-G", "Ninja", *options)
        _cmake("--build", BUILD, "--target", "runner", "--parallel", str(len(os.sched_getaffinity(0))))
    return BUILD / "runner"


def disassemble(path: Path) -> Iterator[str]:
    disassembler = capstone.Cs(capstone.CS_ARCH_ARM64, capstone.CS_MODE_ARM)
    disassembler.skipdata = True
    with path.open("rb") as file:
        for section in ELFFile(file).iter_sections():
            if section["sh_flags"] & SH_FLAGS.SHF_EXECINSTR:
                for _, _, name, operands in disassembler.disasm_lite(section.data(), 0):
                    yield f"{name} {operands}"


def _cmake(*arguments: str | Path) -> None:
    command = [sys.executable, "-m", "cmake", *map(str, arguments)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode != 0:
        output = done.stdout[-3000:] + done.stderr[-3000:]
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}: {output}")


def emulate(cpu: Cpu, *command: str | Path) -> subprocess.CompletedProcess[str]:
    line = ["prlimit", "--core=0", EMULATOR, "-L", str(LIBRARIES), "-cpu", cpu.value, *map(str, command)]
    return subprocess.run(line, check=False, capture_output=True, text=True)


def known_isas(cpu: Cpu) -> dict[str, str]:
    """Return what `superadam.kernels.native.known_isas` would on `cpu`."""
    words = ("runnable", "not compiled", "not supported")
    done = emulate(cpu, BUILD / "runner")
    assert done.returncode == 0, done.stderr
    return {name: words[int(status)] for name, status in (line.split() for line in done.stdout.splitlines())}


def run_jobs(cpu: Cpu, isa: str, path: Path, jobs: Sequence[EmulatedJob]) -> list[list[dict[str, Array]]]:
    """Run a file of jobs with instruction set `isa` on `cpu`; return what `read_results` does."""
    results = path.with_suffix(f".{cpu.name}-{isa}")
    done = emulate(cpu, BUILD / "runner", isa, path, results)
    assert done.returncode == 0, f"the runner ended with {done.returncode}: {done.stderr}"
    return read_results(results, jobs)
