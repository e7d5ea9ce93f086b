"""What the executor of PTX computes, against exact fractions, and what it finds in small programs."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from support import ptx

RNG = np.random.default_rng(0)


def program(body: str, parameters: int = 1) -> ptx.Kernel:
    declared = ",".join(f".param .u64 .ptr .global .align 1 p{n}" for n in range(parameters))
    return ptx.parse(f".visible .entry k(\n{declared}\n)\n.reqntid 32\n{{\n{body}\nret;\n}}\n")


PROLOGUE = """
    mov.u32 %r1, %tid.x;
    mov.u32 %r2, %ctaid.x;
    mad.lo.s32 %r3, %r2, 64, %r1;
    ld.param.b64 %rd1, [p0];
    mul.wide.u32 %rd2, %r3, {size};
    add.s64 %rd3, %rd1, %rd2;
"""

SHARED = "mov.b32 %r4, global_smem; shl.b32 %r5, %r1, 2; add.s32 %r5, %r4, %r5; xor.b32 %r6, %r5, 4;"


def run(body: str, *arrays: np.ndarray, size: int = 4, grid: int = 1, threads: int = 64, shared: int = 0) -> None:
    parts = [(array.ctypes.data, array.nbytes) for array in arrays]
    addresses = [array.ctypes.data for array in arrays]
    kernel = program(PROLOGUE.format(size=size) + body, len(arrays))
    ptx.launch(kernel, range(grid), threads, shared, addresses, ptx.Memory(parts))


def bits(n: int, kind: str) -> np.ndarray:
    """Any bit patterns, and special ones."""
    size = ptx.dtype_of(kind).itemsize
    found = RNG.integers(0, 256, n * size, dtype=np.uint8).view(f"u{size}")
    info = np.finfo(ptx.dtype_of(kind))
    few = [0.0, -0.0, 1.0, -1.0, 3.0, info.max, -info.max, info.tiny, info.smallest_subnormal, np.inf, -np.inf, np.nan]
    special = np.array(few, ptx.dtype_of(kind)).view(f"u{size}")
    found[: n // 2] = np.where(RNG.integers(0, 2, n // 2), RNG.choice(special, n // 2), found[: n // 2])
    near = ptx.dtype_of(kind).type(1) + RNG.integers(-3, 4, n // 4) * info.eps
    found[n // 2 : n // 2 + n // 4] = near.astype(ptx.dtype_of(kind)).view(f"u{size}")
    RNG.shuffle(found)
    return found


def nearest(exact: Fraction, kind: str) -> float:
    """Return a nonzero number rounded once, to nearest even."""
    info = np.finfo(ptx.dtype_of(kind))
    magnitude = abs(exact)
    exponent = magnitude.numerator.bit_length() - magnitude.denominator.bit_length()
    exponent += magnitude >= Fraction(2) ** (exponent + 1)
    exponent -= magnitude < Fraction(2) ** exponent
    unit = Fraction(2) ** (max(exponent, int(info.minexp)) - info.nmant)
    rounded = round(magnitude / unit) * unit
    value = math.inf if rounded > Fraction(float(info.max)) else float(rounded)
    return value if exact > 0 else -value


def same(actual: np.ndarray, expected: np.ndarray) -> bool:
    unsigned = f"u{actual.itemsize}"
    both = np.isnan(actual) & np.isnan(expected)
    return bool(np.all((actual.view(unsigned) == expected.view(unsigned)) | both))


EXACT = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "div": lambda a, b: a / b if b else None,
    "fma": lambda a, b, c: a * b + c,
}


@pytest.mark.parametrize("kind", ["f32", "f64"])
@pytest.mark.parametrize("name", EXACT)
def test_arithmetic_rounds_once(name: str, kind: str) -> None:
    operands = [bits(2500, kind) for _ in range(2 + (name == "fma"))]
    function, groups = ptx.find(f"{name}.rn.{kind}")
    with np.errstate(all="ignore"):
        got = function(*groups, *operands).view(ptx.dtype_of(kind))
    checked = 0
    for *values, result in zip(*(one.view(ptx.dtype_of(kind)).tolist() for one in operands), got.tolist(), strict=True):
        if not all(map(math.isfinite, values)):
            continue
        exact = EXACT[name](*map(Fraction, values))
        if exact:
            assert result == nearest(exact, kind), values
            checked += 1
        elif exact is not None:
            assert result == 0
    assert checked > 400


@pytest.mark.parametrize("kind", ["f32", "f64"])
def test_roots_are_rounded_once(kind: str) -> None:
    function, groups = ptx.find(f"sqrt.rn.{kind}")
    values = bits(2500, kind)
    with np.errstate(all="ignore"):
        got = function(*groups, values).view(ptx.dtype_of(kind))
    for value, root in zip(values.view(ptx.dtype_of(kind)).tolist(), got.tolist(), strict=True):
        if not (math.isfinite(value) and value > 0):
            continue
        kind_ = ptx.dtype_of(kind).type
        below, above = (Fraction(float(np.nextafter(kind_(root), kind_(end)))) for end in (0, np.inf))
        low, high = (Fraction(root) + below) / 2, (Fraction(root) + above) / 2
        assert low**2 <= Fraction(value) <= high**2


@pytest.mark.parametrize(("source", "to"), [("f32", "f16"), ("f64", "f32"), ("f16", "f32"), ("f32", "f64")])
def test_casts_round_once(source: str, to: str) -> None:
    values = bits(4000, source)
    if (source, to) == ("f32", "f16"):
        every = np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float32).view(np.uint32)
        values = np.concatenate([values, *(every[::8] + np.uint32(delta) for delta in (0, 0xFFF, 0x1000, 0x1001))])
    function, groups = ptx.find(f"cvt.{'rn.' if to < source else ''}{to}.{source}")
    with np.errstate(all="ignore"):
        got = function(*groups, values).view(ptx.dtype_of(to))
    for value, result in zip(values.view(ptx.dtype_of(source)).tolist(), got.tolist(), strict=True):
        if math.isfinite(value) and value:
            assert result == nearest(Fraction(value), to)
        else:
            assert result == value or (math.isnan(value) and math.isnan(result))


def test_nans_are_those_of_the_gpu() -> None:
    function, groups = ptx.find("add.rn.f32")
    one = np.array([0x7FC00001, 0xFF800001], np.uint32)
    with np.errstate(all="ignore"):
        assert function(*groups, one, one).tolist() == [0x7FFFFFFF] * 2


def test_bits() -> None:
    a, b = bits(1000, "f32"), bits(1000, "f32")
    selector = RNG.integers(0, 1 << 16, 1000).astype(np.uint32)

    def call(name: str, *operands: np.ndarray) -> list[int]:
        function, groups = ptx.find(name)
        return function(*groups, *operands).tolist()

    def permuted(low: int, high: int, choice: int) -> int:
        source, result = (low | high << 32).to_bytes(8, "little"), []
        for place in range(4):
            nibble = choice >> 4 * place & 15
            byte = source[nibble & 7]
            result.append((255 if byte & 128 else 0) if nibble & 8 else byte)
        return int.from_bytes(result, "little")

    assert call("prmt.b32", a, b, selector) == [*map(permuted, a.tolist(), b.tolist(), selector.tolist())]
    assert call("brev.b32", a) == [int(f"{one:032b}"[::-1], 2) for one in a.tolist()]
    assert call("popc.b32", a) == [one.bit_count() for one in a.tolist()]
    halves = [
        (x + y & 0xFFFF) | ((x >> 16) + (y >> 16) & 0xFFFF) << 16 for x, y in zip(a.tolist(), b.tolist(), strict=True)
    ]
    assert call("add.s16x2", a, b) == halves
    begin, length = (RNG.integers(0, 32, 1000).astype(np.uint32) for _ in range(2))
    taken = [x >> y & (1 << z) - 1 for x, y, z in zip(a.tolist(), begin.tolist(), length.tolist(), strict=True)]
    assert call("bfe.u32", a, begin, length) == taken
    shift = RNG.integers(0, 40, 1000).astype(np.uint32)
    pairs = [*zip(a.tolist(), shift.tolist(), strict=True)]
    assert call("shl.b32", a, shift) == [x << s & 0xFFFFFFFF for x, s in pairs]
    assert call("shr.u32", a, shift) == [x >> s for x, s in pairs]
    signed = a.view(np.int32).tolist()
    assert call("shr.s32", a, shift) == [
        x >> min(s, 31) & 0xFFFFFFFF for x, s in zip(signed, shift.tolist(), strict=True)
    ]
    assert call("mad.wide.s32", a, b, a.astype(np.uint64)) == [
        x * y + z & (1 << 64) - 1 for x, y, z in zip(signed, b.view(np.int32).tolist(), a.tolist(), strict=True)
    ]
    assert call("setp.lt.s32", a, b) == [x < y for x, y in zip(signed, b.view(np.int32).tolist(), strict=True)]
    assert call("cvt.u16.u32", a) == [x & 0xFFFF for x in a.tolist()]
    assert call("cvt.s64.s32", a) == [x & (1 << 64) - 1 for x in signed]


@pytest.mark.parametrize(
    "name",
    [
        *(
            "add.f32",
            "mul.f32",
            "mul.rn.ftz.f32",
            "fma.rn.ftz.f32",
            "div.full.f32",
            "div.approx.f32",
            "sqrt.approx.f32",
        ),
        *("add.rz.f32", "cvt.rz.f32.f64", "cvt.rn.ftz.f16.f32", "mad.f32", "ex2.approx.f32", "rcp.approx.ftz.f32"),
        *("max.f32", "min.ftz.f32", "cvt.rn.bf16.f32", "atom.global.add.f32"),
    ],
)
def test_what_may_be_contracted_or_is_approximate_is_not_known(name: str) -> None:
    with pytest.raises(ptx.ExecutionError, match="not known"):
        ptx.find(name)


# ---- threads, and what a debugger would find ---------------------------------------------------------------------


def test_two_programs_write_their_parts() -> None:
    out = np.zeros(128, np.uint32)
    run("st.global.b32 [%rd3], %r3;", out, grid=2)
    assert out.tolist() == list(range(128))


def test_programs_part_ways_and_loop() -> None:
    """Each adds its own number as often as it is large."""
    out = np.zeros(64 * 5, np.uint32)
    run(
        """
        mov.b32 %r5, 0; mov.b32 %r4, %r2;
        setp.eq.b32 %p1, %r4, 0;
        @%p1 bra $L_2;
    $L_1:
        add.s32 %r5, %r5, %r2; add.s32 %r4, %r4, -1;
        setp.ne.b32 %p2, %r4, 0;
        @%p2 bra $L_1;
    $L_2:
        st.global.b32 [%rd3], %r5;
        """,
        out,
        grid=5,
    )
    assert out.reshape(5, 64).tolist() == [[n * n] * 64 for n in range(5)]


def test_vectors_and_predicates() -> None:
    data = np.arange(256, dtype=np.uint32)
    run(
        """
        and.b32 %r4, %r1, 1; setp.eq.b32 %p1, %r4, 0;
        mov.u32 %r5, 0x7; mov.u32 %r6, 0x7; mov.u32 %r7, 0x7; mov.u32 %r8, 0x7;
        @%p1 ld.global.v4.b32 { %r5, %r6, %r7, %r8 }, [ %rd3 + 0 ];
        @!%p1 st.global.v2.b32 [ %rd3 + 8 ], { %r5, %r6 };
        @%p1 st.global.v4.b32 [ %rd3 + 0 ], { %r8, %r7, %r6, %r5 };
        """,
        data,
        size=16,
    )
    for row, four in enumerate(data.reshape(64, 4).tolist()):
        first = 4 * row
        assert four == ([first, first + 1, 7, 7] if row % 2 else [first + 3, first + 2, first + 1, first])


def test_signs_are_extended() -> None:
    data = np.array([-1, 5] * 32, np.int32)
    wide = np.zeros(64, np.int64)
    run(
        SHARED + "ld.global.b32 %r8, [%rd3]; st.shared.b32 [%r5], %r8; ld.shared.s32 %rd5, [%r5];"
        "ld.param.b64 %rd6, [p1]; mad.wide.u32 %rd7, %r1, 8, %rd6; st.global.b64 [%rd7], %rd5;",
        data,
        wide,
        shared=256,
    )
    assert np.array_equal(wide, data)


def test_halves_are_compared_in_pairs() -> None:
    data = np.array([[1.0, np.nan], [np.nan, 1.0]] * 32, np.float16)
    run(
        "ld.global.b32 %r4, [%rd3]; setp.nan.f16x2 %p1|%p2, %r4, %r4;"
        "selp.b32 %r5, 1, 0, %p1; selp.b32 %r6, 2, 0, %p2; or.b32 %r7, %r5, %r6; st.global.b32 [%rd3], %r7;",
        data,
    )
    assert data.view(np.uint32).reshape(-1).tolist() == [2, 1] * 32


def test_lanes_exchange() -> None:
    out = np.zeros(64, np.uint32)
    run(
        "shfl.sync.bfly.b32 %r4, %r1, 5, 31, -1; xor.b32 %r6, %r1, 3;"
        "shfl.sync.idx.b32 %r5, %r4, %r6, 31, -1; st.global.b32 [%rd3], %r5;",
        out,
    )
    assert out.tolist() == [n ^ 6 for n in range(64)]
    run(
        "and.b32 %r4, %r1, 16; mov.b32 %r6, 65535; shl.b32 %r5, %r6, %r4;"
        "redux.sync.max.s32 %r7, %r1, %r5; st.global.b32 [%rd3], %r7;",
        out,
    )
    assert out.tolist() == [n | 15 for n in range(64)]
    run("redux.sync.add.s32 %r4, %r1, -1; st.global.b32 [%rd3], %r4;", out)
    assert out.tolist() == [sum(range(32))] * 32 + [sum(range(32, 64))] * 32


def test_shared_memory_and_barriers() -> None:
    out = np.zeros(128, np.uint32)
    body = "st.shared.b32 [%r5], %r3; bar.sync 0; ld.shared.b32 %r7, [%r6+0]; st.global.b32 [%rd3], %r7;"
    run(SHARED + body, out, grid=2, shared=256)
    assert out.tolist() == [n ^ 1 for n in range(128)]


def test_threads_may_write_the_same_to_shared_memory() -> None:
    out = np.ones(64, np.uint32)
    body = "st.shared.b32 [%r4], %r2; bar.sync 0; ld.shared.b32 %r7, [%r4]; st.global.b32 [%rd3], %r7;"
    run(SHARED + body, out, shared=256)
    assert not out.any()


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("st.global.b32 [%rd3+4], %r3;", "1 threads access 4 bytes outside"),
        ("st.global.b32 [%rd3+-4], %r3;", "1 threads access 4 bytes outside"),
        ("ld.global.v4.b32 {%r4, %r5, %r6, %r7}, [%rd3];", "multiple of 16"),
        ("ld.global.b64 %rd4, [%rd3];", "multiple of 8"),
        ("st.global.b32 [%rd1], %r3;", "two threads write the same byte"),
        ("st.global.b32 [%rd3], %r3; ld.global.b32 %r4, [%rd1];", "a race: a read"),
        ("ld.global.b32 %r4, [%rd1]; st.global.b32 [%rd3], %r3;", "a race: a write"),
        ("setp.lt.s32 %p1, %r1, 5; @%p1 bra $L_1; $L_1:\n", "part ways"),
        ("setp.lt.s32 %p1, %r1, 5; @%p1 ret;", "return before"),
        ("setp.lt.s32 %p1, %r1, 5; @%p1 bar.sync 0;", "not all threads wait"),
        ("bar.warp.sync -1;", "not all threads wait"),
        ("shfl.sync.bfly.b32 %r4, %r1, 16, 31, 65535;", "not in its own mask"),
        ("add.s32 %r4, %r9, 1;", "%r9 has no value"),
        ("fma.rn.ftz.f32 %r4, %r1, %r1, %r1;", "fma.rn.ftz.f32 is not known"),
        ("ld.global.nc.b32 %r4, [%rd3];", "not known"),
        (SHARED + "ld.shared.b32 %r7, [%r5];", "nothing has written"),
        (SHARED + "st.shared.b32 [%r5], %r3; ld.shared.b32 %r7, [%r6];", "a race: a read"),
        (
            SHARED + "st.shared.b32 [%r5], %r3; bar.sync 0; ld.shared.b32 %r7, [%r6]; st.shared.b32 [%r5], %r7;",
            "a race: a write",
        ),
        (SHARED + "st.shared.b32 [%r5+4], %r3;", "out of range"),
        (SHARED + "st.shared.b32 [%r4], %r3;", "two threads write different values"),
        (SHARED + "st.shared.b32 [%r4], %r2; ld.shared.b32 %r7, [%r4];", "a race: a read"),
    ],
)
def test_faults(body: str, message: str) -> None:
    with pytest.raises(ptx.ExecutionError, match=message):
        run(body.replace("; $L_1:", ";\n$L_1:"), np.zeros(64, np.uint32), shared=256)


def test_readers_are_ordered_by_a_barrier_in_a_program_only() -> None:
    body = "ld.global.b32 %r4, [%rd1]; bar.sync 0; setp.eq.b32 %p1, %r1, 0; @%p1 st.global.b32 [%rd1], %r1;"
    run(body, np.zeros(64, np.uint32))
    with pytest.raises(ptx.ExecutionError, match="a race: a write"):
        run(body, np.zeros(128, np.uint32), grid=2)
