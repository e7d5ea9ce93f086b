"""What tests check of the kernels of superadam.gpu, whether these are interpreted, compiled, or executed."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from support.gpu_arrays import DEVICE, TORCH_DTYPES, Array, Placed
from support.gpu_variants import stored_dtypes
from support.intervals import HALVES
from support.kernel_arrays import STORAGE, Job, Segment, differing, differing_stored, narrow, widen
from support.strategies import Magnitudes, random_array

from superadam import gpu
from superadam.kernels import native
from superadam.kernels.dtypes import DTYPES
from superadam.kernels.native import Dtype, Format, Pass
from superadam.kernels.resident_step import ResidentStep
from superadam.state.parameter import ARRAYS


def placed(segment: Segment, starts: Sequence[int]) -> dict[str, Placed]:
    dtypes = stored_dtypes(torch.float64 if segment.gradient_dtype is Dtype.FLOAT64 else torch.float32, segment.format)
    dtypes |= {"gradient": TORCH_DTYPES[segment.gradient_dtype], "out": TORCH_DTYPES[segment.out_dtype]}
    dtypes["max_exp_avg_sq"] = dtypes["exp_avg"]
    used = {name: array for name, array in segment.arrays.items() if name in dtypes}
    return {
        name: Placed(array.view.copy(), dtypes[name], starts[number % len(starts)])
        for number, (name, array) in enumerate(used.items())
    }


def resident_step(arrays: dict[str, Placed], coefficients: int, first_threshold: int = 0) -> ResidentStep:
    tensors: dict[str, Any] = {name: array.tensor for name, array in arrays.items()}
    tensors = {"gradient": tensors["gradient"], "parameter": tensors["out"], **dict.fromkeys(ARRAYS), **tensors}
    del tensors["out"]
    return ResidentStep(**tensors, coefficients=coefficients, first_threshold=first_threshold)


def check_against_cpu(job: Job, starts: Sequence[int] = (0,)) -> None:
    """Make the updates of a job on the device and on the CPU, and compare every byte."""
    arrays = [placed(segment, starts) for segment in job.segments]
    with np.errstate(all="ignore"):
        pairs = zip(job.segments, arrays, strict=True)
        steps = [resident_step(each, segment.coefficients, segment.first_threshold) for segment, each in pairs]
        gpu.update(steps, job.sets)
    replace(job, which=Pass.UPDATE).run(native.active_isa())
    for segment, each in zip(job.segments, arrays, strict=True):
        for name, one in each.items():
            assert one.outside_is_unchanged(), f"bytes around {name} were changed"
        assert each["gradient"].is_unchanged(), "the gradient was changed"
        expected = {name: segment.arrays[name].view.copy() for name in each}
        actual = {name: one.read() for name, one in each.items()}
        segment.compare(actual, expected)
        if Format.MOMENTS_8BIT in segment.format:  # codes are bytes, also of blocks that are NaN
            for name in ("exp_avg", "exp_avg_sq", "exp_avg_exponents", "exp_avg_sq_exponents"):
                assert np.array_equal(actual[name], expected[name]), f"codes in {name} differ"


def stored_gradient(seed: int, length: int, kind: Magnitudes, dtype: Dtype, sprinkle: bool) -> Array:
    rng = np.random.default_rng(seed)
    values = random_array(rng, length, kind, np.float64 if dtype is Dtype.FLOAT64 else np.float32)
    if sprinkle and length:
        values[rng.integers(0, length, 3)] = rng.choice([np.inf, -np.inf, np.nan], 3)
    return narrow(values, dtype)


def telling(dtype: Dtype, link: Dtype, step: int = 1) -> Array:
    """Return every half; or as fp32 those of `link`, what lies halfway between two, and next to that."""
    halves = np.arange(1 << 16, dtype=np.uint16)
    if dtype in HALVES:
        return halves
    every = widen(halves[::step], link).view(np.uint32)
    half = np.uint32(0x8000 if link is Dtype.BFLOAT16 else 0x1000)
    bits = np.concatenate([every, every | half, every | half - np.uint32(1), every | half + np.uint32(1)])
    denormal_ties = ((np.arange(1024) + 0.5) * 2.0**-24).astype(np.float32)
    return np.concatenate([bits.view(np.float32), denormal_ties, -denormal_ties])


def norms_of_cpu(stored: Sequence[Array], dtype: Dtype) -> tuple[Array, Array]:
    """Return what the CPU's NORM pass says of arrays: sums and counts, one after another."""
    chunks = [native.chunk_count(len(one)) for one in stored]
    sums, nonfinite = np.full(sum(chunks), -1.0), np.full(sum(chunks), -1, np.int64)
    table = np.zeros(len(stored), native.SEGMENT)
    for number, one in enumerate(stored):
        first = 8 * sum(chunks[:number])
        table[number]["gradient"], table[number]["length"] = one.ctypes.data, len(one)
        table[number]["sums"], table[number]["nonfinite"] = sums.ctypes.data + first, nonfinite.ctypes.data + first
        table[number]["gradient_dtype"] = dtype
    native.run(Pass.NORM, table)
    return sums, nonfinite


def check_pack(
    stored: Sequence[Array],
    dtype: Dtype,
    link: Dtype,
    places: Sequence[int],
    numel: int,
    starts: Sequence[int] = (0,),
    with_norm: bool | None = None,
) -> None:
    """Pack arrays with what runs at present, and compare every byte with the CPU's kernels and the oracle's casts."""
    gradients = [Placed(one, dtype, starts[number % len(starts)]) for number, one in enumerate(stored)]
    blank = np.frombuffer(b"\x5a" * (numel * STORAGE[link]().itemsize), STORAGE[link])
    destination = Placed(blank, link, starts[-1])
    wanted, arrived = blank.copy(), []
    for one, place in zip(stored, places, strict=True):
        arrived.append(one if dtype is link else narrow(widen(one, dtype), link))
        wanted[place : place + len(one)] = arrived[-1]
    sums, nonfinite = norms_of_cpu(arrived, link)
    got_sums = Placed(np.full(len(sums) + 1, -1.0), torch.float64)
    got_nonfinite = Placed(np.full(len(sums) + 1, -1, np.int64), torch.int64)
    if with_norm is None:
        with_norm = gpu.obstacle(DEVICE) is None
    norm = (got_sums.tensor, got_nonfinite.tensor) if with_norm else ()
    with np.errstate(all="ignore"):
        gpu.pack_gradients([one.tensor for one in gradients], places, destination.tensor, *norm)
    assert all(one.is_unchanged() for one in gradients)
    assert destination.outside_is_unchanged()
    assert differing_stored(destination.read(), wanted, link) == 0
    if not with_norm:
        assert got_sums.is_unchanged()
        assert got_nonfinite.is_unchanged()
        return
    assert differing(got_sums.read(), np.append(sums, -1.0)) == 0
    assert np.array_equal(got_nonfinite.read(), np.append(nonfinite, -1))


def check_scatter(
    kinds: Sequence[torch.dtype],
    lengths: Sequence[int],
    places: Sequence[int],
    numel: int,
    starts: Sequence[int],
    seed: int = 0,
) -> None:
    """Scatter parts of buffers, one of each dtype in turn, with what runs at present, and compare every byte."""
    rng = np.random.default_rng(seed)
    buffers = []
    for dtype in kinds:
        stored = rng.integers(0, 256, numel * dtype.itemsize, dtype=np.uint8).view(STORAGE[DTYPES[dtype]])
        buffers.append(Placed(stored, dtype, starts[-1]))
    targets, sources, expected = [], [], []
    for row, (length, place) in enumerate(zip(lengths, places, strict=True)):
        buffer = buffers[row % len(buffers)]
        sources.append(buffer.tensor[place : place + length])
        expected.append(buffer.view[place : place + length])
        targets.append(Placed(np.zeros_like(expected[-1]), buffer.tensor.dtype, starts[row % len(starts)]))
    gpu.scatter_values(sources, [one.tensor for one in targets])
    assert all(buffer.is_unchanged() for buffer in buffers)
    for one, values in zip(targets, expected, strict=True):
        assert one.outside_is_unchanged()
        assert one.read().tobytes() == values.tobytes()
