"""Every pass of the kernels, and the floor of its traffic, as microbenchmarks."""

from __future__ import annotations

import pytest
from measures.settings import out_dtype_of
from pytest_benchmark.fixture import BenchmarkFixture

from superadam.cli.bench import floor, passes
from superadam.cli.bench.arrays import PassArrays
from superadam.kernels import native
from superadam.kernels.native import Dtype, Pass
from superadam.kernels.traffic import bytes_per_element

GRADIENTS = (Dtype.FLOAT32, Dtype.BFLOAT16)
ROUNDS, WARM_UPS = 11, 2


@pytest.fixture(scope="module", params=GRADIENTS, ids=lambda dtype: dtype.name.lower())
def arrays(request: pytest.FixtureRequest, numel: int) -> PassArrays:
    return PassArrays(native.chunk_count(numel) * native.CHUNK, request.param, out_dtype_of(request.param))


def note(benchmark: BenchmarkFixture, arrays: PassArrays, which: Pass) -> None:
    """Group a benchmark with its floor, and say what it moves."""
    benchmark.group = f"{which.name.lower()} {arrays.gradient_dtype.name.lower()}"
    benchmark.extra_info["numel"] = arrays.numel
    benchmark.extra_info["bytes"] = arrays.numel * bytes_per_element(which, arrays.gradient_dtype, arrays.out_dtype)


@pytest.mark.parametrize("isa", native.available_isas())
@pytest.mark.parametrize(("which", "with_norm"), passes.PASSES, ids=lambda value: getattr(value, "name", str(value)))
def test_pass(benchmark: BenchmarkFixture, arrays: PassArrays, which: Pass, with_norm: bool, isa: str) -> None:
    note(benchmark, arrays, which)
    setting = passes.Setting(isa, native.get_num_threads(), arrays.gradient_dtype, arrays.out_dtype)
    action = passes.action(arrays, which, setting, with_norm=with_norm)
    benchmark.pedantic(action, rounds=ROUNDS, warmup_rounds=WARM_UPS)


@pytest.mark.parametrize("which", dict.fromkeys(which for which, _ in passes.PASSES), ids=lambda which: which.name)
def test_floor(benchmark: BenchmarkFixture, arrays: PassArrays, which: Pass) -> None:
    note(benchmark, arrays, which)
    threads = native.get_num_threads()
    setting = passes.Setting(native.active_isa(), threads, arrays.gradient_dtype, arrays.out_dtype)
    kernel = passes.action(arrays, which, setting, with_norm=which is Pass.NORM)
    variant = floor.find_floor(arrays, which, threads, kernel)
    benchmark.extra_info["variant"] = str(variant)
    benchmark.pedantic(floor.action(arrays, which, variant, threads), rounds=ROUNDS, warmup_rounds=WARM_UPS)
