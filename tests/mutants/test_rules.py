"""Each rule makes the mutants that it promises, and changes nothing else of a file."""

import random
import re
from pathlib import Path

import pytest
from mutants.run import mutants_in, sources

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("rule", "source", "changes"),
    [
        ("drop-statement", "def f():\n    é = x = (\n        1); g(é)\n", {"é = x = (\n        1)": "pass"}),
        ("drop-statement", "def f():\n    x: int = 1\n    return None\n", {"x: int = 1": "pass"}),
        ("drop-statement", "def f():\n    if x:\n        raise E(y + 1)\n", {"raise E(y + 1)": "pass"}),
        ("drop-call", "'é'; lock.release()  # now\nx = f()\n", {"lock.release()": "pass"}),
        ("drop-with", "with a, (b):  # :\n    f()\nwith g() as h:\n    f()\n", {"with a, (b)": "if True"}),
        ("negate-condition", "while 'é' and (b):\n    f()\n", {"'é' and (b)": "not ('é' and (b))"}),
        ("negate-condition", "x = [a for a in b if not (a or b)]\n", {"not (": " ("}),
        ("swap-comparison", "x = ((é) < b) is  not c\n", {"<": "<=", "is  not": "is"}),
        ("swap-comparison", "assert a not in b, a > b\n", {"not in": "in"}),
        ("swap-operator", "x -= a + é and (b) // c + 'text'\n", {"-=": "+=", "+ é": "- é", "and": "or", "//": "*"}),
        ("shift-constant", "é = 'é', 0x10, True\n", {"0x10": "17", ", 0x10": ", 15"}),
        ("shift-constant", "é = 0.5\n", {"0.5": "1.5", "= 0.5": "= (-0.5)"}),
        ("return-early", "def f():\n    '''D.'''\n    if é:\n        a()\n    b()\n", {"    if": "    return\n    if"}),
        ("exchange-arguments", "f('é', (b + c), *d)\nmax(a, b)\n", {"'é', (b + c)": "b + c, ('é')"}),
        # in C
        ("drop-statement", "void f(char *a)\n{\n    int b = 0;\n    *a = /* ; */ b;\n}\n", {"*a = /* ; */ b": ""}),
        ("drop-call", "void f(void)\n{\n    if (a)\n        g((int)h(a), b);\n}\n", {"g((int)h(a), b)": ""}),
        ("negate-condition", "int f(void) { if (a && !(b)) return 1; }\n", {"a && !(b)": "!(a && !(b))"}),
        ("swap-comparison", "#define LESS(a, b) \\\n    (a < b)\n", {"<": "<="}),
        ("swap-operator", "int f(char *p) { return *p + !p->n++; }\n", {"+ !": "- !", "!": "", "++": "--"}),
        ("shift-constant", 'enum { A = 0x1Fu }; /* 2 */ char *b = "3";\n', {"0x1F": "32", "= 0x1F": "= 30"}),
        ("shift-constant", "float c = 0.5f;\n", {"0.5f": "(0.5f + 1)", "= 0.5f": "= (0.5f - 1)"}),
        ("exchange-operands", "int f(s *p) { return p->a[1] / g(x) + b * c; }\n", {"p->a[1] / g(x)": "g(x) / p->a[1]"}),
        ("exchange-arguments", "void f(int a)\n{\n    g(a,\n      h(a));\n}\n", {"a,\n      h(a)": "h(a),\n      a"}),
    ],
)  # fmt: skip
def test_a_rule_makes_its_mutants(rule: str, source: str, changes: dict[str, str]) -> None:
    file = "a.c" if re.match("void|int|enum|float|#", source) else "a.py"
    texts = sorted(mutant.text.decode() for mutant in mutants_in(file, source.encode()) if mutant.rule == rule)
    assert texts == sorted(source.replace(old, new, 1) for old, new in changes.items())


def test_key_stays_where_code_moves_and_tells_mutants_of_a_line_apart() -> None:
    source = "def f(x):\n    if x:\n        g(x, 1, 2)\n"
    found = mutants_in("a.py", source.encode())
    moved = mutants_in("a.py", ("import a\n\n\n" + source.replace("    ", "  ")).encode())
    assert [mutant.key for mutant in found] == [mutant.key for mutant in moved]
    assert len({mutant.key for mutant in found}) == len(found) > 5
    assert {mutant.function for mutant in found} == {"f"}


@pytest.mark.parametrize("file", random.Random(0).sample(sources(ROOT), 12))
def test_mutants_of_the_sources_differ_compile_and_are_the_same_again(file: str) -> None:
    found = mutants_in(file, (ROOT / file).read_bytes())
    assert found == mutants_in(file, (ROOT / file).read_bytes())
    assert len({mutant.text for mutant in found} - {(ROOT / file).read_bytes()}) == len(found)
    for mutant in random.Random(0).sample(found, min(len(found), 10)) if file.endswith(".py") else []:
        compile(mutant.text, file, "exec")
