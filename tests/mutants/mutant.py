"""A mutant: one file of the sources with one small fault, which a rule made."""

import difflib
import hashlib
from dataclasses import dataclass

COMPARISONS = {"<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "=="}
COMPARISONS |= {"is": "is not", "is not": "is", "in": "not in", "not in": "in"}
ARITHMETIC = {"+": "-", "-": "+", "*": "/", "/": "*", "//": "*", "%": "/", "**": "*", "<<": ">>", ">>": "<<"}
ARITHMETIC |= {"&": "|", "|": "&", "^": "|"}
OPERATORS = {**ARITHMETIC, **{f"{one}=": f"{other}=" for one, other in ARITHMETIC.items()}}
OPERATORS |= {"and": "or", "or": "and", "&&": "||", "||": "&&", "++": "--", "--": "++"}
SWAPS = {"swap-comparison": COMPARISONS, "swap-operator": OPERATORS}


@dataclass(frozen=True, slots=True, order=True)
class Mutant:
    """A replacement of the bytes [start, end) of a file."""

    file: str  # path from the root of the repository
    source: bytes  # of the whole file, in UTF-8
    start: int
    end: int
    new: bytes
    rule: str  # such as `drop-call`
    function: str  # qualified name of the function, class or macro around it; empty outside of all

    @property
    def text(self) -> bytes:
        return self.source[: self.start] + self.new + self.source[self.end :]

    @property
    def place(self) -> str:
        line = self.source.count(b"\n", 0, self.start) + 1
        return f"{self.file}:{line} {self.function}"

    @property
    def key(self) -> tuple[str, str, str, str]:
        """What `mutants.toml` calls it: file, function, rule, and a hash of its lines, one above, and what they become.

        White space does not count. What lines become tells apart the mutants that one rule makes of one line.
        """
        begin = self.source.rfind(b"\n", 0, max(self.source.rfind(b"\n", 0, self.start), 0)) + 1
        end = (self.source + b"\n").index(b"\n", self.end)
        lines = self.source[begin:end], self.source[begin : self.start] + self.new + self.source[self.end : end]
        digest = hashlib.sha256(b"\n".join(b" ".join(one.split()) for one in lines)).hexdigest()
        return self.file, self.function, self.rule, digest[:12]

    def diff(self) -> str:
        before, after = (text.decode().splitlines(keepends=True) for text in (self.source, self.text))
        return "".join(difflib.unified_diff(before, after, f"a/{self.file}", f"b/{self.file}", n=2))
