"""The model of the Arm kernels on Grace sorts instructions rightly, and docs/grace.md is what its script prints."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from arm import emulation

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "bench"))

from neoverse_v2 import Kind, bounds, rule_of  # noqa: E402


@pytest.mark.parametrize(
    ("instruction", "kind", "cycles"),
    [
        ("ldp q3, q2, [x0]", Kind.LOAD, 2),
        ("ld1w {z2.s}, p1/z, [x9]", Kind.LOAD, 1),
        ("ldr x0, [sp, #136]", Kind.LOAD, 1),
        ("st1h {z1.s}, p4, [x5]", Kind.STORE, 2),
        ("stp q19, q18, [sp, #128]", Kind.STORE, 3),
        ("str x2, [sp, #232]", Kind.STORE, 1),
        ("prfm pldl1keep, [x0, #2048]", Kind.PREFETCH, 1),
        ("fdiv v0.4s, v0.4s, v1.4s", Kind.DIVIDE, 10),
        ("fdivr z3.s, p0/m, z3.s, z9.s", Kind.DIVIDE, 9),
        ("fsqrt z3.s, p0/m, z8.s", Kind.ROOT, 9),
        ("fsqrt v3.4s, v8.4s", Kind.ROOT, 9),
        ("fmla z1.s, p0/m, z6.s, z9.s", Kind.ARITHMETIC, 1),
        ("fsub s1, s4, s24", Kind.ARITHMETIC, 1),
        ("fcvtl2 v3.2d, v3.4s", Kind.CONVERT, 1),
        ("fcvtn v3.4h, v3.4s", Kind.CONVERT, 2),
        ("bfcvt z0.h, p0/m, z0.s", Kind.CONVERT, 1),
        ("ushr v1.4s, v0.4s, #16", Kind.VECTOR, 1),
        ("mov z8.s, p3/m, z2.s", Kind.VECTOR, 1),
        ("movprfx z3, z8", Kind.VECTOR, 1),
        ("whilelt p1.s, wzr, w12", Kind.SCALAR, 2),
        ("b.gt 2878 <run_NORM_FLOAT32_NONE.constprop.0+0x98>", Kind.SCALAR, 1),
        ("add x9, x9, x2", Kind.SCALAR, 1),
    ],
)
def test_instructions_are_sorted(instruction: str, kind: Kind, cycles: int) -> None:
    found, uses = rule_of(instruction)
    assert found is kind
    assert sum(spent for _, spent in uses) == cycles


@pytest.mark.parametrize(
    ("counts", "cycles", "reason"),
    [
        ({"fdiv z0.s, p0/m, z0.s, z1.s": 2, "fsqrt z0.s, p0/m, z0.s": 1}, 13.5, "div, sqrt on V0, V2"),
        ({"fmul v0.4s, v0.4s, v1.4s": 12}, 3.0, "vector pipelines"),
        # The multiplications fill the two pipelines that the divisions leave, and wait for no other.
        ({"fdiv v0.4s, v0.4s, v1.4s": 1, "fmul v0.4s, v0.4s, v1.4s": 10}, 5.0, "div, sqrt on V0, V2"),
        ({"add x0, x0, x1": 12, "b.gt 0": 1}, 13 / 6, "decoding 6 per cycle"),
        ({"ldr q0, [x0]": 6}, 2.0, "load, store"),
    ],
)
def test_bounds_of_small_loops(counts: dict[str, int], cycles: float, reason: str) -> None:
    assert max(bounds(Counter(counts)), key=lambda bound: bound[0]) == (pytest.approx(cycles), reason)


@pytest.mark.slow
def test_the_document_holds_what_the_script_prints() -> None:
    if missing := emulation.missing_tools():
        pytest.skip(missing)
    document = (ROOT / "docs" / "grace.md").read_text()
    command = [sys.executable, str(ROOT / "bench" / "grace.py")]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() in document, "the counts have changed; run `python bench/grace.py --write`"
