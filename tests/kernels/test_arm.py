"""NEON and SVE have the bits of the scalar kernels at every vector length, stay inside their arrays, and need no SVE.

The kernels are compiled as those of the wheel, and run in an emulator; what they must compute comes from the scalar
kernels of this machine. The emulator starts once for a batch of jobs, so the random jobs come from a seed, not from
Hypothesis.
"""

import os
import re
import signal
from collections.abc import Iterator

import numpy as np
import pytest
from arm import emulation
from arm.emulation import Cpu, EmulatedJob
from support import formula
from support.deep import DEEP
from support.intervals import HALVES, drawn_case
from support.kernel_arrays import FORMATS, Job, differing, make_segment, variants
from support.listing import Listing
from support.strategies import Magnitudes

from superadam.kernels.hyperparameters import Coefficients, Hyperparameters
from superadam.kernels.native import Dtype, Format, Pass

ROWS = ["sve_bf16", "sve", "neon", "scalar"]
"""Instruction sets of aarch64, best first."""

RUNNABLE = dict.fromkeys(Cpu, ROWS) | {
    Cpu.CORTEX_A72: ["neon", "scalar"],
    Cpu.NEON: ["neon", "scalar"],
    Cpu.SVE_512_WITHOUT_BF16: ["sve", "neon", "scalar"],
}

# Flush denormals, no NaN payloads, round to zero, alternative half precision: everything that a caller may have set.
HOSTILE_FPCR = 1 << 24 | 1 << 25 | 3 << 22 | 1 << 26

SEED = int.from_bytes(os.urandom(4)) if DEEP else 20_240_607


@pytest.fixture(scope="module", autouse=True)
def runner():
    """Return the runner, built; where the tools are missing, skip."""
    reason = emulation.missing_tools()
    if reason:
        pytest.skip(reason)
    return emulation.build()


NUMBERS = ([0.0, 1e-5, 1e-3, 1.0], [0.0, 0.3, 0.5, 0.9], [0.0, 0.9, 0.999], [0.0, 1e-8, 1e-40], [0.0, 0.1])
"""Learning rates, betas, eps and weight decays."""


def random_coefficients(rng: np.random.Generator, *, double: bool) -> Coefficients:
    hyper = Hyperparameters(*(float(rng.choice(one)) for one in NUMBERS), *map(bool, rng.integers(2, size=3)))
    step, scale, rounds = int(rng.integers(1, 100)), float(rng.choice([1.0, 0.37])), bool(rng.integers(2))
    return Coefficients.at_step(hyper, step, scale, rounds=rounds, double=double)


def random_job(rng: np.random.Generator, which: Pass, gradient: Dtype, out: Dtype, lengths: list[int]) -> Job:
    """Return a job of segments of these lengths, with coefficients, magnitudes and special values of its own each."""
    job, double = Job(which, []), gradient is Dtype.FLOAT64
    for length in lengths:
        form = Format.PLAIN if double or rng.integers(2) else FORMATS[rng.integers(len(FORMATS))]
        kinds = list(rng.choice(np.array(list(Magnitudes), dtype=object), int(rng.integers(1, 4))))
        segment = make_segment(
            int(rng.integers(2**32)),
            length,
            gradient,
            out,
            kinds=kinds,
            norm=which is Pass.NORM or bool(rng.integers(2)),
            sprinkle=bool(rng.integers(4) == 0),
            form=form,
        )
        job.add(segment, [random_coefficients(rng, double=double) for _ in range(2)])
    return job


def all_jobs(rng: np.random.Generator) -> Iterator[EmulatedJob]:
    """Yield every pass and dtype, with all tails of a block, chunk edges and random lengths, before a guard or both."""
    for which in Pass:
        for number, (gradient, out) in enumerate(variants(which)):
            for at_end in (False, True) if DEEP else (bool(number % 2),):
                edges = [formula.CHUNK + int(rng.integers(-17, 18)), int(rng.integers(34, 3 * formula.CHUNK))]
                lengths = [*range(34), *map(int, rng.integers(34, 600, 3)), *edges]
                yield EmulatedJob(
                    random_job(rng, which, gradient, out, lengths),
                    stream=bool(rng.integers(2)),
                    at_end=at_end,
                    fpcr=0 if rng.integers(2) else HOSTILE_FPCR,
                )
    # Long enough for superadam_run to share it among three threads.
    long = [16 * formula.CHUNK + 5, 1, 0, 40 * formula.CHUNK]
    yield EmulatedJob(random_job(rng, Pass.UPDATE, Dtype.BFLOAT16, Dtype.BFLOAT16, long), threads=3, fpcr=HOSTILE_FPCR)


def all_listings(rng: np.random.Generator) -> Iterator[Listing]:
    """Yield passes that list uncertain elements, of a few and of more than a chunk."""
    for number, which in enumerate([Pass.SPECULATE, Pass.COMMIT_AND_SPECULATE] * 12):
        gradient, out = ((Dtype.FLOAT32, *HALVES)[number % 3], HALVES[number // 2 % 2])
        length = int(rng.integers(1, 70)) if number % 4 else formula.CHUNK + int(rng.integers(-17, 700))
        listing = Listing(which, drawn_case(rng), gradient, out, length, length)
        listing.segment.uncertain = 1  # in the file, that there is a list
        yield listing


@pytest.fixture(scope="module")
def batch(tmp_path_factory):
    """Return a file of jobs, these, and the lists of the last ones, all run by the scalar kernels of this machine."""
    rng = np.random.default_rng(SEED)
    jobs, listings = [*all_jobs(rng)], [*all_listings(rng)]
    path = tmp_path_factory.mktemp("arm") / "jobs"
    every = [*jobs, *(EmulatedJob(one.job, at_end=bool(number % 2)) for number, one in enumerate(listings))]
    emulation.write_jobs(path, every)
    for emulated in jobs:
        emulated.job.run("scalar")
    for listing in listings:
        listing.run("scalar")
    return path, every, listings


ONLY_DEEP = pytest.mark.deep  # as is every other length of vectors


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cpu", "isa"),
    [
        (Cpu.CORTEX_A72, "neon"),
        (Cpu.SVE_384, "sve"),
        (Cpu.SVE_128, "sve_bf16"),
        (Cpu.SVE_256, "sve_bf16"),
        (Cpu.SVE_2048, "sve_bf16"),
        pytest.param(Cpu.CORTEX_A72, "scalar", marks=ONLY_DEEP),
        pytest.param(Cpu.SVE_128, "sve", marks=ONLY_DEEP),
        pytest.param(Cpu.SVE_512_WITHOUT_BF16, "sve", marks=ONLY_DEEP),
    ],
    ids=lambda value: getattr(value, "name", value),
)
def test_bits_and_lists_of_the_scalar_kernels(cpu, isa, batch):
    """At every vector length, of which both SVE kernels share all but the rounding to bf16; and on the least CPUs."""
    path, jobs, listings = batch
    results = emulation.run_jobs(cpu, isa, path, jobs)
    for emulated, segments in zip(jobs, results, strict=True):
        for segment, arrays in zip(emulated.job.segments, segments, strict=True):
            where = f"{emulated.job.which.name} {segment.gradient_dtype.name} {segment.out_dtype.name}, {SEED=}"
            expected = {name: segment.arrays[name].view for name in arrays.keys() & segment.arrays.keys()}
            segment.compare(arrays, expected, f" in {where}, {segment.format!r}")
    for listing, (arrays,) in zip(listings, results[-len(listings) :], strict=True):
        for name, expected in listing.listed().items():
            assert differing(arrays[f"listed {name}"], expected) == 0, f"{name} in {SEED=}"


@pytest.mark.slow
@pytest.mark.parametrize("cpu", Cpu, ids=lambda value: getattr(value, "name", value))
def test_dispatch_knows_what_the_cpu_can_run(cpu):
    known = emulation.known_isas(cpu)
    assert list(known) == ROWS
    assert [name for name, status in known.items() if status == "runnable"] == RUNNABLE[cpu]
    assert set(known.values()) <= {"runnable", "not supported"}


@pytest.mark.parametrize("direction", ["overrun", "underrun"])
def test_the_guard_pages_guard(direction):
    assert emulation.emulate(Cpu.NEON, emulation.BUILD / "runner", direction).returncode == -signal.SIGSEGV


SVE = re.compile(r"\b(z\d+\.[bhsd]|p\d+/[mz]|cnt[bhwd]|ptrue|whilel\w)\b")


def test_only_the_sve_kernels_use_sve():
    """Every other object stays at the baseline, so nothing beyond it can run before dispatch."""
    objects = [*(emulation.BUILD / "CMakeFiles/_kernels.dir").rglob("*.o")]
    with_sve = {path.name for path in objects if any(map(SVE.search, emulation.disassemble(path)))}
    assert len(objects) > 6
    assert with_sve == {"kernels_sve.c.o", "kernels_sve_bf16.c.o"}
