"""Faults in Python, Triton's included, by rules over the syntax tree.

Left alone is what only readers and type checkers see: docstrings, annotations, protocols, abstract methods, `__all__`,
assertions of types, texts of errors and of the log.
"""

import ast
import bisect
import io
import itertools
import tokenize
from collections.abc import Sequence
from typing import Any

from .mutant import SWAPS, Mutant

DROPPED = (ast.Assign, ast.AugAssign, ast.AnnAssign, ast.Assert, ast.Delete, ast.Return, ast.Raise, ast.Break)
DECLARED = (ast.FunctionDef, ast.ClassDef, ast.Return, ast.Nonlocal, ast.Global, ast.Import, ast.ImportFrom)
ORDERS = (ast.Lt, ast.LtE, ast.Gt, ast.GtE)
SYMMETRIC = ("max", "min", "equal", "array_equal", "suppress")


def name_of(node: ast.AST) -> str:
    """Return the last part of a dotted name, called or not; empty for what has none."""
    while isinstance(node, (ast.Call, ast.Subscript)):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def is_message(node: ast.AST) -> bool:
    """Whether it makes an error, or says something in a warning or the log."""
    owner = name_of(node.func.value) if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) else ""
    return name_of(node).endswith(("Error", "Exception", "Warning", "warn")) or owner.endswith(("logger", "logging"))


def is_number(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and type(node.value) in (int, float)


def operands_of(node: ast.AST) -> list[ast.expr]:
    """Return what stands between the operators of a node that has some."""
    if isinstance(node, ast.Compare):
        return [node.left, *node.comparators]
    if isinstance(node, ast.BinOp):
        both = [node.left, node.right]
        is_text = any(isinstance(one, (ast.JoinedStr, ast.Constant)) and not is_number(one) for one in both)
        return [] if is_text else both
    if isinstance(node, ast.AugAssign):
        return [node.target, node.value]
    return node.values if isinstance(node, ast.BoolOp) else []


class Rules(ast.NodeVisitor):
    def __init__(self, file: str, source: bytes) -> None:
        self.file, self.source, self.found = file, source, list[Mutant]()
        self.scope: list[ast.FunctionDef | ast.ClassDef] = []  # around the present node
        self.lines = [0, *(at + 1 for at, byte in enumerate(source) if byte == ord("\n"))]
        rows = source.decode().split("\n")
        self.tokens = [
            (self.lines[token.start[0] - 1] + len(rows[token.start[0] - 1][: token.start[1]].encode()), token.string)
            for token in tokenize.generate_tokens(io.StringIO(source.decode()).readline)
            if token.type in (tokenize.OP, tokenize.NAME)
        ]
        tree = ast.parse(source)
        self.nonlocals = {name for node in ast.walk(tree) if isinstance(node, ast.Nonlocal) for name in node.names}
        self.visit(tree)
        self.found.sort()

    def start(self, node: Any) -> int:
        return self.lines[node.lineno - 1] + int(node.col_offset)

    def end(self, node: Any) -> int:
        return self.lines[node.end_lineno - 1] + int(node.end_col_offset)

    def text(self, node: ast.AST) -> str:
        return self.source[self.start(node) : self.end(node)].decode()

    def add(self, rule: str, start: int, end: int, new: str) -> None:
        function = ".".join(node.name for node in self.scope)
        self.found.append(Mutant(self.file, self.source, start, end, new.encode(), rule, function))

    def replace(self, rule: str, node: ast.AST, new: str) -> None:
        self.add(rule, self.start(node), self.end(node), new)

    def swap(self, left: ast.AST, right: ast.AST) -> None:
        first, last = (bisect.bisect_left(self.tokens, (at,)) for at in (self.end(left), self.start(right)))
        words = [(at, word) for at, word in self.tokens[first:last] if word not in "()"]
        start, end, operator = words[0][0], words[-1][0] + len(words[-1][1]), " ".join(word for _, word in words)
        for rule, others in SWAPS.items():
            if operator in others:
                self.add(rule, start, end, others[operator])

    def visit_inside(self, node: ast.FunctionDef | ast.ClassDef, parts: Sequence[ast.AST]) -> None:
        self.scope.append(node)
        for part in parts:
            self.visit(part)
        if isinstance(node, ast.FunctionDef):
            self.return_early(node)
        self.scope.pop()

    def return_early(self, function: ast.FunctionDef) -> None:
        """Return before each statement but the last; before the first only where values are returned."""
        body = function.body[ast.get_docstring(function) is not None : -1]
        gives = any(isinstance(node, ast.Return) and node.value for node in ast.walk(function))
        for statement in body[:1] if gives else body:
            start = self.start(statement)
            indent = self.source[self.source.rfind(b"\n", 0, start) + 1 : start].decode()
            if not isinstance(statement, DECLARED) and not indent.strip():
                self.add("return-early", start, start, f"return\n{indent}")

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        if not any(name_of(decorator) in ("overload", "abstractmethod") for decorator in node.decorator_list):
            self.visit_inside(node, [*node.args.defaults, *filter(None, node.args.kw_defaults), *node.body])

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        if not any(name_of(base) == "Protocol" for base in node.bases):
            self.visit_inside(node, node.body)

    def drop(self, node: ast.stmt) -> None:
        """Drop a statement of a function, unless this comes to the same or names would no longer be bound."""
        functions = [scope for scope in self.scope if isinstance(scope, ast.FunctionDef)]
        targets = getattr(node, "targets", [getattr(node, "target", node)])
        is_end = functions and node is functions[-1].body[-1] and ast.unparse(node) in ("return", "return None")
        if functions and not is_end and self.nonlocals.isdisjoint(map(name_of, targets)):
            self.replace("drop-statement", node, "pass")

    def generic_visit(self, node: ast.AST) -> None:
        """Drop a statement, swap operators, negate a condition; go on inside."""
        for left, right in itertools.pairwise(operands_of(node)):
            self.swap(left, right)
        if isinstance(node, (*DROPPED, ast.Continue)):
            self.drop(node)
        for test in [node.test] if isinstance(node, (ast.If, ast.While, ast.IfExp)) else getattr(node, "ifs", []):
            is_swapped = isinstance(test, ast.Compare) and len(test.ops) == 1 and not isinstance(test.ops[0], ORDERS)
            if not is_swapped and not isinstance(test, ast.UnaryOp):  # which other rules negate
                self.replace("negate-condition", test, f"not ({self.text(test)})")
        if not isinstance(node, ast.Raise):
            super().generic_visit(node)

    def visit_If(self, node: ast.If) -> None:
        if name_of(node.test) != "TYPE_CHECKING":
            self.generic_visit(node)

    def visit_With(self, node: ast.With) -> None:
        if not any(item.optional_vars for item in node.items):
            after = bisect.bisect_left(self.tokens, (self.end(node.items[-1].context_expr),))
            colon = next(at for at, word in self.tokens[after:] if word == ":")
            self.add("drop-with", self.start(node), colon, "if True")
        self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> None:
        if name_of(node.targets[0]) not in ("__all__", "__slots__"):
            self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.drop(node)
            self.visit(node.value)

    def visit_Assert(self, node: ast.Assert) -> None:
        if name_of(node.test) not in ("isinstance", "callable") and not self.text(node.test).endswith(" is not None"):
            node.msg = None
            self.generic_visit(node)

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        """Leave it alone: before Python 3.12 its parts have no true positions."""

    def visit_Expr(self, node: ast.Expr) -> None:
        if isinstance(node.value, ast.Call) and (not is_message(node.value) or name_of(node.value) == "warn"):
            self.replace("drop-call", node, "pass")
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        if is_message(node) or name_of(node) in ("cast", "TypeVar"):
            return
        for one, two in itertools.pairwise(node.args if name_of(node) not in SYMMETRIC else []):
            first, gap, second = self.text(one), self.source[self.end(one) : self.start(two)].decode(), self.text(two)
            if first != second and not isinstance(one, ast.Starred) and not isinstance(two, ast.Starred):
                self.add("exchange-arguments", self.start(one), self.end(two), second + gap + first)
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, ast.Not):
            self.add("negate-condition", self.start(node), self.start(node) + len("not"), "")
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if is_number(node):
            for other in {node.value + 1, node.value - 1} - {node.value}:  # which it is if it is large
                self.replace("shift-constant", node, f"({other})" if other < 0 else f"{other}")
