"""Scattering: every element of the buffer reaches its tensor, bit by bit, by Triton and by plain torch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from gpu_arrays import (
    BACKENDS,
    DEVICE,
    TORCH_DTYPES,
    Launches,
    Placed,
    Request,
    asked_for,
    can_compile,
    compiled,
    count,
    needs_triton,
    offsets_with_gaps,
)
from hypothesis import given
from hypothesis import strategies as st
from kernel_arrays import STORAGE
from strategies import lengths

from superadam import gpu
from superadam.gpu import scatter
from superadam.native import Dtype


@pytest.fixture(params=BACKENDS)
def implementation(request: pytest.FixtureRequest) -> Iterator[str]:
    with asked_for(request.param):
        yield request.param


@given(st.data())
def test_every_element_arrives(data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from(sorted(TORCH_DTYPES)), "dtype")
    sizes = data.draw(st.lists(lengths(), max_size=6), "lengths")
    gaps = data.draw(st.sampled_from([(), (64,), (3, 0, 40)]), "gaps")
    places, numel = offsets_with_gaps(sizes, gaps, data.draw(st.permutations(range(len(sizes))), "order"))
    starts = data.draw(st.sampled_from([(0,), (0, 1, 3)]), "starts")
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1), "seed"))
    stored = STORAGE[dtype]
    values = rng.integers(0, 256, numel * stored().itemsize, dtype=np.uint8).view(stored)
    for name in BACKENDS:
        buffer = Placed(values, dtype, starts[-1])
        targets = [Placed(np.zeros(n, stored), dtype, starts[i % len(starts)]) for i, n in enumerate(sizes)]
        with asked_for(name):
            gpu.scatter_values(buffer.tensor, places, [one.tensor for one in targets])
        assert buffer.is_unchanged()
        for one, place, size in zip(targets, places, sizes, strict=True):
            assert one.outside_is_unchanged()
            assert one.read().tobytes() == values[place : place + size].tobytes()


@needs_triton
def test_many_tensors_take_one_launch() -> None:
    launches = Launches(scatter.scatter_kernel)
    targets = [torch.zeros(1 + n % 7, device=DEVICE) for n in range(100)]
    sizes = [one.numel() for one in targets]
    places, numel = offsets_with_gaps(sizes, (), range(100))
    buffer = torch.arange(float(numel), device=DEVICE)
    with asked_for("triton"), mock.patch.object(scatter, "scatter_kernel", launches):
        gpu.scatter_values(buffer, places, targets)
    assert launches.grids == [(100,)]
    assert torch.cat(targets).tolist() == list(range(sum(sizes)))


def test_layouts_and_version_counters(implementation: str) -> None:
    parameter = torch.nn.Parameter(torch.zeros(2, 3, 4, device=DEVICE).permute(2, 0, 1))
    version = parameter._version
    gpu.scatter_values(torch.arange(30.0, device=DEVICE), [3], [parameter])
    assert parameter.data.permute(1, 2, 0).flatten().tolist() == list(range(3, 27))
    assert parameter._version == version


def test_nothing_to_scatter_is_allowed(implementation: str) -> None:
    buffer = torch.zeros(0, device=DEVICE)
    gpu.scatter_values(buffer, [], [])
    gpu.scatter_values(buffer, [0, 0], [buffer, buffer])


def test_what_does_not_fit_is_refused() -> None:
    good, buffer = torch.zeros(10, device=DEVICE), torch.ones(30, device=DEVICE)

    def refused(error: type[Exception], message: str, *arguments: object) -> None:
        with pytest.raises(error, match=message):
            gpu.scatter_values(*arguments)  # type: ignore[arg-type]
        assert not good.any()

    refused(TypeError, "buffer is int64", buffer.long(), [0], [good])
    refused(ValueError, "buffer has shape", buffer.view(5, 6), [0], [good])
    refused(ValueError, "buffer is on meta", torch.empty(30, device="meta"), [0], [good])
    refused(TypeError, "tensor 1 is float16, expected float32 as the buffer", buffer, [0, 10], [good, good.half()])
    refused(ValueError, "tensor 1 is on meta", buffer, [0, 10], [good, torch.empty(10, device="meta")])
    refused(ValueError, "tensor 0 has shape.*without gaps", buffer, [0], [torch.zeros(20, device=DEVICE)[::2]])
    refused(ValueError, "1 offsets for 2 tensors", buffer, [0], [good, good])
    refused(ValueError, "outside buffer of 30 elements", buffer, [21], [good])


@pytest.mark.subprocess
@pytest.mark.skipif(not can_compile(), reason="this Triton cannot compile for NVIDIA's GPUs")
def test_compiled_code_moves_sixteen_bytes_at_once(tmp_path: Path) -> None:
    types = {"table": "*i64", "tensors": "i32", "steps": "i32", "source": "i64"}
    constants = {"DTYPE": int(Dtype.BFLOAT16), "BYTES": 2, "IS_ALIGNED": True, "BLOCK": scatter.BLOCK}
    (code,) = compiled("superadam.gpu.scatter", [Request("scatter_kernel", types, constants)], str(tmp_path))
    assert count(code, r"ld\.global.*\.v4\.b32") > 0
    assert count(code, r"ld\.global.*\.v4\.b32") == count(code, r"st\.global.*\.v4\.b32")
