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
import numpy  # noqa: F401  what tests import, once
import pytest
import torch  # noqa: F401
from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.operators.provider import OperatorProvider
from parso.python.tree import Keyword
from parso.tree import NodeOrLeaf

ROOT = Path(__file__).resolve().parents[2]
LIST = tomllib.loads(Path(__file__).with_name("mutants.toml").read_text())


class DeleteStatement:
    """Leaves out a statement of a function that is there for its effect."""

    def mutation_positions(self, node: NodeOrLeaf) -> Iterator[tuple[Any, Any]]:
        if node.type == "simple_stmt" and node.search_ancestor("funcdef"):
            first = node.children[0]
            is_local = (
                first.type == "expr_stmt"
                and first.children[0].type == "name"
                and str(first.children[1].get_code()).strip() == "="
            )
            if not is_local and first.type not in ("string", "assert_stmt", "import_name", "import_from"):
                yield node.start_pos, node.end_pos

    def mutate(self, node: NodeOrLeaf, index: int) -> NodeOrLeaf:
        node.children[0] = Keyword("pass", node.start_pos, node.get_first_leaf().prefix)
        return node


class DropMethodCall:
    """Takes an object for the result of its method."""

    def mutation_positions(self, node: NodeOrLeaf) -> Iterator[tuple[Any, Any]]:
        if node.type in ("atom_expr", "power") and node.parent.type != "simple_stmt":
            *_, name, call = (child.get_first_leaf().value for child in node.children)
            if name == "." and call == "(" and len(node.children) > 2:
                yield node.start_pos, node.end_pos

    def mutate(self, node: NodeOrLeaf, index: int) -> NodeOrLeaf:
        del node.children[-2:]
        return node


OPERATORS = [*(OperatorProvider()[name]() for name in LIST["operators"]), DeleteStatement(), DropMethodCall()]


def meaning(source: str) -> str:
    """Return a module without annotations, which nothing reads."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        for name in ("annotation", "returns"):
            if hasattr(node, name):
                setattr(node, name, None)
    return ast.dump(tree)


def python_mutants(source: str) -> Iterator[str]:
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


def c_mutants(source: str, name: str) -> Iterator[str]:
    for old, new in random.Random(0).sample(LIST["c"][name], len(LIST["c"][name])):
        assert source.count(old) == 1, f"{name} has {old!r} {source.count(old)} times, expected once"
        yield source.replace(old, new)


def difference(source: str, mutant: str) -> str:
    """Return what a mutant changes, in one line."""
    lines = difflib.unified_diff(source.splitlines(), mutant.splitlines(), n=0, lineterm="")
    return " ".join(f"{line[0]} {line[1:].strip()}" for line in lines if line[:2] not in ("--", "++", "@@"))


class FirstFailure:
    """Lets Hypothesis fail at once, and notes the file of the test that failed."""

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
    if process.is_alive():
        os.killpg(process.pid or 0, signal.SIGKILL)
        process.join()
    if note.exists():
        tests.sort(key=lambda test: not note.read_text().startswith(test))
    return process.exitcode == 0


class Copy:
    """A copy of the installed package, and of the C sources, in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        spec = importlib.util.find_spec("superadam")
        assert spec is not None, "superadam is not installed"
        (installed,) = spec.submodule_search_locations or ()
        self.folder, self.package, self.build = folder, folder / "site/superadam", folder / "build"
        shutil.copytree(installed, self.package, ignore=shutil.ignore_patterns("__pycache__"))
        sys.path.insert(0, str(folder / "site"))
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [sys.path[0], os.environ.get("PYTHONPATH")]))
        self._time = 0
        self.sound: set[tuple[str, ...]] = set()

    def path(self, name: str) -> Path:
        """Return where a file of the repository lies; C sources are configured when first needed."""
        if not name.startswith("cpu/"):
            return self.folder / "site" / name
        if not self.build.exists():
            for one in ("cpu", "cmake"):
                shutil.copytree(ROOT / one, self.folder / one)
            shutil.copy(ROOT / "CMakeLists.txt", self.folder)
            quickly = ("-DCMAKE_BUILD_TYPE=Mutants", "-DCMAKE_C_FLAGS=-O1")  # the same bits
            self._cmake("-S", self.folder, "-B", self.build, f"-DPython_EXECUTABLE={sys.executable}", *quickly)
        return self.folder / name

    def write(self, path: Path, text: str) -> bool:
        """Put a mutant in; return whether it compiles."""
        path.write_text(text)
        self._time += 10  # of its own, or the bytecode of another mutant of the same size would be taken for it
        os.utime(path, (path.stat().st_atime, path.stat().st_mtime + self._time))
        if path.suffix == ".py":
            return True
        is_built = self._cmake("--build", self.build, "-j2")
        shutil.copy(self.build / "_kernels.abi3.so", self.package)
        return is_built

    def _cmake(self, *arguments: str | Path) -> bool:
        return not subprocess.run(
            [sys.executable, "-m", "cmake", *arguments], check=False, capture_output=True
        ).returncode


def run_file(copy: Copy, name: str, tests: list[str]) -> int:
    """Run a file's mutants; return how many survived."""
    path, note = copy.path(name), copy.folder / "failed"
    source = path.read_text()
    assert copy.write(path, source), "the unchanged sources do not compile"
    if tuple(tests) not in copy.sound:
        assert passes([*tests], note), f"{name}: a test of the unchanged package fails: {note.read_text()}"
        copy.sound.add(tuple(tests))
    mutants = python_mutants(source) if path.suffix == ".py" else c_mutants(source, name)
    made = survived = excluded = 0
    for mutant in itertools.islice(mutants, int(os.environ.get("SAMPLE", "1000000"))):
        made += 1
        text = difference(source, mutant)
        if any(name.startswith(where) and part in text for where, part, _ in LIST["excluded"]):
            excluded += 1
        elif not copy.write(path, mutant) or passes(tests, note, limit=400):
            survived += 1
            sys.stdout.write(f"{name} survived, or does not compile: {text}\n")
            sys.stdout.flush()
        else:
            sys.stderr.write(f"killed: {text}\n  by {note.read_text() if note.exists() else 'time or abort'}\n")
    copy.write(path, source)
    killed = made - excluded - survived
    sys.stdout.write(f"{name}: {made} made, {killed} killed, {survived} survived, {excluded} excluded\n")
    sys.stdout.flush()
    return survived


def main() -> int:
    os.chdir(ROOT)
    with tempfile.TemporaryDirectory(prefix="superadam-mutants-") as folder:
        copy = Copy(Path(folder))
        names = sys.argv[1:] or [*LIST["tests"], *LIST["c"]]
        return min(1, sum([run_file(copy, name, [*LIST["tests"].get(name, LIST["c_tests"])]) for name in names]))


if __name__ == "__main__":
    sys.exit(main())
