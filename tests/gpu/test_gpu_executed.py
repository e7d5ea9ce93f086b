"""The kernels as Triton compiles them for GPUs: accesses are wide, nothing spills; executed, they have the CPU's bits.

`support.ptx` executes the launches that production makes, as they are compiled for NVIDIA's GPUs, without one. It knows
no operation that would round otherwise, and notices accesses that a GPU would not allow. What NVIDIA's assembler makes
of them is not covered. Of AMD's instructions only the numbers are.
"""

import contextlib
import itertools
import math
import mmap
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import deepcopy
from dataclasses import fields, is_dataclass, replace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from support import gpu_variants, ptx
from support.deep import DEEP
from support.gpu_arrays import DEVICE, offsets_with_gaps
from support.gpu_checks import check_against_cpu, check_pack, check_scatter, stored_gradient, telling
from support.gpu_variants import LAUNCHES, Code, Compilers, Launch, Request, can_compile, noted_launches
from support.kernel_arrays import Job, make_segment, narrow
from support.ptx_faults import RULES, described
from support.strategies import Magnitudes

from superadam import gpu
from superadam.gpu import adam, language, pack, scatter
from superadam.kernels import native
from superadam.kernels.dtypes import DTYPES
from superadam.kernels.hyperparameters import Coefficients, Hyperparameters
from superadam.kernels.native import CHUNK, Dtype, Flag, Format, Pass

pytestmark = [pytest.mark.slow, pytest.mark.subprocess]
needs_compilers = pytest.mark.skipif(not can_compile(), reason="this Triton lacks compilers")
EXECUTES = DEVICE.type == "cpu"  # a GPU executes the kernels itself
executes = pytest.mark.skipif(not (can_compile() and EXECUTES), reason="lacks compilers, or has a GPU")

NVIDIA, AMD = ["sm_80", "sm_90", "sm_100"] if DEEP else ["sm_90"], ["gfx942"]
"""Targets. NVIDIA's differ in few instructions: sm_80 has shfl for redux.sync, sm_100 alone abs.f32 and f32x2."""

# ---- all variants are here -----------------------------------------------------------------------------------------


def test_variants_have_every_dtype_and_flag():
    assert set(DTYPES.values()) == set(Dtype) - {Dtype.NONE}
    assert Flag(0) in gpu_variants.COEFFICIENTS
    assert set(Flag) == {flag for flags in gpu_variants.COEFFICIENTS for flag in flags}


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
            if isinstance(value, bool) and constant not in language.AS_WRITTEN:
                assert {one[constant] for one in variants} == {False, True}, f"{name}'s {constant}"


# ---- what they are compiled to -------------------------------------------------------------------------------------


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


def check_adam_code(
    code: Code, target: str, gradient: torch.dtype, parameter: torch.dtype, form: Format, flags: Flag, aligned: bool
) -> None:
    state = torch.float64 if parameter == torch.float64 else torch.float32
    elements = 4
    assert code.threads * elements == adam.BLOCK
    each = 2 * elements  # in two branches
    check_arithmetic(
        code,
        f"f{8 * state.itemsize}",
        mul=each * (3 + (Flag.SCALE in flags) + (Flag.DECOUPLED in flags)),
        fma=each * (3 + (Flag.L2 in flags)),  # both forms of m are computed
        add=each * 3 + 2,  # and w - 1, once in each branch
        div=each * 2,
        sqrt=each,
    )
    dtypes = gpu_variants.stored_dtypes(state, form)
    kept = [dtype for name, dtype in dtypes.items() if "exponents" not in name]
    kept += [dtypes["exp_avg"]] * (Flag.AMSGRAD in flags)
    if aligned:
        check_vectors(code, "load", [*kept, gradient], elements)
        check_vectors(code, "store", [*kept, parameter], elements)


def check_pack_code(code: Code, target: str, source: torch.dtype, link: torch.dtype, sums: bool, aligned: bool) -> None:
    rows = pack.ROWS_AHEAD.value // (2 if sums and source != link else 1)
    elements = 2 if target in AMD else 4
    assert code.threads * elements == pack.CHUNKS_PER_PROGRAM * 16  # of a row
    folded = 8 + 4 + 2 + 1  # the lanes, pairwise
    check_arithmetic(code, "f64", fma=sums * 2 * rows * elements, add=sums * folded)
    if aligned:
        check_vectors(code, "load", [source], elements, rows)
        check_vectors(code, "store", [link], elements, rows)


def check_scatter_code(code: Code, target: str, dtype: torch.dtype, aligned: bool) -> None:
    check_arithmetic(code, "f32")
    if aligned:
        for what in ("load", "store"):
            check_vectors(code, what, [dtype], scatter.BLOCK // code.threads)


CODE_CHECKS = {"adam_kernel": check_adam_code, "pack_kernel": check_pack_code, "scatter_kernel": check_scatter_code}


def check_arithmetic(
    code: Code, real: str, mul: int = 0, fma: int = 0, add: int = 0, div: int = 0, sqrt: int = 0
) -> None:
    """Check that a thread of AMD's computes nothing else, in one dtype, and that every operation rounds once.

    What NVIDIA's would is executed.
    """
    if code.count(r"v_.*"):
        # An exact quotient or root is several instructions of AMD's.
        assert code.count(rf"v_div_fixup_{real}") == code.count(r"v_div_fixup.*") == div
        assert code.count(rf"v_rcp_{real}") == code.count(r"v_rcp.*") == div
        assert code.count("v_sqrt_f32" if real == "f32" else "v_rsq_f64") == code.count(r"v_(sqrt|rsq)_.*") == sqrt
        assert code.count_pairs(rf"v_mul(_mix)?_{real}", rf"v_pk_mul_{real}") == mul + div + 2 * sqrt
        fused = 5 * div + (2 if real == "f32" else 7) * sqrt
        sums = rf"v_(add|sub|subrev|fma|fmac|fmaak|fmamk|fma_mix)_{real}"
        assert code.count_pairs(sums, rf"v_pk_(add|fma)_{real}") == add + fma + fused
        assert code.count(rf"v_(pk_)?(add|sub|subrev|mul|fma\w*|div_\w+)_b?f(?!{real[1:]})\d\d") == 0


# ---- execution -----------------------------------------------------------------------------------------------------


def tensors_in(thing: Any) -> Iterator[torch.Tensor]:
    if isinstance(thing, torch.Tensor):
        yield thing
    elif isinstance(thing, list | tuple):
        yield from itertools.chain.from_iterable(map(tensors_in, thing))
    elif is_dataclass(thing):
        yield from itertools.chain.from_iterable(tensors_in(getattr(thing, one.name)) for one in fields(thing))


def execute(
    launch: Launch, code: Code, kernel: ptx.Kernel, parts: Iterable[tuple[int, int]], programs: Sequence[int]
) -> Counter[int]:
    """Make some programs of a launch, which may access these parts of memory and the tensors among its arguments."""
    assert launch.constants == code.constants
    parts = [*parts, *((one.data_ptr(), one.nbytes) for one in tensors_in(launch.arguments))]
    values = [one.data_ptr() if isinstance(one, torch.Tensor) else int(one) for one in launch.arguments]
    values += [0, 0]  # Triton adds two pointers, to memory that these kernels have none of
    return ptx.Run(kernel, programs, code.threads, code.shared, values, ptx.Memory(parts)).executed


@contextlib.contextmanager
def executing(code: Code) -> Iterator[Counter[int]]:
    """Let launches of one variant be executed meanwhile; yield how often each instruction is."""
    executed: Counter[int] = Counter()
    kernel = ptx.parse(code.ptx)

    def by_executor(function: Callable[..., None]) -> Callable[..., None]:
        def run(*arguments: Any) -> None:
            with noted_launches() as launches:
                function(*arguments)
            parts = [(one.data_ptr(), one.nbytes) for one in tensors_in(arguments)]
            for launch in launches:
                executed.update(execute(launch, code, kernel, parts, range(launch.grid[0])))

        return run

    with contextlib.ExitStack() as stack:
        for name in ("update", "pack_gradients", "scatter_values"):
            stack.enter_context(mock.patch.object(gpu, name, by_executor(getattr(gpu, name))))
        yield executed


# ---- what is compared ----------------------------------------------------------------------------------------------

KINDS = [
    *([Magnitudes.ORDINARY],) * 3,  # with each set of coefficients
    [Magnitudes.SPECIAL],
    [Magnitudes.WIDE, Magnitudes.ORDINARY],
    [Magnitudes.BITS],
    [Magnitudes.TINY, Magnitudes.ORDINARY, Magnitudes.TINY],
    [Magnitudes.TINY],
    [Magnitudes.HUGE, Magnitudes.WIDE],
    [Magnitudes.ORDINARY, Magnitudes.TINY],
]
"""Of the gradient, another one, the master, its moments, and so on in turn."""


def check_adam(gradient: torch.dtype, parameter: torch.dtype, form: Format, flags: Flag, aligned: bool) -> None:
    """Update segments of all kinds, with a whole block and a part of one, and short ones."""
    double = parameter == torch.float64
    sets = []
    for beta1, beta2, eps, scale, lr, step in (
        (0.9, 0.999, 1e-8, 0.3, 1e-3, 1),
        (0.3, 0.99, 1e-40, 2.0**-16, 1e-1, 17),
        (0.5, 0.5, 0.0, 1e10, 1e10, 2**40),
    ):
        hyper = Hyperparameters(lr, beta1, beta2, eps, 0.1, False, False, False)
        k = Coefficients.at_step(hyper, step, scale, double=double)
        sets.append(replace(k, flags=flags, decay=1 - 1e-4 if double else float(np.float32(1 - 1e-4))))
    multiple = 64 if Format.MOMENTS_8BIT in form else 1
    segments = []
    lengths = [1985 + number % 4 for number in range(len(KINDS))]  # a thread has four elements
    for number, (length, kinds) in enumerate([*zip(lengths, KINDS, strict=True), (1, KINDS[0]), (0, KINDS[0])]):
        length = -(-length // multiple) * multiple
        segment = make_segment(
            number, length, DTYPES[gradient], DTYPES[parameter], kinds=kinds, sprinkle=number % 3 == 2, form=form
        )
        if Flag.AMSGRAD not in flags:
            segment.arrays.pop("max_exp_avg_sq", None)
        segment.coefficients = number % 3
        if number in (1, 2):  # where the last bits of a change are not lost in a larger master
            for name in segment.arrays.keys() & {"master", "master_low"}:
                segment.arrays[name].view[:] = 0
            if Format.MASTER_24BIT in form:  # a change and its negative in 24 bits leave the bits that are cut off
                Job(Pass.UPDATE, [copied := deepcopy(segment)], sets).run(native.active_isa())
                segment.arrays["master"].view[:] = copied.arrays["master"].view ^ 0x8000
                segment.arrays["master_low"].view[:] = copied.arrays["master_low"].view
        segments.append(segment)
    check_against_cpu(Job(Pass.UPDATE, segments, sets), (0,) if aligned else (0, 1, 3))


def places_of(lengths: Sequence[int], aligned: bool) -> tuple[list[int], int]:
    if not aligned:
        return offsets_with_gaps(lengths, (3, 0, 40), [*range(len(lengths))][::-1])
    ends = list(itertools.accumulate(-(-length // 64) * 64 for length in lengths))
    return [0, *ends[:-1]], ends[-1]


def chunks_that_tell(seed: int, dtype: torch.dtype) -> np.ndarray:
    """Return a program's eight chunks, in which every element, each lane's sum and its rounding change the result.

    In half of them one lane is large, to which each square of its small elements adds less than its last bits.
    """
    rng = np.random.default_rng(seed)
    chunks = rng.standard_normal((8, CHUNK // 16, 16))
    chunks[:4] = 2.0**-11 * (1 + rng.random(chunks[:4].shape))
    for chunk, lane in enumerate((0, 5, 10, 15)):
        chunks[chunk, 0, lane] = 1.5 * 2**15
    chunks[6] = 2.0 ** rng.uniform(-26, -14, chunks[6].shape)  # halves without their last bits
    ends = np.array([65504.0, 2.0**128 - 2.0**120, np.inf, np.nan, 1.0])
    chunks[7] = rng.choice(np.concatenate([ends, -ends]), chunks[7].shape)
    return narrow(chunks.reshape(-1).astype(np.float64 if dtype == torch.float64 else np.float32), DTYPES[dtype])


def check_packing(source: torch.dtype, link: torch.dtype, sums: bool, aligned: bool) -> None:
    """Pack programs of whole chunks, and one with ends; also every half, or what lies beside ties."""
    lengths = [5 * CHUNK, 0, 3 * CHUNK, 1, 300, 17, 255, *range(2, 260 if DEEP else 6)]  # behind each nothing is read
    kinds, dtype = [Magnitudes.SPECIAL, *Magnitudes], DTYPES[source]
    stored = [whole := chunks_that_tell(0, source)]
    if (source.itemsize, link.itemsize) in ((2, 2), (2, 4), (4, 2)):
        stored.append(telling(dtype, DTYPES[link], step=4))
    for number, length in enumerate(lengths):
        stored.append(stored_gradient(number, length, kinds[number % len(kinds)], dtype, number % 2 == 0))
    stored += [one[:-1] for one in np.split(whole, 8)]
    places, numel = places_of([*map(len, stored)], aligned)
    check_pack(stored, dtype, DTYPES[link], places, numel, (0,) if aligned else (0, 1, 3), with_norm=sums)


def check_scattering(dtype: torch.dtype, aligned: bool) -> None:
    """Scatter whole blocks and parts, large and small; then some alone, behind which nothing may be read."""
    starts = (0,) if aligned else (0, 1, 3)
    lengths = [4096, 0, 1, 5, 4097, 9000, 4095, *range(2, 30)]
    check_scatter([dtype], lengths, *places_of(lengths, aligned), starts)
    for length in (*range(4097, 4105), *range(100, 4096, 128)):
        check_scatter([dtype], [length], [0], length, starts)


CHECKS = {"adam_kernel": check_adam, "pack_kernel": check_packing, "scatter_kernel": check_scattering}


def check(request: Request, code: Code) -> None:
    """Check that a variant is fit for any kernel; executed, it has the bits of the CPU, by every instruction."""
    assert code.relaxed == 0
    assert code.keeps_denormals
    assert code.count(r"v_(cvt_pkrtz|cvt_sr|exp|log|mad|mac|fract|dot).*_f\d\d.*") == 0
    assert code.count(r"(atom|red)\..*|.*_atomic_.*") == 0
    CODE_CHECKS[request.kernel](code, request.target, *request.arguments)
    if code.ptx and EXECUTES:
        with executing(code) as executed:
            CHECKS[request.kernel](*request.arguments)
        assert len(executed) == len(ptx.parse(code.ptx).instructions)
    assert code.spilled == 0  # last, so that what spills is executed, too


NAMES = {
    "adam_kernel": "gradient parameter form scale maximize decoupled l2 amsgrad round aligned",
    "pack_kernel": "source link sums aligned",
    "scatter_kernel": "dtype aligned",
}
"""What variants of the kernels differ in; arguments in `LAUNCHES`, but for the flags."""
REQUESTS: dict[str, Request] = {}
"""By the ids of cases."""


def word(name: str, value: Any) -> str:
    if isinstance(value, bool):
        return name if value else ""
    if isinstance(value, Format):
        return (value.name or "").lower() if value else ""
    return str(value)


def over(targets: Iterable[str], kernel: str, variants: Iterable[tuple[Any, ...]]) -> Callable[[Any], Any]:
    """Return the decorator of a test that runs over variants for each target, and finds its own in `REQUESTS`."""
    names, parameters = NAMES[kernel].split(), []
    for target, arguments in itertools.product(targets, variants):
        flags = [[flag in one for flag in Flag] if isinstance(one, Flag) else [one] for one in arguments]
        values = [target, *itertools.chain(*flags)]
        number = "-".join([kernel, *filter(None, map(word, ["", *names], values))])
        REQUESTS[number] = Request(target, kernel, arguments)
        parameters.append(pytest.param(*values, id=number))
    few = pytest.mark.covering(1)  # every value, not every pair: the compiler takes up to a second for each variant
    marks = pytest.mark.usefixtures("target", *names), pytest.mark.parametrize(("target", *names), parameters)
    return lambda test: needs_compilers(few(marks[0](marks[1](test))))


@pytest.fixture(scope="module")
def compilers(request, tmp_path_factory):
    cases = [one.callspec.id for one in request.session.items if hasattr(one, "callspec")]
    requests = [*(REQUESTS[one] for one in cases if one in REQUESTS), *VAST.values()]
    compilers = Compilers([*dict.fromkeys(requests)], tmp_path_factory.mktemp("triton"))
    yield compilers
    compilers.close()


@pytest.fixture
def variant(request, compilers):
    """Return a request, and what it was compiled to."""
    one = REQUESTS[request.node.callspec.id]
    return one, compilers.code(one)


def check_over(targets: Iterable[str], kernel: str, variants: Iterable[tuple[Any, ...]]) -> Callable[..., None]:
    @over(targets, kernel, variants)
    def test(variant: tuple[Request, Code]) -> None:
        check(*variant)

    return test  # type: ignore[no-any-return]


test_adam_kernel = check_over(NVIDIA, "adam_kernel", gpu_variants.ADAM)
test_adam_kernel_for_amd = check_over(AMD, "adam_kernel", gpu_variants.ADAM)
test_pack_kernel = check_over(NVIDIA, "pack_kernel", gpu_variants.PACK)
test_pack_kernel_for_amd = check_over(AMD, "pack_kernel", gpu_variants.PACK)
test_scatter_kernel = check_over(NVIDIA, "scatter_kernel", gpu_variants.SCATTER)
test_scatter_kernel_for_amd = check_over(AMD, "scatter_kernel", gpu_variants.SCATTER)


@over(["sm_100"], "adam_kernel", [one for one in gpu_variants.ADAM if Format.MOMENTS_8BIT in one[2]])
def test_adam_kernel_with_8bit_moments(variant):
    """`abs.f32`, which only this target has, may make any NaN: the bits depend on none."""
    assert "abs.f32" in variant[1].ptx
    for nan in (0x7FFFFFFF, 0xFFFFFFFF):
        with mock.patch.dict(ptx.CANONICAL_NAN, f32=nan):
            check(*variant)


# ---- more than 32 bits ---------------------------------------------------------------------------------------------

FAR = 2**32
COMPACT = Format.MOMENTS_8BIT | Format.MASTER_24BIT
VAST = {
    "adam": Request("sm_90", "adam_kernel", (torch.float32, torch.float32, Format.PLAIN, Flag(0), True)),
    "adam of compact state": Request("sm_90", "adam_kernel", (torch.bfloat16, torch.bfloat16, COMPACT, Flag(0), True)),
    "pack": Request("sm_90", "pack_kernel", (torch.bfloat16, torch.bfloat16, True, True)),
    "scatter": Request("sm_90", "scatter_kernel", (torch.bfloat16, True)),
}
"""Variants with all kinds of addresses: of elements, of blocks of state, of chunks; other tests use two of them."""


def vast(numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Return address space, which gets memory where it is written."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000  # MAP_NORESERVE, which Python before 3.13 does not name
    return torch.frombuffer(mmap.mmap(-1, numel * dtype.itemsize, flags), dtype=dtype)


def launch_of(request: Request, numel: int, make: Callable[..., torch.Tensor]) -> tuple[Launch, list[torch.Tensor]]:
    """Return the launch that production makes for tensors of so many elements, and all of its arrays."""
    arrays = []

    def made(numel: int, dtype: torch.dtype, aligned: bool = True) -> torch.Tensor:
        arrays.append(make(numel, dtype=dtype))
        return arrays[-1]

    with noted_launches() as launches, mock.patch.object(gpu_variants, "tensor", made):
        LAUNCHES[request.kernel](*request.arguments, numel)
    (launch,) = launches
    return launch, arrays


@executes
@pytest.mark.parametrize("name", VAST)
def test_tensors_of_more_than_32_bits(compilers, name):
    """Some of the programs run, which may access their parts alone; a small tensor of these gets the same bits."""
    code = compilers.code(VAST[name])
    kernel = ptx.parse(code.ptx)
    numel, block = FAR + 5056, code.constants.get("BLOCK") or code.constants["CHUNKS"] * CHUNK
    programs = [*dict.fromkeys([FAR // 2 // block - 1, FAR // 2 // block, FAR // block, (numel - 1) // block])]
    windows = [(one * block, min((one + 1) * block, numel)) for one in programs]
    launch, whole = launch_of(VAST[name], numel, vast)
    assert launch.grid == (programs[-1] + 1,)
    expected, small = launch_of(VAST[name], sum(end - begin for begin, end in windows), torch.empty)
    generator, parts = torch.Generator().manual_seed(0), []
    for few, array in zip(small, whole, strict=True):
        few.copy_(torch.randn(len(few), generator=generator).square().mul(100))
        each = round(numel / len(array))  # elements, for which the array has one entry
        parts.append([array[begin // each : -(-end // each)] for begin, end in windows])
        for part, values in zip(parts[-1], few.split([*map(len, parts[-1])]), strict=True):
            part.copy_(values)
    execute(expected, code, kernel, [(one.data_ptr(), one.nbytes) for one in small], range(expected.grid[0]))
    execute(launch, code, kernel, [(one.data_ptr(), one.nbytes) for one in itertools.chain(*parts)], programs)
    for few, there in zip(small, parts, strict=True):
        assert torch.equal(torch.cat(there).view(torch.uint8), few.view(torch.uint8)), few.dtype


# ---- planted faults ------------------------------------------------------------------------------------------------

PARTS, PLANTS, SHARE = range(2), 150, 0.95

SURVIVORS = {
    **dict.fromkeys(
        (
            "adam_kernel `vmax = tl.where((vmax < v) | (v != v), v, vmax)` predicates: setp.gt.f32 becomes setp.ge.f32",
            "adam_kernel `vmax = tl.where((vmax < v) | (v != v), v, vmax)` predicates: setp.gt.f64 becomes setp.ge.f64",
        ),
        "where both are equal, either has these bits, as squares have no sign",
    ),
    "adam_kernel `if rest >= BLOCK:` predicates: setp.lt.s64 becomes setp.le.s64": (
        "a whole block with masks gets the same values"
    ),
    "scatter_kernel `if rest >= BLOCK:  # without masks loads can be as wide as the addresses allow` predicates: "
    "setp.lt.s64 becomes setp.le.s64": "a whole block with masks gets the same values",
    "scatter_kernel `tl.store(target + index, tl.load(source + index, index < rest), index < rest)` operands: or.b32, "
    "of another register": "eight times a thread's number, before the bits are masked off that no thread of 128 has",
    "pack_kernel `stored = tl.load(source + index, index < rest, other=0) if IS_PARTIAL else tl.load(source + index)` "
    "operators: shl.b16 becomes shr.u16": "the bit of the last one in a word of masks, whose load asks its predicate",
    "pack_kernel `for first in range(0, rows, ahead):` predicates: setp.lt.s64 becomes setp.le.s64": (
        "once more round the loop, in which every element is masked"
    ),
    "pack_kernel `nonfinite += (exponent == 0xFF).to(tl.int32)` predicates: setp.gt.u16 becomes setp.ge.u16": (
        "twice the bits of a half are compared with an odd number, which none of them equals"
    ),
}
"""Faults that change nothing that anybody sees, and why; `support.ptx_faults.described` says what their names hold."""


def chosen_requests() -> list[Request]:
    """Return variants of all kernels, mostly of the update, for all targets."""
    choices = random.Random(0)
    made = [("adam_kernel", one) for one in choices.sample(gpu_variants.ADAM, 8)]
    made += [("pack_kernel", one) for one in choices.sample(gpu_variants.PACK, 4)]
    made += [("scatter_kernel", one) for one in choices.sample(gpu_variants.SCATTER, 2)]
    return [Request(("sm_90", "sm_80", "sm_100")[number % 3], *one) for number, one in enumerate(made)]


class HangError(Exception):
    """A check executes more than twice as many instructions as without a fault."""


def reason_of(request: Request, code: Code, kernel: ptx.Kernel, most: float) -> tuple[str | None, int]:
    """Return what notices a fault, None where nothing does, and how many instructions were executed, at `most`."""
    guard, count = ptx.Run._guard, itertools.count(1)

    def counted(run: ptx.Run, instruction: ptx.Instruction) -> Any:
        if next(count) > most:
            raise HangError
        return guard(run, instruction)

    reason = None
    try:
        with (
            mock.patch.object(ptx, "parse", return_value=kernel),
            mock.patch.object(ptx.Run, "_guard", counted),
            executing(code),
        ):
            CHECKS[request.kernel](*request.arguments)
    except ptx.ExecutionError as error:
        reason = "refused" if "not known" in str(error) else "executor"
    except AssertionError:
        reason = "bits"
    except Exception as error:  # numpy's, of numbers that fit nothing
        reason = type(error).__name__
    return reason, next(count)


@executes
@pytest.mark.deep
@pytest.mark.parametrize("part", PARTS)
def test_planted_faults_are_noticed(part, tmp_path):
    """Also by refusing what is no longer an instruction that is known to round as written."""
    torch.set_num_threads(1)
    every = chosen_requests()
    compilers = Compilers(every, tmp_path, together=7)
    choice, most = random.Random(part).choice, dict[Request, int]()
    outcomes: Counter[tuple[str, str]] = Counter()
    survivors = []
    while outcomes.total() < PLANTS:
        request, rule = choice(every), RULES[outcomes.total() % len(RULES)]
        code = compilers.code(request)
        if request not in most:
            reason, executed = reason_of(request, code, ptx.parse(code.ptx), math.inf)
            assert reason is None
            most[request] = 2 * executed
        kernel = ptx.parse(code.ptx)
        changes = [*rule(kernel)]
        if not changes:  # as roundings where only bytes are moved
            continue
        at, changed = choice(changes)
        original, kernel.instructions[at] = kernel.instructions[at], changed
        reason, _ = reason_of(request, code, kernel, most[request])
        outcomes[rule.__name__, reason or "nothing"] += 1
        if reason is None:
            survivors.append(described(request.kernel, rule, original, changed))
    compilers.close()
    lines = [f"{rule}: {reason} {count}" for (rule, reason), count in sorted(outcomes.items())]
    lines += [f"{one}: {SURVIVORS.get(one, 'not explained')}" for one in survivors]
    sys.stdout.write("\n".join(["", *lines, ""]))
    assert {*survivors} <= SURVIVORS.keys()
    assert len(survivors) <= (1 - SHARE) * PLANTS
