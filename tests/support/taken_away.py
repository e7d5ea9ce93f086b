"""Waits, events and memory kept for streams, found in the sources by their syntax tree, to be taken away one by one."""

from __future__ import annotations
import __future__

import ast
import importlib
import inspect
import itertools
import pkgutil
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import CodeType, FunctionType, ModuleType
from typing import Any

from superadam.devices.interface import AllEvents

STATEMENTS = {"wait", "wait_event", "wait_stream", "synchronize", "record_stream", "hold_until"}
"""What torch, a device and pinned memory call it to let somebody wait, or to keep memory until a stream has passed."""

WRAPPERS = {"_keep", "_let_leave", "follow", "keep_published", "settle"}
"""Methods of this package that do nothing else."""

FLAGS = __future__.annotations.compiler_flag
"""Sources are compiled with the annotations that they have."""

MOST = 100_000
"""How often a program may come by a wait that was taken away."""

PLACES = ("superadam.devices.cuda", "superadam.devices.pinned", "superadam.devices.flat", "superadam.gpu")
PLACES += ("superadam.handles", "superadam.offload", "superadam.state")
"""Modules and packages in which streams of a device are told what to wait for."""


@dataclass(frozen=True, order=True)
class Wait:
    """A call that orders something: the module and the function around it, its text, and which one of that text."""

    module: str
    function: str
    text: str
    number: int

    def __str__(self) -> str:
        number = f" #{self.number}" if self.number else ""
        return f"{self.module.removeprefix('superadam.')} {self.function}: {self.text}{number}"


def modules() -> Iterator[ModuleType]:
    """Yield the modules of `PLACES`."""
    for name in PLACES:
        module = importlib.import_module(name)
        yield module
        for info in pkgutil.iter_modules(getattr(module, "__path__", ())):
            yield importlib.import_module(f"{name}.{info.name}")


def is_order(node: ast.AST, *, is_statement: bool) -> bool:
    """Whether a node is a call that lets somebody wait, or one that makes an event: records it, or tells one to."""
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return False
    makes_event = node.func.attr == "record" and any("stream" in ast.unparse(one).lower() for one in node.args)
    return makes_event or (is_statement and node.func.attr in STATEMENTS | WRAPPERS)


class Finder(ast.NodeTransformer):
    """Finds the waits of a module, and puts a call of `__passed__` into the place of each that it may `change`."""

    def __init__(self, module: str, change: Callable[[Wait], bool] = lambda _: False) -> None:
        self.module, self.change = module, change
        self.scope: list[str] = []
        self.found: list[Wait] = []
        self.seen: Counter[tuple[str, str]] = Counter()

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        self.scope.append(node.name)
        self.generic_visit(node)
        self.scope.pop()
        return node

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        return self.visit_FunctionDef(node)  # type: ignore[arg-type]

    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        if not is_order(node.value, is_statement=True):
            return self.generic_visit(node)
        # What it is given, as the event of another call, is found as well.
        whole = self._visited(node.value)
        inner = [self.visit(one) for one in node.value.args]  # type: ignore[attr-defined]
        if whole is None:
            node.value.args = inner  # type: ignore[attr-defined]
            return node
        return ast.copy_location(ast.Expr(whole), node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        changed = self._visited(node) if is_order(node, is_statement=False) else None
        return changed or self.generic_visit(node)

    def _visited(self, node: Any) -> ast.expr | None:
        function, text = ".".join(self.scope), ast.unparse(node)
        wait = Wait(self.module, function, text, self.seen[function, text])
        self.seen[function, text] += 1
        self.found.append(wait)
        if not self.change(wait):
            return None
        return ast.copy_location(ast.Call(ast.Name("__passed__", ast.Load()), [node.func.value], []), node)


def found_in(module: ModuleType) -> list[Wait]:
    finder = Finder(module.__name__)
    finder.visit(ast.parse(inspect.getsource(module)))
    return finder.found


def all_waits() -> list[Wait]:
    """Return every wait in the sources."""
    return [wait for module in modules() for wait in found_in(module)]


def _function(module: ModuleType, name: str) -> FunctionType:
    """Return the function itself, without what decorates it."""
    thing: Any = module
    for part in name.split("."):
        thing = inspect.getattr_static(thing, part)
        thing = next((one for name in ("fget", "func", "__func__") if (one := getattr(thing, name, None))), thing)
    return inspect.unwrap(thing)


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for one in code.co_consts:
        if isinstance(one, CodeType):
            yield from _codes(one)


@contextmanager
def taken_away(wait: Wait) -> Iterator[None]:
    """Run without one wait, or with an event that was never recorded."""
    module = importlib.import_module(wait.module)
    calls = itertools.count()

    def passed(receiver: Any) -> Any:
        if next(calls) == MOST:
            raise RuntimeError("a loop waits for ever")
        cuda = getattr(receiver, "_cuda", None)
        return AllEvents() if cuda is None else cuda.Event(blocking=True)

    tree = Finder(wait.module, wait.__eq__).visit(ast.parse(inspect.getsource(module)))
    whole = compile(ast.fix_missing_locations(tree), module.__file__ or "", "exec", dont_inherit=True, flags=FLAGS)
    function = _function(module, wait.function)
    (code,) = [one for one in _codes(whole) if one.co_qualname == function.__code__.co_qualname]
    before, function.__code__ = function.__code__, code
    vars(module)["__passed__"] = passed
    try:
        yield
    finally:
        function.__code__ = before
        del vars(module)["__passed__"]
