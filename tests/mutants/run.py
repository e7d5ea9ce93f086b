"""Mutation tests: plants one fault after another in a copy of the package, and tells which ones no test notices.

    run.py [PATH ...]      faults of the files whose names begin so, default all; SAMPLE=N in the environment: N of them

`mutants.toml` lists the faults. The tests of each run in a fork of this process, which has imported torch but not
superadam, and stop at the first failure.
"""

from __future__ import annotations

import collections
import contextlib
import math
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch._dynamo  # noqa: F401  once for all tests: the first step of an optimizer of torch would import it

ROOT = Path(__file__).resolve().parents[2]
LIST = tomllib.loads(Path(__file__).with_name("mutants.toml").read_text())

WITHOUT_EDITABLE = """
import sys
sys.meta_path[:] = [finder for finder in sys.meta_path if "Scikit" not in type(finder).__name__]
"""
"""Lets an editable installation not come before the copy, here and, as `sitecustomize`, in children."""

PYTHON_PATH = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]["pythonpath"]


class FirstFailure:
    """Lets Hypothesis fail at once, of few examples where that is to be quick, and notes which test failed."""

    def __init__(self, note: Path, is_quick: bool) -> None:
        self.note, self.is_quick = note, is_quick

    @pytest.hookimpl(trylast=True)
    def pytest_configure(self) -> None:
        phases = (hypothesis.Phase.explicit, hypothesis.Phase.generate)
        examples = 10 if self.is_quick else hypothesis.settings().max_examples
        hypothesis.settings.register_profile("mutants", hypothesis.settings(), phases=phases, max_examples=examples)
        hypothesis.settings.load_profile("mutants")

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self.pytest_runtest_logreport(report)

    def pytest_runtest_logreport(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        if report.failed and not self.note.exists():
            self.note.write_text(report.nodeid)


def in_fork(tests: list[str], note: Path, is_quick: bool) -> None:
    os.setsid()
    os.dup2(os.open(os.devnull, os.O_RDWR), 1)
    os.dup2(1, 2)
    folders = " ".join(f"{sys.path[0]}/bench" if folder == "bench" else folder for folder in PYTHON_PATH)
    options = ["-xq", "-pno:cacheprovider", "-pno:xdist", "--timeout=60", "--timeout-method=thread"]
    options.append(f"-opythonpath={folders}")
    code = pytest.main([*options, *(["-mnot slow"] if is_quick else []), *tests], [FirstFailure(note, is_quick)])
    os._exit(0 if is_quick and code == pytest.ExitCode.NO_TESTS_COLLECTED else code)


def passes(tests: list[str], note: Path, limit: float | None = None, *, is_quick: bool = False) -> bool:
    """Whether all of these tests pass, or all quick ones; those of a file that failed come first the next time."""
    note.unlink(missing_ok=True)
    process = multiprocessing.get_context("fork").Process(target=in_fork, args=(tests, note, is_quick))
    process.start()
    end = math.inf if limit is None else time.monotonic() + limit
    while process.is_alive() and time.monotonic() < end:  # join() would also wait for its children that hang
        time.sleep(0.05)
    assert process.pid is not None
    with contextlib.suppress(ProcessLookupError):  # its children, too: a test that failed may leave one that hangs
        os.killpg(process.pid, signal.SIGKILL)
    process.join()
    if note.exists():
        tests.sort(key=lambda test: not note.read_text().startswith(test))
    return process.exitcode == 0


class Copy:
    """A copy of the package with the kernels that are installed, of the benchmarks and of the C sources, elsewhere."""

    def __init__(self, folder: Path) -> None:
        where = "import superadam._kernels as a, superadam.host._signals as b; print(a.__file__, b.__file__)"
        found = subprocess.run([sys.executable, "-c", where], check=True, capture_output=True, text=True).stdout
        kernels, signals = found.split()
        self.folder, self.site, self.note, self._time = folder, folder / "site", folder / "failed", 0
        self.sound: set[str] = set()  # tests that pass without a fault
        for source, target in (("superadam", "superadam"), ("gpu", "superadam/gpu"), ("bench", "bench")):
            shutil.copytree(ROOT / source, self.site / target, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(kernels, self.site / "superadam")
        shutil.copy(signals, self.site / "superadam" / "host")
        (self.site / "sitecustomize.py").write_text(WITHOUT_EDITABLE)
        exec(WITHOUT_EDITABLE, {})
        sys.path.insert(0, str(self.site))
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [sys.path[0], os.environ.get("PYTHONPATH")]))
        shutil.copytree(ROOT / "cpu", folder / "cpu")
        shutil.copy(ROOT / "CMakeLists.txt", folder)

    def write(self, name: str, text: str) -> bool:
        """Put a file in; return whether it compiles."""
        is_c = name.startswith("cpu/")
        path = self.folder / name if is_c else self.site / ("superadam" if name.startswith("gpu/") else ".") / name
        path.write_text(text)
        self._time += 10  # of its own, or the bytecode of another fault of the same size would be taken for it
        os.utime(path, (path.stat().st_atime, path.stat().st_mtime + self._time))
        if not is_c:
            return True
        cmake, build = [sys.executable, "-m", "cmake"], self.folder / "build"
        quickly = ["-DCMAKE_BUILD_TYPE=Mutants", "-DCMAKE_C_FLAGS=-O1", f"-DPython_EXECUTABLE={sys.executable}"]
        for command in ([*cmake, "-S", self.folder, "-B", build, *quickly], [*cmake, "--build", build, "-j2"]):
            if subprocess.run(command, check=False, capture_output=True).returncode:
                return False
        for library, target in (("_kernels", "superadam"), ("_signals", "superadam/host")):
            shutil.copy(build / f"{library}.abi3.so", self.site / target)
        return True

    def is_noticed(self, fault: dict[str, Any]) -> bool:
        """Whether a test fails with a fault that passes without it."""
        name, mirror = fault["file"], LIST["tests"][fault["file"]]
        source = (ROOT / name).read_text()
        tests = [*fault["tests"], *(one for one in mirror if one not in fault["tests"])] if "tests" in fault else mirror
        fresh = [test for test in tests if test not in self.sound]
        assert not fresh or passes(fresh, self.note), f"{self.note.read_text()} fails without a fault"
        self.sound.update(tests)
        try:
            assert self.write(name, source.replace(fault["old"], fault["new"])), f"{fault} does not compile"
            return not (passes(tests, self.note, 400, is_quick=True) and passes(tests, self.note, 400))
        finally:
            assert self.write(name, source), "the unchanged sources do not compile"


def main(paths: list[str]) -> int:
    chosen = [one for one in LIST["faults"] if "equivalent" not in one and one["file"].startswith(tuple(paths or [""]))]
    sample = int(os.environ.get("SAMPLE", len(chosen)))
    if sample < len(chosen):
        chosen = random.sample(chosen, sample)
    counts: dict[tuple[str, str], int] = collections.Counter()
    with tempfile.TemporaryDirectory(prefix="superadam-mutants-") as temporary:
        copy = Copy(Path(temporary))
        for fault in chosen:
            is_noticed = copy.is_noticed(fault)
            verdict = "killed" if is_noticed else "survived"
            by = copy.note.read_text() if copy.note.exists() else "no test" if not is_noticed else "its end"
            counts[str(Path(fault["file"]).parent), verdict] += 1
            sys.stdout.write(f"{verdict} by {by}: {fault['file']}: {fault['old']!r} -> {fault['new']!r}" + "\n")
            sys.stdout.flush()
    for (folder, verdict), count in sorted(counts.items()):
        sys.stdout.write(f"{folder}: {count} {verdict}" + "\n")
    return int(any(verdict == "survived" for _, verdict in counts))


if __name__ == "__main__":
    os.chdir(ROOT)
    sys.exit(main(sys.argv[1:]))
