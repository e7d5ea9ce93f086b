"""Faults in C, by rules over its tokens, in files that clang-format has laid out.

Left alone are comments, strings, attributes, the conditions of the preprocessor and the heads of macros.
"""

import itertools
import re

from .mutant import SWAPS, Mutant

HIDDEN = re.compile(
    r"""/\*.*?\*/|//[^\n]*|"(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*'|^\#(?![ ]*define)(?:\\\n|[^\n])*
        |__attribute__\(\([^;{]*?\)\)(?=[ ;])|(?:__asm__|_Static_assert)[^;]*;""",
    re.DOTALL | re.MULTILINE | re.VERBOSE,
)
MACRO = re.compile(r"^#[ ]*define[ ]+(?P<macro>\w+)(?:\([^)]*\))?", re.MULTILINE)
NUMBER = re.compile(
    r"\b(?:(0x[0-9a-fA-F]+|\d+)([uUlL]*)|0x[\da-fA-F.]+p[+-]?\d+f?|\d+\.\d*(?:e[+-]?\d+)?f?|\d+e[+-]?\d+f?)\b(?!\.)",
    re.I,
)
ROUND, SQUARE = r"\([^()]*\)", r"\[[^][]*\]"
for _ in range(4):  # levels of brackets
    ROUND, SQUARE = rf"\((?:[^()]|{ROUND})*\)", rf"\[(?:[^][]|{SQUARE})*\]"
SCOPE = re.compile(
    rf"{MACRO.pattern}(?:\\\n|[^\n])*|^(?=\w)[\w\s*]*?\b(?P<function>\w+){ROUND}\s*\{{(?:[^\n]*\}}$|.*?^\}})",
    re.DOTALL | re.MULTILINE,
)
OPERAND = rf"(?:\w+|{ROUND})(?:(?:\.|->)\w+|{SQUARE}|{ROUND})*"
ORDERED = re.compile(rf"(?<![\w.>)\]])(?=({OPERAND})( (?:[<>]=?|[-/%]|<<|>>) )({OPERAND}))")
STATEMENT = re.compile(
    rf"(?:^ +|(?<=\{{ ))((?:[*]|\+\+|--)?(?!return|goto){OPERAND}(?: \W{{0,2}}= [^;]*|\+\+|--)?);", re.MULTILINE
)
CALL = re.compile(rf"\b(?!sizeof)(\w+)(?=({ROUND}))")
SYMMETRIC = re.compile(r"(^|_)(add|mul|or|and|xor|both)(_|$)")


def blank(pattern: re.Pattern[str], text: str) -> str:
    """Return a text with blanks for what a pattern matches, but for the ends of its lines."""
    return pattern.sub(lambda match: re.sub(r"[^\n]", " ", match[0]), text)


def parts_of(code: str, start: int, end: int) -> list[tuple[int, int]]:
    """Return where the arguments between two brackets stand."""
    depth, commas = 0, [start]
    for at in range(start + 1, end - 1):
        depth += (code[at] in "([{") - (code[at] in ")]}")
        commas += [at] if code[at] == "," and not depth else []
    bounds = itertools.pairwise([*commas, end - 1])
    return [(one + 1 + len(code[one + 1 : two]) - len(code[one + 1 : two].lstrip()), two) for one, two in bounds]


def mutants_of_c(file: str, source: bytes) -> list[Mutant]:
    text = source.decode("latin-1")  # a character for each byte
    code = blank(HIDDEN, text)
    scopes = [(match.start(), match.end(), match["macro"] or match["function"]) for match in SCOPE.finditer(code)]
    code = blank(MACRO, code).replace("\\\n", " \n")
    found = []

    def scope_of(at: int) -> str:
        return next((name for start, end, name in scopes if start <= at < end), "")

    def add(rule: str, start: int, end: int, new: str) -> None:
        found.append(Mutant(file, source, start, end, new.encode("latin-1"), rule, scope_of(start)))

    def exchange(rule: str, one: tuple[int, int], two: tuple[int, int]) -> None:
        first, gap, second = text[slice(*one)], text[one[1] : two[0]], text[slice(*two)]
        if first != second:
            add(rule, one[0], two[1], second + gap + first)

    for match in NUMBER.finditer(code):
        value = match[1] and int(match[1], 0)
        for other in (f"({match[0]} + 1)", f"({match[0]} - 1)") if value is None else {value + 1, abs(value - 1)}:
            add("shift-constant", *match.span(), f"{other}{match[2] or ''}")
    # Signs, and stars of pointers, stand next to what they are of.
    for match in re.finditer(r"(?<= )[^\w\s]+(?=\s)|\+\+|--", code):
        for rule, others in SWAPS.items():
            if match[0] in others:
                add(rule, *match.span(), others[match[0]])
    for match in re.finditer(r"[!~](?!=)", code):
        add("swap-operator", *match.span(), "")
    for match in ORDERED.finditer(code):
        exchange("exchange-operands", match.span(1), match.span(3))
    for match in re.finditer(rf"\b(?:if|while) ({ROUND})", code):
        condition = text[match.start(1) + 1 : match.end(1) - 1]
        if re.search(r"&&|\|\|", condition) or not re.search(r"[!=]=|^!", condition):  # which other rules negate
            add("negate-condition", match.start(1) + 1, match.end(1) - 1, f"!({condition})")
    for match in CALL.finditer(code):
        if scope_of(match.start()) not in ("", match[1]) and not SYMMETRIC.search(match[1]):
            for one, two in itertools.pairwise(parts_of(code, *match.span(2))):
                exchange("exchange-arguments", one, two)
    for match in STATEMENT.finditer(code):
        before = code[max(match.start() - 200, 0) : match.start(1)]
        if re.search(r"(?:[;{}):]|\belse)\s*\Z", before) and scope_of(match.start(1)):
            add("drop-call" if match[1][-1] == ")" and "=" not in match[1] else "drop-statement", *match.span(1), "")
    return sorted(found)
