"""The kernels as Triton compiles them for NVIDIA's GPUs, executed without one, leave the bits that the CPU's leave.

`support.ptx` executes the launches that production makes. It knows no operation that would round otherwise, and notices
accesses that a GPU would not allow. What NVIDIA's assembler makes of them is not covered.
"""

from __future__ import annotations

import contextlib
import itertools
import mmap
import os
import random
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from support import ptx
from support.gpu_arrays import DEVICE, Placed, needs_triton, offsets_with_gaps
from support.gpu_checks import (
    cases,
    check_against_cpu,
    check_pack,
    request_of,
    requests_of,
    stored_gradient,
)
from support.gpu_variants import (
    ADAM,
    PACK,
    SCATTER,
    Code,
    Compilers,
    Launch,
    Request,
    can_compile,
    noted_launches,
)
from support.kernel_arrays import STORAGE, Job, make_segment, widen
from support.ptx_faults import RULES, shown
from support.strategies import Magnitudes

from superadam import gpu
from superadam.kernels.dtypes import DTYPES
from superadam.kernels.hyperparameters import Coefficients, Hyperparameters
from superadam.kernels.native import CHUNK, Flag, Format, Pass

pytestmark = [
    pytest.mark.slow,
    pytest.mark.subprocess,
    needs_triton,
    pytest.mark.skipif(not can_compile(), reason="this Triton lacks compilers"),
    pytest.mark.skipif(DEVICE.type != "cpu", reason="a GPU executes the kernels itself"),
]

CHOSEN = ["sm_80", "sm_90", "sm_100"] if os.environ.get("SUPERADAM_DEEP") == "1" else ["sm_90"]

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
    return ptx.launch(kernel, programs, code.threads, code.shared, values, ptx.Memory(parts))


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
        k = Coefficients.at_step(hyper, step, scale, double=double, compact=bool(form))
        sets.append(replace(k, flags=flags, decay=1 - 1e-4 if double else float(np.float32(1 - 1e-4))))
    multiple = 64 if Format.MOMENTS_8BIT in form else 1
    segments = []
    for number, (length, kinds) in enumerate([*((1985, kinds) for kinds in KINDS), (1, KINDS[0]), (0, KINDS[0])]):
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
        segments.append(segment)
    check_against_cpu(Job(Pass.UPDATE, segments, sets), (0,) if aligned else (0, 1, 3))


def places_of(lengths: Sequence[int], aligned: bool) -> tuple[list[int], int]:
    """Return where tensors begin in a buffer, and its length."""
    if not aligned:
        return offsets_with_gaps(lengths, (3, 0, 40), [*range(len(lengths))][::-1])
    ends = list(itertools.accumulate(-(-length // 64) * 64 for length in lengths))
    return [0, *ends[:-1]], ends[-1]


def half_patterns(source: torch.dtype, link: torch.dtype) -> np.ndarray:
    """Return every half, or fp32 halfway between some halves of `link` and next to that, in sixteen chunks."""
    every = np.arange(1 << 16, dtype=np.uint16)
    if source != torch.float32:
        return every
    halves = widen(every[::4], DTYPES[link]).view(np.uint32)
    tie = np.uint32(0x1000 if link == torch.float16 else 0x8000)
    beside = [halves, halves | tie, halves | tie - np.uint32(1), halves | tie + np.uint32(1)]
    beside[0][:1024] = ((np.arange(1024) + 0.5) * 2.0**-24).astype(np.float32).view(np.uint32)  # denormal ties
    return np.concatenate(beside).view(np.float32)


def check_packing(sources: Sequence[torch.dtype], link: torch.dtype, sums: bool, aligned: bool) -> None:
    """Pack programs of whole chunks, and one with ends; of one dtype also every half, or what lies beside ties."""
    lengths = [5 * CHUNK, 0, 3 * CHUNK, 1, 300, 17, 255, *range(2, 6)]
    lengths += [2 * CHUNK - 1] * (len(sources) if len(sources) > 1 else 0)  # a whole and a part of each dtype
    dtypes = [DTYPES[sources[number % len(sources)]] for number in range(len(lengths))]
    kinds = [Magnitudes.SPECIAL, *Magnitudes]
    stored = [
        stored_gradient(number, length, kinds[number % len(kinds)], dtype, number % 2 == 0)
        for number, (length, dtype) in enumerate(zip(lengths, dtypes, strict=True))
    ]
    if len(sources) == 1 and (sources[0].itemsize, link.itemsize) in ((2, 2), (2, 4), (4, 2)):
        stored.insert(0, half_patterns(sources[0], link))
        dtypes.insert(0, dtypes[0])
        lengths.insert(0, len(stored[0]))
    places, numel = places_of(lengths, aligned)
    check_pack(stored, dtypes, DTYPES[link], places, numel, (0,) if aligned else (0, 1, 3), with_norm=sums)


def check_scatter(dtype: torch.dtype, aligned: bool) -> None:
    """Scatter whole blocks and parts, large and small."""
    lengths = [4096, 0, 1, 5, 4097, 9000, 4095, *range(2, 30)]
    places, numel = places_of(lengths, aligned)
    kind = STORAGE[DTYPES[dtype]]
    rng = np.random.default_rng(numel)
    values = rng.integers(0, 256, numel * kind().itemsize, dtype=np.uint8).view(kind)
    starts = (0,) if aligned else (0, 1, 3)
    buffer = Placed(values, dtype, starts[-1])
    targets = [Placed(np.zeros(n, kind), dtype, starts[row % len(starts)]) for row, n in enumerate(lengths)]
    sources = [buffer.tensor[place : place + length] for place, length in zip(places, lengths, strict=True)]
    gpu.scatter_values(sources, [one.tensor for one in targets])
    assert buffer.is_unchanged()
    for one, place, length in zip(targets, places, lengths, strict=True):
        assert one.outside_is_unchanged()
        assert one.read().tobytes() == values[place : place + length].tobytes()


CHECKS: dict[str, Callable[..., None]] = {
    "adam_kernel": check_adam,
    "pack_kernel": check_packing,
    "scatter_kernel": check_scatter,
}

SCATTERED = Request("sm_90", "scatter_kernel", (torch.float32, True))


@pytest.fixture(scope="module")
def compilers(request, tmp_path_factory):
    """Compile what the chosen tests look up."""
    requests = [*requests_of(request), SCATTERED]
    compilers = Compilers(requests, tmp_path_factory.mktemp("triton"), assembles=False, together=64)
    yield compilers
    compilers.close()


def check(request: Request, code: Code) -> None:
    """Check that a variant has the bits of the CPU, and that every instruction was executed for that."""
    with executing(code) as executed:
        CHECKS[request.kernel](*request.arguments)
    assert len(executed) == len(ptx.parse(code.ptx).instructions)


def of_adam(targets: Iterable[str], variants: Iterable[tuple[Any, ...]]) -> Callable[[Any], Any]:
    """Return `over` for variants of the update."""
    names = "gradient parameter form scale maximize decoupled l2 amsgrad round aligned"
    return over(
        targets,
        names,
        ((*dtypes, form, *(flag in flags for flag in Flag), aligned) for *dtypes, form, flags, aligned in variants),
    )


def over(targets: Iterable[str], names: str, variants: Iterable[tuple[Any, ...]]) -> Callable[[Any], Any]:
    """Return the decorator of a test that looks up its parameters by `request_of`."""
    fixtures = pytest.mark.usefixtures("target", *names.split())
    few = pytest.mark.covering(1)  # every value, not every pair: the compiler takes up to a second for each variant
    return lambda test: few(fixtures(cases(targets, names, variants)(test)))


@of_adam(CHOSEN, ADAM)
def test_adam_kernel(request, compilers):
    check(request_of(request.node), compilers.code(request_of(request.node)))


@of_adam(["sm_100"], [one for one in ADAM if Format.MOMENTS_8BIT in one[2]])
def test_adam_kernel_with_8bit_moments(request, compilers):
    """`abs.f32`, which only this target has, may make any NaN: the bits depend on none."""
    code = compilers.code(request_of(request.node))
    assert "abs.f32" in code.ptx
    for nan in (0x7FFFFFFF, 0xFFFFFFFF):
        with mock.patch.dict(ptx.CANONICAL_NAN, f32=nan):
            check(request_of(request.node), code)


@over(CHOSEN, "sources link sums aligned", PACK)
def test_pack_kernel(request, compilers):
    check(request_of(request.node), compilers.code(request_of(request.node)))


@over(CHOSEN, "dtype aligned", SCATTER)
def test_scatter_kernel(request, compilers):
    check(request_of(request.node), compilers.code(request_of(request.node)))


# ---- more than 32 bits ---------------------------------------------------------------------------------------------

FAR = 2**32


def vast(numel: int) -> torch.Tensor:
    """Return address space, which gets memory where it is written."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000  # MAP_NORESERVE, which Python before 3.13 does not name
    return torch.frombuffer(mmap.mmap(-1, numel * 4, flags), dtype=torch.float32)


def test_tensors_of_more_than_32_bits(compilers):
    """Some of the programs scatter one, which may access their parts alone."""
    code = compilers.code(SCATTERED)
    numel, block = FAR + 5001, code.constants["BLOCK"]
    programs = [0, FAR // 2 // block - 1, FAR // 2 // block, FAR // block, FAR // block + 1]
    source, target = vast(numel), vast(numel)
    windows = [slice(program * block, min((program + 1) * block, numel)) for program in programs]
    for number, window in enumerate(windows):
        source[window] = torch.arange(float(window.stop - window.start)) + number
    parts = [(one[window].data_ptr(), one[window].nbytes) for one in (source, target) for window in windows]
    with noted_launches() as launches:
        gpu.scatter_values([source], [target])
    (launch,) = launches
    assert launch.grid == (programs[-1] + 1,)
    execute(launch, code, ptx.parse(code.ptx), parts, programs)
    for window in windows:
        assert torch.equal(source[window], target[window])


# ---- planted faults ------------------------------------------------------------------------------------------------

PLANTS, SHARE = 300, 0.95
SECONDS = 60.0  # of a check that takes a few, until it counts as one that hangs


def chosen_requests() -> list[Request]:
    """Return variants of all kernels, mostly of the update, for all targets."""
    choices = random.Random(0)
    made = [("adam_kernel", one) for one in choices.sample(ADAM, 8)] + [
        ("pack_kernel", one) for one in choices.sample(PACK, 4)
    ]
    made += [("scatter_kernel", one) for one in choices.sample(SCATTER, 2)]
    return [Request(("sm_90", "sm_80", "sm_100")[number % 3], *one) for number, one in enumerate(made)]


class HangError(Exception):
    """A check takes many times as long as without a fault."""


def reason_of(request: Request, code: Code, kernel: ptx.Kernel) -> str | None:
    """Return what notices a fault; None where nothing does."""

    def hang(*_: object) -> None:
        raise HangError

    before = signal.signal(signal.SIGALRM, hang)
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        with mock.patch.object(ptx, "parse", return_value=kernel), executing(code):
            CHECKS[request.kernel](*request.arguments)
    except ptx.ExecutionError as error:
        return "refused" if "not known" in str(error) else "executor"
    except AssertionError:
        return "bits"
    except HangError:
        return "hang"
    except Exception as error:  # numpy's, of numbers that fit nothing
        return type(error).__name__
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    return None


@pytest.mark.deep
def test_planted_faults_are_noticed(tmp_path):
    """Also by refusing what is no longer an instruction that is known to round as written."""
    torch.set_num_threads(1)
    every = chosen_requests()
    compilers = Compilers(every, tmp_path, assembles=False, together=7)
    choices = [random.Random(seed) for seed in range(2)]
    outcomes: Counter[tuple[str, str]] = Counter()
    survivors = []
    for request in every:
        check(request, compilers.code(request))
    while outcomes.total() < PLANTS:
        choice = choices[outcomes.total() * len(choices) // PLANTS].choice
        request, rule = choice(every), RULES[outcomes.total() % len(RULES)]
        code = compilers.code(request)
        kernel = ptx.parse(code.ptx)
        changes = [*rule(kernel)]
        if not changes:  # as roundings where only bytes are moved
            continue
        at, changed = choice(changes)
        original = kernel.instructions[at]
        kernel.instructions[at] = changed
        reason = reason_of(request, code, kernel)
        outcomes[rule.__name__, reason or "nothing"] += 1
        if reason is None:
            survivors.append(
                f"{request.target} {request.kernel} {original.place} {rule.__name__}: {shown(original, changed)}"
            )
    compilers.close()
    lines = [f"{rule}: {reason} {count}" for (rule, reason), count in sorted(outcomes.items())]
    sys.stdout.write("\n".join(["", *lines, *survivors, ""]))
    assert len(survivors) <= (1 - SHARE) * PLANTS, survivors
