"""One Neoverse V2 core as a set of pipelines: what an instruction occupies, and how fast a loop can be at best.

It knows the text of instructions and nothing of kernels. The numbers are those of the Arm Neoverse V2 Core Software
Optimization Guide (PJDOC-466751330-593177), as LLVM's scheduling model AArch64SchedNeoverseV2.td restates them.
"""

from __future__ import annotations

import enum
import itertools
import re
from collections import Counter
from collections.abc import Iterator

DECODE_WIDTH = 6
"""Micro-operations per cycle that enter the core."""


class Kind(enum.StrEnum):
    """Columns of the table of instructions."""

    LOAD = "load"
    STORE = "store"
    ARITHMETIC = "add, mul, fma"
    DIVIDE = "div"
    ROOT = "sqrt"
    CONVERT = "convert"
    VECTOR = "other vector"
    PREFETCH = "prefetch"
    SCALAR = "address, branch"


V, V01, V02, V13 = ({"V0", "V1", "V2", "V3"}, {"V0", "V1"}, {"V0", "V2"}, {"V1", "V3"})
LOADS, STORES = {"L0", "L1", "L2"}, {"L0", "L1"}
INTEGER, MULTI = {"S0", "S1", "S2", "S3", "M0", "M1"}, {"M0", "M1"}

# What an instruction occupies: (pattern of its text, kind, [(one of these pipelines, for this number of cycles), ...]).
RULES: tuple[tuple[str, Kind, list[tuple[set[str], int]]], ...] = (
    (r"prfm", Kind.PREFETCH, [(LOADS, 1)]),
    (r"ldp\s+q", Kind.LOAD, [(LOADS, 1), (LOADS, 1)]),
    (r"(ldp|ldu?r[bhsw]*|ld1r?[whd]?)\s", Kind.LOAD, [(LOADS, 1)]),
    (r"stp\s+q", Kind.STORE, [(STORES, 1), (V01, 1), (V01, 1)]),
    (r"st(p|u?r)\s+[wx]", Kind.STORE, [(STORES, 1)]),
    (r"(stp|stu?r|st1[whd]?|stnt1w)\s", Kind.STORE, [(STORES, 1), (V01, 1)]),
    (r"fdivr?\s+z", Kind.DIVIDE, [(V02, 9)]),
    (r"fdiv\s+v\d+\.4s", Kind.DIVIDE, [(V02, 10)]),
    (r"fsqrt\s+(z|v\d+\.4s)", Kind.ROOT, [(V02, 9)]),
    (r"fcvtl2?\s+v\d+\.2d|fcvt\s+z\d+\.d|bfcvt\s+z", Kind.CONVERT, [(V02, 1)]),
    (r"(fcvtl2?|fcvtn2?|fcvt)\s+[vz]", Kind.CONVERT, [(V02, 1), (V02, 1)]),
    (r"(fadd|fsub|fmul|fml[as]|fmad|fmsb|fnml[as]|fneg)\s+[vzs]", Kind.ARITHMETIC, [(V, 1)]),
    (r"fcm\w\w\s+p|fcmpe?\s", Kind.VECTOR, [({"V0"}, 1)]),
    (r"(u?shr|shl|shll|ushll|shrn|lsr|lsl)\s+[vz]", Kind.VECTOR, [(V13, 1)]),
    (r"whilel\w\s", Kind.SCALAR, [(MULTI, 1), (MULTI, 1)]),
    (r"(ptrue|cnt[bhwd]|inc[bhwd])\s", Kind.SCALAR, [(MULTI, 1)]),
    (r"(mov|orr|and|bic)\s+p", Kind.SCALAR, [({"M0"}, 1)]),
    (r"(mov|dup|fmov)\s+[vzs]\S+ [wx]\d", Kind.VECTOR, [({"M0"}, 1)]),
    (r"\w+\s+[{]?[vzqds]\d", Kind.VECTOR, [(V, 1)]),
    (r"b(\.\w+)?\s|cbn?z\s|tbn?z\s", Kind.SCALAR, [({"B0", "B1"}, 1)]),
    (r"", Kind.SCALAR, [(INTEGER, 1)]),
)


def rule_of(instruction: str) -> tuple[Kind, list[tuple[set[str], int]]]:
    """Return the kind of an instruction and what it occupies."""
    return next((kind, uses) for pattern, kind, uses in RULES if re.match(pattern, instruction))


def bounds(counts: Counter[str]) -> Iterator[tuple[float, str]]:
    """Yield lower bounds on the cycles that this number of each instruction takes, each with what bounds it.

    Work that fits only into some of the pipelines takes at least its cycles divided by their number; the largest of
    these over all choices of pipelines is what a perfect distribution reaches.
    """
    work: Counter[frozenset[str]] = Counter()
    operations = 0.0
    for instruction, count in counts.items():
        for pipelines, cycles in rule_of(instruction)[1]:
            work[frozenset(pipelines)] += cycles * count
            operations += count
    yield operations / DECODE_WIDTH, f"decoding {DECODE_WIDTH} per cycle"
    names = {"V": "vector pipelines", "L": "load, store", "SM": "integer pipelines", "B": "branches"}
    for first, name in names.items():
        domain = sorted({pipeline for pipelines in work for pipeline in pipelines if pipeline[0] in first})
        for size in range(1, len(domain) + 1):
            for chosen in map(frozenset, itertools.combinations(domain, size)):
                confined = sum(cycles for pipelines, cycles in work.items() if pipelines <= chosen)
                yield confined / size, "div, sqrt on V0, V2" if chosen == V02 else name
