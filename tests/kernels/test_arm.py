"""NEON and SVE have the bits of the scalar kernels at every vector length, stay inside their arrays, and need no SVE.

The kernels are compiled as those of the wheel, and run in an emulator; what they must compute comes from the scalar
kernels of this machine. The emulator starts once for a batch of jobs, so the random jobs come from a seed, not from
Hypothesis.
"""

import os
import re
from collections.abc import Iterator

import numpy as np
import pytest
from arm import emulation
from arm.emulation import Cpu, EmulatedJob
from support import formula
from support.intervals import HALVES, drawn_case
from support.kernel_arrays import FORMATS, Job, differing, make_segment, variants
from support.listing import Listing
from support.strategies import Magnitudes

from superadam.kernels.hyperparameters import Coefficients, Hyperparameters
from superadam.kernels.native import Dtype, Format, Pass

ROWS = ["sve_bf16", "sve", "neon", "scalar"]
"""Instruction sets of aarch64, best first."""

RUNNABLE = {
    Cpu.CORTEX_A72: ["neon", "scalar"],
    Cpu.NEON: ["neon", "scalar"],
    Cpu.SVE_512_WITHOUT_BF16: ["sve", "neon", "scalar"],
    Cpu.SVE_128: ROWS,
    Cpu.SVE_256: ROWS,
    Cpu.SVE_384: ROWS,
    Cpu.SVE_512: ROWS,
    Cpu.SVE_2048: ROWS,
}

# Flush denormals, no NaN payloads, round to zero, alternative half precision: everything that a caller may have set.
HOSTILE_FPCR = 1 << 24 | 1 << 25 | 3 << 22 | 1 << 26


def name_of(value: Cpu | str) -> str:
    return value.name if isinstance(value, Cpu) else value


IS_DEEP = os.environ.get("SUPERADAM_DEEP") == "1"
SEED = int.from_bytes(os.urandom(4)) if IS_DEEP else 20_240_607


@pytest.fixture(scope="module", autouse=True)
def runner():
    """Return the runner, built; where the tools are missing, skip."""
    reason = emulation.missing_tools()
    if reason:
        pytest.skip(reason)
    return emulation.build()


def random_coefficients(rng: np.random.Generator, *, double: bool) -> Coefficients:
    hyper = Hyperparameters(
        lr=float(rng.choice([0.0, 1e-5, 1e-3, 1.0])),
        beta1=float(rng.choice([0.0, 0.3, 0.5, 0.9])),
        beta2=float(rng.choice([0.0, 0.9, 0.999])),
        eps=float(rng.choice([0.0, 1e-8, 1e-40])),
        weight_decay=float(rng.choice([0.0, 0.1])),
        amsgrad=bool(rng.integers(2)),
        maximize=bool(rng.integers(2)),
        decoupled_weight_decay=bool(rng.integers(2)),
    )
    step, scale, rounds = int(rng.integers(1, 100)), float(rng.choice([1.0, 0.37])), bool(rng.integers(2))
    return Coefficients.at_step(hyper, step, scale, rounds=rounds, double=double)


def random_job(rng: np.random.Generator, which: Pass, gradient: Dtype, out: Dtype, lengths: list[int]) -> Job:
    """Return a job of segments of these lengths, with coefficients, magnitudes and special values of its own each."""
    job = Job(which, [])
    for length in lengths:
        form = Format.PLAIN if gradient is Dtype.FLOAT64 else FORMATS[rng.integers(len(FORMATS))]
        form = Format.PLAIN if rng.integers(2) else form
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
        job.add(segment, [random_coefficients(rng, double=gradient is Dtype.FLOAT64) for _ in range(2)])
    return job


def all_jobs(rng: np.random.Generator) -> Iterator[EmulatedJob]:
    """Yield every pass and dtype, with all tails of a block, chunk edges and random lengths, before a guard or both."""
    for which in Pass:
        for number, (gradient, out) in enumerate(variants(which)):
            for at_end in (False, True) if IS_DEEP else (bool(number % 2),):
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


@pytest.fixture(scope="module")
def batch(tmp_path_factory):
    """Return a file of jobs, and the jobs after the scalar kernels of this machine have run them."""
    jobs = list(all_jobs(np.random.default_rng(SEED)))
    path = tmp_path_factory.mktemp("arm") / "jobs"
    emulation.write_jobs(path, jobs)
    for emulated in jobs:
        emulated.job.run("scalar")
    return path, jobs


DEEP = pytest.mark.deep  # as is every other length of vectors


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cpu", "isa"),
    [
        (Cpu.CORTEX_A72, "neon"),
        (Cpu.SVE_384, "sve"),
        (Cpu.SVE_256, "sve_bf16"),
        pytest.param(Cpu.CORTEX_A72, "scalar", marks=DEEP),
        pytest.param(Cpu.SVE_128, "sve", marks=DEEP),
        pytest.param(Cpu.SVE_512_WITHOUT_BF16, "sve", marks=DEEP),
        pytest.param(Cpu.SVE_128, "sve_bf16", marks=DEEP),
        pytest.param(Cpu.SVE_2048, "sve_bf16", marks=DEEP),
    ],
    ids=name_of,
)
def test_bits_of_the_scalar_kernels(cpu, isa, batch):
    """At every vector length, of which both SVE kernels share all but the rounding to bf16; and on the least CPUs."""
    path, jobs = batch
    for emulated, segments in zip(jobs, emulation.run_jobs(cpu, isa, path, jobs), strict=True):
        for segment, arrays in zip(emulated.job.segments, segments, strict=True):
            where = f"{emulated.job.which.name} {segment.gradient_dtype.name} {segment.out_dtype.name}, {SEED=}"
            expected = {name: segment.arrays[name].view for name in arrays}
            segment.compare(arrays, expected, f" in {where}, {segment.format!r}")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cpu", "isa"),
    [(Cpu.CORTEX_A72, "neon"), (Cpu.SVE_384, "sve"), (Cpu.SVE_128, "sve_bf16"), (Cpu.SVE_2048, "sve_bf16")],
    ids=name_of,
)
def test_lists_of_the_scalar_kernels(cpu, isa, listings):
    """The same elements are uncertain on every instruction set."""
    path, jobs, ran = listings
    for listing, (arrays,) in zip(ran, emulation.run_jobs(cpu, isa, path, jobs), strict=True):
        for name, expected in listing.listed().items():
            assert differing(arrays[f"listed {name}"], expected) == 0, f"{name} in {SEED=}"


@pytest.fixture(scope="module")
def listings(tmp_path_factory):
    """Return a file of jobs with lists, the jobs, and both after the scalar kernels of this machine have run them."""
    made = []
    rng = np.random.default_rng(SEED)
    for number, which in enumerate([Pass.SPECULATE, Pass.COMMIT_AND_SPECULATE] * 12):
        gradient, out = ((Dtype.FLOAT32, *HALVES)[number % 3], HALVES[number // 2 % 2])
        length = int(rng.integers(1, 70)) if number % 4 else formula.CHUNK + int(rng.integers(-17, 700))
        made.append(Listing(which, drawn_case(rng), gradient, out, length, length))
        made[-1].segment.uncertain = 1  # in the file, that there is a list
    jobs = [EmulatedJob(listing.job, at_end=bool(number % 2)) for number, listing in enumerate(made)]
    path = tmp_path_factory.mktemp("arm") / "lists"
    emulation.write_jobs(path, jobs)
    for listing in made:
        listing.run("scalar")
    return path, jobs, made


@pytest.mark.slow
@pytest.mark.parametrize("cpu", Cpu, ids=name_of)
def test_dispatch_knows_what_the_cpu_can_run(cpu):
    known = emulation.known_isas(cpu)
    assert list(known) == ROWS
    assert [name for name, status in known.items() if status == "runnable"] == RUNNABLE[cpu]
    assert set(known.values()) <= {"runnable", "not supported"}


@pytest.mark.parametrize("direction", ["overrun", "underrun"])
def test_the_guard_pages_guard(direction):
    """The runner that touches one byte too many dies of SIGSEGV."""
    assert emulation.emulate(Cpu.NEON, emulation.BUILD / "runner", direction).returncode == -11


SVE = re.compile(r"\b(z\d+\.[bhsd]|p\d+/[mz]|cnt[bhwd]|ptrue|whilel\w)\b")


def test_only_the_sve_kernels_use_sve():
    """Every other object stays at the baseline, so nothing beyond it can run before dispatch."""
    objects = [*(emulation.BUILD / "CMakeFiles/_kernels.dir").rglob("*.o")]
    with_sve = {path.name for path in objects if any(map(SVE.search, emulation.disassemble(path)))}
    assert len(objects) > 6
    assert with_sve == {"kernels_sve.c.o", "kernels_sve_bf16.c.o"}
