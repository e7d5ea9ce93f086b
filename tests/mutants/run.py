"""Mutation tests: plants a sample of mutants, one at a time, and tells which ones no test notices.

    python -m mutants.run [PATH ...]      of the files whose names begin so, default all

In the environment: SAMPLE, how many (20); SEED, which ones (anew each time); WORKERS (CPUs); TESTS, folders or files of
tests in place of those that mirror a file. `mutants.toml` lists mutants that no test can notice.

Each worker has a copy of the package. Tests run in its forks, which have imported torch but not superadam, and stop at
the first failure. A test hangs, which counts as killed, if it takes twice as long as all of them without a fault, and
`SPARE` seconds more: so a machine that others slow down kills nothing.
"""

import collections
import contextlib
import functools
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
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from .c_rules import mutants_of_c
from .mutant import Mutant
from .python_rules import Rules

WITHOUT_EDITABLE = """
import sys
sys.meta_path[:] = [finder for finder in sys.meta_path if "Scikit" not in type(finder).__name__]
"""
"""Lets an editable installation not come before the copy, here and, as `sitecustomize`, in children."""

ELSEWHERE = {"cpu": "kernels", "cpu/signals.c": "host", "cpu/traffic.c": "cli", "gpu": "gpu"}
ELSEWHERE |= {"cpu/samples.c": "state", "cpu/places.c": "state", "superadam/__main__.py": "cli"}
"""Folders of tests for what does not lie in a folder of `superadam`."""

EXTENSIONS = ("superadam._kernels", "superadam.host._signals", "superadam.kernels._places")
"""Modules in C."""

STAGES = ("not slow", "slow")
SPARE = float(os.environ.get("SPARE", "30"))
"""Seconds, as other programs may want the CPUs."""

KINDS = ("killed", "survived", "equivalent", "invalid")  # which a compiler rejects


def sources(root: Path) -> list[str]:
    """Return the files that mutants are made of; not `cdef.h`, which both sides read, so that they would agree."""
    paths = (path for kind in ("superadam/**/*.py", "gpu/*.py", "cpu/**/*.[ch]") for path in root.glob(kind))
    return sorted(path.relative_to(root).as_posix() for path in paths if path.name != "cdef.h")


def mutants_in(file: str, source: bytes) -> list[Mutant]:
    return Rules(file, source).found if file.endswith(".py") else mutants_of_c(file, source)


def equivalents(root: Path) -> dict[tuple[str, str, str, str], str]:
    """Return the reason of each mutant in the list of those that no test can notice."""
    entries = tomllib.loads((root / "tests" / "mutants" / "mutants.toml").read_text())["equivalent"]
    return {(one["file"], one["function"], one["rule"], one["hash"]): one["reason"] for one in entries}


def runs_here(file: str) -> bool:
    """Whether this machine can run the instruction set that a file of C is for."""
    name = Path(file).stem.partition("_")[2]
    if not file.startswith("cpu/isa/") or name in ("dtypes", "float64"):
        return True
    return name in output_of("import superadam; print(*superadam.available_isas())").split()


@functools.cache
def output_of(program: str) -> str:
    return subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout


def mirror_of(root: Path, file: str) -> tuple[str, ...]:
    """Return the files of tests that mirror one: the folder of the same name, or else those that import the module."""
    top, *inner = Path(file).parts
    names = os.environ.get("TESTS", f"tests/{ELSEWHERE.get(file, ELSEWHERE.get(top, inner[0]))}").split()
    paths = [path for name in names for path in sorted((root / name).glob("**/test_*.py")) or [root / name]]
    module = file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    while not paths[0].exists():
        paths = [path for path in sorted(root.glob("tests/**/test_*.py")) if module in path.read_text()] or paths
        module = module.rpartition(".")[0]  # where no test imports the module: those that import from its folder
    return tuple(path.relative_to(root).as_posix() for path in paths)


class FirstFailure:
    """Lets Hypothesis fail at once, of few examples where that is to be quick; notes which tests failed, and when."""

    def __init__(self, note: Path, stage: str) -> None:
        self.note, self.is_quick = note, stage == STAGES[0]

    @pytest.hookimpl(trylast=True)
    def pytest_configure(self) -> None:
        phases = (hypothesis.Phase.explicit, hypothesis.Phase.generate)
        examples = 10 if self.is_quick else hypothesis.settings().max_examples
        hypothesis.settings.register_profile("mutants", hypothesis.settings(), phases=phases, max_examples=examples)
        hypothesis.settings.load_profile("mutants")

    def pytest_runtest_logreport(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        self.note.touch()
        if report.failed:
            with self.note.open("a") as note:
                note.write(report.nodeid + "\n")

    pytest_collectreport = pytest_runtest_logreport


def in_fork(arguments: list[str], stage: str, note: Path) -> None:
    os.setsid()
    os.dup2(os.open(os.devnull, os.O_RDWR), 1)
    os.dup2(1, 2)
    code = pytest.main(["-pno:cacheprovider", "-pno:xdist", f"-m{stage}", *arguments], [FirstFailure(note, stage)])
    os._exit(0 if code == pytest.ExitCode.NO_TESTS_COLLECTED else code)


class Copy:
    """A copy of the package with the kernels that are installed, and of the C sources, elsewhere."""

    def __init__(self, root: Path, folder: Path) -> None:
        self.root, self.folder, self.site, self.note, self._time = root, folder, folder / "site", folder / "failed", 0
        self.libraries: list[Path] = []
        self.built: list[bytes] = []  # of each, without a fault
        self.killers: set[str] = set()  # files of tests that noticed something
        shutil.copytree(root / "superadam", self.site / "superadam", ignore=shutil.ignore_patterns("__pycache__"))
        if (root / "cpu").is_dir():
            for module in EXTENSIONS:
                library = output_of(f"import {module} as extension; print(extension.__file__)").strip()
                self.libraries.append(Path(shutil.copy(library, self.site.joinpath(*module.split(".")[:-1]))))
            shutil.copytree(root / "gpu", self.site / "gpu", ignore=shutil.ignore_patterns("__pycache__"))
            (self.site / "superadam" / "gpu").symlink_to(self.site / "gpu")
            shutil.copytree(root / "cpu", folder / "cpu")
            shutil.copy(root / "CMakeLists.txt", folder)
        (self.site / "sitecustomize.py").write_text(WITHOUT_EDITABLE)
        exec(WITHOUT_EDITABLE, {})
        sys.path.insert(0, str(self.site))
        os.environ["PYTHONPATH"] = str(self.site)
        os.chdir(root)
        import support  # noqa: F401  before Triton is imported, which then interprets its kernels
        import torch._dynamo  # noqa: F401  once for all tests: the first step of an optimizer of torch would import it

    def write(self, file: str, text: bytes) -> None:
        path = self.folder / file if file.startswith("cpu/") else self.site / file
        path.write_bytes(text)
        self._time += 10  # of its own, or the bytecode of another fault of the same size would be taken for it
        os.utime(path, (path.stat().st_atime, path.stat().st_mtime + self._time))

    def compiles(self, file: str) -> bool:
        """Compile a file that was changed and put the libraries in, if the compiler takes it."""
        if file.endswith(".py"):
            with contextlib.suppress(SyntaxError):
                return bool(compile((self.site / file).read_bytes(), file, "exec", dont_inherit=True))
            return False
        cmake, build = [sys.executable, "-m", "cmake"], self.folder / "build"
        quickly = ["-DCMAKE_BUILD_TYPE=Mutants", "-DCMAKE_C_FLAGS=-O1", f"-DPython_EXECUTABLE={sys.executable}"]
        for command in ([*cmake, "-S", self.folder, "-B", build, *quickly], [*cmake, "--build", build, "-j2"]):
            if subprocess.run(command, check=False, capture_output=True).returncode:
                return False
        for path in self.libraries:
            shutil.copy(build / path.name, path)
        return True

    def failing(self, arguments: list[str], stage: str, limit: float = math.inf) -> list[str]:
        """Run tests, each for at most `limit` seconds; return which failed, or what else went wrong."""
        self.note.write_text("")
        process = multiprocessing.get_context("fork").Process(target=in_fork, args=(arguments, stage, self.note))
        process.start()
        while process.is_alive() and time.time() < self.note.stat().st_mtime + limit:  # join() may wait for children
            time.sleep(0.02)
        fault = "a hang" if process.is_alive() else "a crash"
        assert process.pid is not None
        with contextlib.suppress(ProcessLookupError):  # its children, too: a test that failed may leave one that hangs
            os.killpg(process.pid, signal.SIGKILL)
        process.join()
        return self.note.read_text().splitlines() or [fault] * bool(process.exitcode)

    def measure(self, tests: tuple[str, ...]) -> tuple[list[float], list[str]]:
        """Run tests without a fault; return the seconds of each stage, and which fail."""
        seconds, failing = list[float](), list[str]()
        for stage in STAGES:
            begin = time.monotonic()
            failing += self.failing([*tests], stage)
            seconds.append(time.monotonic() - begin)
        assert "a crash" not in failing, f"the tests in {Path(tests[0]).parent} crash without a fault"
        return seconds, failing

    def judge(self, mutant: Mutant, tests: tuple[str, ...], usual: list[float], left_out: list[str]) -> tuple[str, str]:
        """Return the kind of a mutant, and what says so, by tests that take so many seconds in each stage."""
        is_c = mutant.file.startswith("cpu/")
        if is_c and not self.built:
            assert self.compiles(mutant.file), "the compiler rejects the sources"
            self.built = [path.read_bytes() for path in self.libraries]
        try:
            self.write(mutant.file, mutant.text)
            if not self.compiles(mutant.file):
                return "invalid", "a compiler rejects it"
            if is_c and self.built == [path.read_bytes() for path in self.libraries]:
                return "equivalent", "the machine code is the same"
            first = sorted(tests, key=lambda name: (name not in self.killers, Path(mutant.file).stem not in name))
            arguments = ["-x", *first, *(f"--deselect={test}" for test in left_out)]
            for stage, seconds in zip(STAGES, usual, strict=True):
                if killers := self.failing(arguments, stage, 2 * seconds + SPARE):
                    self.killers.add(killers[0].split("::")[0])
                    return "killed", killers[0]
            return "survived", f"no test of {Path(tests[0]).parent}"
        finally:
            self.write(mutant.file, mutant.source)
            for path, code in zip(self.libraries, self.built, strict=False):
                path.write_bytes(code)


COPIES: list[Copy] = []
"""That of this process, if it is a worker."""


def begin(root: Path, folder: Path) -> None:
    COPIES.append(Copy(root, Path(tempfile.mkdtemp(dir=folder))))


def in_copy(method: str, *arguments: Any) -> Any:
    return getattr(COPIES[0], method)(*arguments)


def say(*lines: str) -> None:
    sys.stdout.writelines(line + "\n" for line in lines)
    sys.stdout.flush()


def say_totals(title: str, kinds: list[tuple[str, str]]) -> None:
    """Print how many of each kind there are of each rule, or in each folder."""
    counts = collections.Counter([*kinds, *(("all", kind) for _, kind in kinds)])
    say("", f"{title:32}" + "".join(f"{kind:>12}" for kind in KINDS))
    for row in (*sorted({row for row, _ in kinds}), "all"):
        say(f"{row:32}" + "".join(f"{counts[row, kind]:12}" for kind in KINDS))


def main(root: Path, beginnings: list[str]) -> int:
    files = [file for file in sources(root) if file.startswith(tuple(beginnings or [""])) and runs_here(file)]
    mutants = [mutant for file in files for mutant in mutants_in(file, (root / file).read_bytes())]
    seed, known = int(os.environ.get("SEED") or random.randrange(10**6)), equivalents(root)
    sample = random.Random(seed).sample(mutants, min(int(os.environ.get("SAMPLE") or 20), len(mutants)))
    say(f"{len(sample)} of {len(mutants)} mutants, SEED={seed}")
    kinds = {mutant: "equivalent" for mutant in sample if mutant.key in known}
    tests = {mutant: mirror_of(root, mutant.file) for mutant in sample if mutant not in kinds}
    workers = min(int(os.environ.get("WORKERS") or os.cpu_count() or 1), len(tests) or 1)
    with (
        tempfile.TemporaryDirectory(prefix="superadam-mutants-") as temporary,
        ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), begin, (root, Path(temporary))) as pool,
    ):
        usual = {one: pool.submit(in_copy, "measure", one) for one in sorted(set(tests.values()))}
        for one, future in usual.items():
            seconds, failing = future.result()
            say(f"{Path(one[0]).parent}: {seconds[0]:.0f} s, and {seconds[1]:.0f} s of slow tests")
            say(*(f"left out, as it fails without a fault: {test}" for test in failing))
        judged = {
            pool.submit(in_copy, "judge", mutant, one, *usual[one].result()): mutant for mutant, one in tests.items()
        }
        for future in as_completed(judged):
            mutant = judged[future]
            kinds[mutant], by = future.result()
            say(f"{kinds[mutant]:10} {mutant.rule:18} {mutant.place}: {by}")
    for mutant in sorted(mutant for mutant, kind in kinds.items() if kind == "survived"):
        names = zip(("file", "function", "rule", "hash"), mutant.key, strict=True)
        say("", mutant.diff() + "{ " + ", ".join(f'{name} = "{value}"' for name, value in names) + ', reason = "" },')
    say_totals("rule", [(mutant.rule, kind) for mutant, kind in kinds.items()])
    say_totals("folder", [(str(Path(mutant.file).parent), kind) for mutant, kind in kinds.items()])
    return int("survived" in kinds.values())


if __name__ == "__main__":
    sys.exit(main(Path.cwd(), sys.argv[1:]))
