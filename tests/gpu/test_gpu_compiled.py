"""What every variant of the kernels becomes for NVIDIA's and AMD's GPUs: wide accesses, nothing spills."""

import itertools
import os
from collections import Counter
from collections.abc import Iterable

import pytest
import support.gpu_arrays  # noqa: F401  decides how kernels run, before superadam.gpu is imported
import torch
from support import gpu_variants
from support.gpu_checks import ADAM_NAMES, adam_values, cases, request_of, requests_of
from support.gpu_variants import LAUNCHES, Code, noted_launches

from superadam.gpu import adam, pack, scatter
from superadam.kernels.dtypes import DTYPES
from superadam.kernels.native import Dtype, Flag

pytestmark = [pytest.mark.slow, pytest.mark.subprocess]

DEEP = os.environ.get("SUPERADAM_DEEP") == "1"
CHOSEN = [*gpu_variants.TARGETS] if DEEP else ["sm_90", "gfx942"]
"""Targets. NVIDIA's differ in few instructions: sm_80 has shfl for redux.sync, sm_100 alone abs.f32 and f32x2."""

needs_compilers = pytest.mark.skipif(not gpu_variants.can_compile(), reason="this Triton lacks compilers")

# ---- all variants are here -----------------------------------------------------------------------------------------


def test_variants_have_every_dtype_and_flag():
    assert set(DTYPES.values()) == set(Dtype) - {Dtype.NONE}
    assert Flag(0) in gpu_variants.COEFFICIENTS
    assert set(Flag) == {flag for flags in gpu_variants.COEFFICIENTS for flag in flags}


@pytest.mark.parametrize("number", range(2, len(DTYPES)))
def test_dtypes_of_any_number_are_packed_alike(number):
    every = gpu_variants.SOURCES[-1]
    for sources, link in itertools.product(itertools.combinations(every, number), every):
        with noted_launches() as launches:
            LAUNCHES["pack_kernel"](sources, link, True, True)
            LAUNCHES["pack_kernel"](every, link, True, True)
        assert launches[0].constants == launches[1].constants


def test_variants_are_all_distinct_and_hold_every_constant():
    """No kernel is left out, and of no constant only one value is compiled."""
    seen = {}
    for name, table in zip(LAUNCHES, (gpu_variants.ADAM, gpu_variants.PACK, gpu_variants.SCATTER), strict=True):
        with noted_launches() as launches:
            for arguments in table:
                LAUNCHES[name](*arguments)
        assert len(launches) == len(table)
        for launch in launches:
            seen.setdefault(launch.name, []).append(dict(launch.constants))
    assert seen.keys() == gpu_variants.KERNELS.keys() == LAUNCHES.keys()
    for name, variants in seen.items():
        assert len({tuple(one.items()) for one in variants}) == len(variants)
        for constant, value in variants[0].items():
            if isinstance(value, bool) and constant != "enable_fp_fusion":
                assert {one[constant] for one in variants} == {False, True}, f"{name}'s {constant}"


# ---- what they are compiled to -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def compilers(request, tmp_path_factory):
    """Compile what the chosen tests look up."""
    compilers = gpu_variants.Compilers(requests_of(request), tmp_path_factory.mktemp("triton"))
    yield compilers
    compilers.close()


@pytest.fixture
def code(request, compilers):
    """Return what the variant of a test was compiled to, which is fit for every kernel."""
    code = compilers.code(request_of(request.node))
    assert code.relaxed == 0
    assert code.keeps_denormals
    assert code.spilled == 0
    assert code.count(r"v_(cvt_pkrtz|cvt_sr|exp|log|mad|mac|fract|dot).*_f\d\d.*") == 0
    assert code.count(r"(atom|red)\..*|.*_atomic_.*") == 0
    return code


def moved(code: Code, load: str, size: int) -> int:
    """Return how many vectors of `size` bytes are loaded ("load") or stored ("store")."""
    parts = "|".join(rf"v{size * 8 // bits}\.b{bits}" for bits in (8, 16, 32, 64) if size * 8 > bits)
    parts += r"|b32" * (size == 4)
    ptx = rf"{load.replace('load', 'ld').replace('store', 'st')}\.global\b.*\.({parts})"
    kind = "global" if code.count(r"global_store.*") else "buffer"
    word = {2: "short", 4: "dword", 8: "dwordx2", 16: "dwordx4"}[size]
    return code.count(ptx) + code.count(f"{kind}_{load}_{word}")


def check_vectors(code: Code, load: str, dtypes: Iterable[torch.dtype], elements: int, times: int = 1) -> None:
    """Check that a thread moves neighbouring elements in as few vectors of at most 16 bytes as hold them."""
    vectors: Counter[int] = Counter()
    for dtype in dtypes:
        size = min(16, elements * dtype.itemsize)
        vectors[size] += times * elements * dtype.itemsize // size
    for size, number in vectors.items():
        assert moved(code, load, size) >= number, f"{load}s of {size} bytes"


@needs_compilers
@pytest.mark.covering(1)
@cases(CHOSEN, ADAM_NAMES, adam_values(gpu_variants.ADAM))
def test_adam_kernel(code, target, gradient, parameter, form, scale, maximize, decoupled, l2, amsgrad, round, aligned):
    state = torch.float64 if parameter == torch.float64 else torch.float32
    elements = 4
    assert code.threads * elements == adam.BLOCK
    each = 2 * elements  # in two branches
    products, fmas, sums = 3 + scale + decoupled, 3 + l2, 3  # both forms of m are computed
    check_arithmetic(
        code,
        f"f{8 * state.itemsize}",
        mul=each * products,
        fma=each * fmas,
        add=each * sums + 2,  # and w - 1, once in each branch
        div=each * 2,
        sqrt=each,
    )
    dtypes = gpu_variants.stored_dtypes(state, form)
    kept = [dtype for name, dtype in dtypes.items() if "exponents" not in name] + [dtypes["exp_avg"]] * amsgrad
    if aligned:
        check_vectors(code, "load", [*kept, gradient], elements)
        check_vectors(code, "store", [*kept, parameter], elements)


@needs_compilers
@pytest.mark.covering(1)
@cases(CHOSEN, "sources link sums aligned", gpu_variants.PACK)
def test_pack_kernel(code, target, sources, link, sums, aligned):
    is_large = len(sources) > 1 or (sums and sources != (link,))
    rows = pack.ROWS_AHEAD.value // (2 if is_large else 1)
    elements = 2 if target == "gfx942" else 4
    assert code.threads * elements == pack.CHUNKS_PER_PROGRAM * 16  # of a row
    folded = 8 + 4 + 2 + 1  # the lanes, pairwise
    check_arithmetic(code, "f64", fma=sums * 2 * rows * elements, add=sums * folded)
    if aligned:
        check_vectors(code, "load", sources, elements, rows)
        check_vectors(code, "store", [link], elements, rows)


@needs_compilers
@pytest.mark.covering(1)
@cases(CHOSEN, "dtype aligned", gpu_variants.SCATTER)
def test_scatter_kernel(code, target, dtype, aligned):
    check_arithmetic(code, "f32")
    elements = scatter.BLOCK // code.threads
    if aligned:
        check_vectors(code, "load", [dtype], elements)
        check_vectors(code, "store", [dtype], elements)


def check_arithmetic(
    code: Code, real: str, mul: int = 0, fma: int = 0, add: int = 0, div: int = 0, sqrt: int = 0
) -> None:
    """Check that a thread of AMD's computes nothing else, in one dtype, and that every operation rounds once.

    `test_gpu_executed.py` executes what NVIDIA's would.
    """
    if code.count(r"v_.*"):
        # An exact quotient or root is several instructions of AMD's.
        assert code.count(rf"v_div_fixup_{real}") == code.count(r"v_div_fixup.*") == div
        assert code.count(rf"v_rcp_{real}") == code.count(r"v_rcp.*") == div
        estimates = "v_sqrt_f32" if real == "f32" else "v_rsq_f64"
        assert code.count(estimates) == code.count(r"v_(sqrt|rsq)_.*") == sqrt
        assert code.count_pairs(rf"v_mul(_mix)?_{real}", rf"v_pk_mul_{real}") == mul + div + 2 * sqrt
        fused = 5 * div + (2 if real == "f32" else 7) * sqrt
        sums = rf"v_(add|sub|subrev|fma|fmac|fmaak|fmamk|fma_mix)_{real}"
        assert code.count_pairs(sums, rf"v_pk_(add|fma)_{real}") == add + fma + fused
        assert code.count(rf"v_(pk_)?(add|sub|subrev|mul|fma\w*|div_\w+)_b?f(?!{real[1:]})\d\d") == 0
