"""What the executor of PTX computes, against exact fractions, and what it finds in small programs."""

import numpy as np
import pytest
from support import ptx


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
    ptx.Run(kernel, range(grid), threads, shared, addresses, ptx.Memory(parts))


NOT_KNOWN = """
    add.f32 mul.f32 mul.rn.ftz.f32 fma.rn.ftz.f32 div.full.f32 div.approx.f32 sqrt.approx.f32 add.rz.f32 cvt.rz.f32.f64
    cvt.rn.ftz.f16.f32 mad.f32 ex2.approx.f32 rcp.approx.ftz.f32 max.f32 min.ftz.f32 cvt.rn.bf16.f32 atom.global.add.f32
"""


@pytest.mark.parametrize("name", NOT_KNOWN.split())
def test_what_may_be_contracted_or_is_approximate_is_not_known(name):
    with pytest.raises(ptx.ExecutionError, match="not known"):
        ptx.find(name)


def test_shared_memory_and_barriers():
    out = np.zeros(128, np.uint32)
    body = "st.shared.b32 [%r5], %r3; bar.sync 0; ld.shared.b32 %r7, [%r6+0]; st.global.b32 [%rd3], %r7;"
    run(SHARED + body, out, grid=2, shared=256)
    assert out.tolist() == [n ^ 1 for n in range(128)]


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
def test_faults(body, message):
    with pytest.raises(ptx.ExecutionError, match=message):
        run(body.replace("; $L_1:", ";\n$L_1:"), np.zeros(64, np.uint32), shared=256)


def test_readers_are_ordered_by_a_barrier_in_a_program_only():
    body = "ld.global.b32 %r4, [%rd1]; bar.sync 0; setp.eq.b32 %p1, %r1, 0; @%p1 st.global.b32 [%rd1], %r1;"
    run(body, np.zeros(64, np.uint32))
    with pytest.raises(ptx.ExecutionError, match="a race: a write"):
        run(body, np.zeros(128, np.uint32), grid=2)
