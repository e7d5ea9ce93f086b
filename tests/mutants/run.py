"""Mutation tests: changes the installed package, one place at a time in a copy of it, and tells which no test notices.

    run.py [FILE ...]      the files that mutants.toml names, or these of them; SAMPLE=N in the environment: N of each

Python files are mutated by cosmic-ray's operators and two of ours, C files by the list in mutants.toml. Tests of one
mutant run in a fork of this process, which has imported torch but not superadam, and stop at the first failure.
"""

from __future__ import annotations

import ast
import contextlib
import difflib
import importlib.util
import itertools
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch  # noqa: F401  once for all tests
from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.operators.provider import OperatorProvider
from parso.python.tree import Keyword

ROOT = Path(__file__).resolve().parents[2]
LIST = tomllib.loads(Path(__file__).with_name("mutants.toml").read_text())
SAMPLE = int(os.environ.get("SAMPLE", "1000000"))


class DeleteStatement:
    """Leaves out a statement of a function that is there for its effect."""

    def mutation_positions(self, node: Any) -> Iterator[tuple[Any, Any]]:
        if node.type == "simple_stmt" and node.search_ancestor("funcdef"):
            first = node.children[0]
            parts = getattr(first, "children", [first, first])
            is_local = parts[0].type == "name" and parts[1].get_code().strip() == "="
            if not is_local and first.type not in ("string", "assert_stmt", "import_name", "import_from"):
                yield node.start_pos, node.end_pos

    def mutate(self, node: Any, index: int) -> Any:
        node.children[0] = Keyword("pass", node.start_pos, node.get_first_leaf().prefix)
        return node


class DropMethodCall:
    """Takes an object for the result of its method."""

    def mutation_positions(self, node: Any) -> Iterator[tuple[Any, Any]]:
        is_value = node.type in ("atom_expr", "power") and node.parent.type != "simple_stmt" and len(node.children) > 2
        if is_value and [child.get_first_leaf().value for child in node.children[-2:]] == [".", "("]:
            yield node.start_pos, node.end_pos

    def mutate(self, node: Any, index: int) -> Any:
        del node.children[-2:]
        return node


OPERATORS = [*(OperatorProvider()[name]() for name in LIST["operators"]), DeleteStatement(), DropMethodCall()]


def meaning(source: str) -> str:
    """Return a module without annotations, which nothing reads."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        for name in {"annotation", "returns"} & set(node._fields):
            setattr(node, name, None)
    return ast.dump(tree)


def mutants_of(name: str, source: str) -> Iterator[str]:
    """Return a file's mutants, in an order that is the same every time."""
    if name in LIST["c"]:
        for old, new in random.Random(0).sample(LIST["c"][name], len(LIST["c"][name])):
            assert source.count(old) == 1, f"{name} has {old!r} {source.count(old)} times, expected once"
            yield source.replace(old, new)
        return
    nodes = list(ast_nodes(get_ast(source)))
    places = [(one, n) for one in OPERATORS for n in range(sum(len([*one.mutation_positions(k)]) for k in nodes))]
    known = {meaning(source)}
    for operator, occurrence in random.Random(0).sample(places, len(places)):
        mutated = mutate_code(source, operator, occurrence)
        with contextlib.suppress(SyntaxError):
            what = meaning(mutated)
            if what not in known:
                known.add(what)
                yield mutated


class FirstFailure:
    """Lets Hypothesis fail at once, and notes which test failed."""

    def __init__(self, note: Path) -> None:
        self.note = note

    @pytest.hookimpl(trylast=True)
    def pytest_configure(self) -> None:
        phases = (hypothesis.Phase.explicit, hypothesis.Phase.generate)
        hypothesis.settings.register_profile("mutants", hypothesis.settings(), phases=phases)
        hypothesis.settings.load_profile("mutants")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and not self.note.exists():
            self.note.write_text(report.nodeid)


def in_fork(tests: list[str], note: Path) -> None:
    os.setsid()
    os.dup2(os.open(os.devnull, os.O_RDWR), 1)
    os.dup2(1, 2)
    options = ["-xq", "-pno:cacheprovider", "-pno:xdist", "--timeout=60", "--timeout-method=thread"]
    os._exit(pytest.main([*options, *tests], [FirstFailure(note)]))


def passes(tests: list[str], note: Path, limit: float | None = None) -> bool:
    """Whether all of these tests pass; those of a file that failed come first the next time."""
    note.unlink(missing_ok=True)
    process = multiprocessing.get_context("fork").Process(target=in_fork, args=(tests, note))
    process.start()
    process.join(limit)
    assert process.pid is not None
    with contextlib.suppress(ProcessLookupError):  # its children, too: a test that failed may leave one that hangs
        os.killpg(process.pid, signal.SIGKILL)
    process.join()
    if note.exists():
        tests.sort(key=lambda test: not note.read_text().startswith(test))
    return process.exitcode == 0


class Copy:
    """A copy of the installed package, and of the C sources, in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        spec = importlib.util.find_spec("superadam")
        assert spec is not None, "superadam is not installed"
        self.folder, self.site, self.note, self._time = folder, folder / "site", folder / "failed", 0
        self.sound: set[str] = set()  # tests that pass without a mutant
        (installed,) = spec.submodule_search_locations or ()
        shutil.copytree(installed, self.site / "superadam", ignore=shutil.ignore_patterns("__pycache__"))
        sys.path.insert(0, str(self.site))
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [sys.path[0], os.environ.get("PYTHONPATH")]))
        shutil.copytree(ROOT / "cpu", folder / "cpu")
        shutil.copy(ROOT / "CMakeLists.txt", folder)

    def write(self, name: str, text: str) -> bool:
        """Put a file in; return whether it compiles."""
        path = (self.folder if name in LIST["c"] else self.site) / name
        path.write_text(text)
        self._time += 10  # of its own, or the bytecode of another mutant of the same size would be taken for it
        os.utime(path, (path.stat().st_atime, path.stat().st_mtime + self._time))
        if name not in LIST["c"]:
            return True
        cmake, build = [sys.executable, "-m", "cmake"], self.folder / "build"
        quickly = ["-DCMAKE_BUILD_TYPE=Mutants", "-DCMAKE_C_FLAGS=-O1", f"-DPython_EXECUTABLE={sys.executable}"]
        for command in ([*cmake, "-S", self.folder, "-B", build, *quickly], [*cmake, "--build", build, "-j2"]):
            if subprocess.run(command, check=False, capture_output=True).returncode:
                return False
        shutil.copy(build / "_kernels.abi3.so", self.site / "superadam")
        return True

    def run(self, name: str) -> int:
        """Run a file's mutants; return how many survived."""
        source = (ROOT / name if name in LIST["c"] else self.site / name).read_text()
        tests = [*LIST["tests"].get(name, LIST["c_tests"])]
        assert self.write(name, source), "the unchanged sources do not compile"
        fresh = [test for test in tests if test not in self.sound]
        assert not fresh or passes(fresh, self.note), f"{self.note.read_text()} fails with the unchanged package"
        self.sound.update(tests)
        made = survived = excluded = 0
        for mutant in itertools.islice(mutants_of(name, source), SAMPLE):
            made += 1
            lines = difflib.unified_diff(source.splitlines(), mutant.splitlines(), n=0, lineterm="")
            text = " ".join(f"{line[0]} {line[1:].strip()}" for line in lines if line[:2] not in ("--", "++", "@@"))
            if any(name.startswith(where) and part in text for where, part, _ in LIST["excluded"]):
                excluded += 1
            elif not self.write(name, mutant) or passes(tests, self.note, limit=400):
                survived += 1
                sys.stdout.write(f"{name} survived, or does not compile: {text}\n")
            else:
                sys.stderr.write(f"killed: {text}\n  by {self.note.read_text() if self.note.exists() else 'its end'}\n")
        self.write(name, source)
        killed = made - excluded - survived
        sys.stdout.write(f"{name}: {made} made, {killed} killed, {survived} survived, {excluded} excluded\n")
        sys.stdout.flush()
        return survived


if __name__ == "__main__":
    os.chdir(ROOT)
    with tempfile.TemporaryDirectory(prefix="superadam-mutants-") as temporary:
        copy = Copy(Path(temporary))
        sys.exit(min(1, sum([copy.run(name) for name in sys.argv[1:] or dict.fromkeys([*LIST["tests"], *LIST["c"]])])))
