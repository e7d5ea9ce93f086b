"""Folders are layers: nothing imports from a folder that stands above its own. And what is a rule of all files."""

import ast
import itertools
import re
from collections.abc import Iterator
from pathlib import Path

import superadam

TABLE = (Path(__file__).resolve().parents[1] / "CONTRIBUTING.md").read_text()
LAYERS = re.findall(r"^\| [^|]*`superadam[/.](\w+)/?`", TABLE, re.MULTILINE)[::-1]
"""From below, as the table of folders has them; `testing` and `cli` use the package as users do."""

ROOT = Path(superadam.__file__).parent
FILES = sorted(path for path in ROOT.rglob("*.py") if path.parent != ROOT)


def imported(tree: ast.AST, package: str) -> Iterator[str]:
    """Yield the names of all modules that are imported anywhere in a file of `package`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level:
            yield ".".join(filter(None, [*package.split(".")[: 1 - node.level or None], node.module]))
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{name.name}" for name in node.names)


def layer_of(module: str) -> int | None:
    """Return how high a module stands; None if it is not of this package, or `superadam` itself."""
    parts = module.split(".")
    return LAYERS.index(parts[1]) if parts[0] == "superadam" and len(parts) > 1 and parts[1] in LAYERS else None


def upward(tree: ast.AST, package: str) -> list[str]:
    """Return the imports that lead to a higher layer; the package itself stands below `testing` and `cli` only."""
    own = LAYERS.index(package.split(".")[1])
    modules = list(imported(tree, package))
    higher = [module for module in modules if (layer_of(module) or 0) > own]
    users = [module for module in modules if module.startswith("superadam.") and layer_of(module) is None]
    is_below = own < LAYERS.index("testing")
    return higher + [module for module in users if is_below and module.split(".")[1] != "_kernels"]


def test_imports_point_downward() -> None:
    packages = {path: ".".join(["superadam", *path.relative_to(ROOT).parent.parts]) for path in FILES}
    found = {path.name: upward(ast.parse(path.read_text()), package) for path, package in packages.items()}
    assert {name: imports for name, imports in found.items() if imports} == {}


def test_no_handler_runs_in_a_thread_that_has_a_lock() -> None:
    """It could wait for the worker while that waits for the lock; `pipeline.py` takes its lock in the worker alone."""
    for path in FILES:
        every = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.With)]
        outer = [node for node in every if ast.unparse(node.items[0]) == "THIS_THREAD.deferred_signals"]
        locked = [node for node in every if any(ast.unparse(item).endswith("lock") for item in node.items)]
        deferring = {*itertools.chain.from_iterable(map(ast.walk, outer))}
        assert deferring.issuperset(locked) or path.name == "pipeline.py", path


def test_every_folder_is_a_layer() -> None:
    assert {path.relative_to(ROOT).parts[0] for path in FILES} <= set(LAYERS)


def test_upward_imports_are_seen() -> None:
    lines = ["import superadam.step.outcome", "from superadam.step.outcome import judge", "from ..step import outcome"]
    lines += ["from superadam import OffloadScheduler", "def later():\n    from superadam.step import outcome"]
    assert all(upward(ast.parse(line), "superadam.state") for line in lines)
    assert not upward(ast.parse("from superadam.kernels import native\nfrom . import table"), "superadam.state")
