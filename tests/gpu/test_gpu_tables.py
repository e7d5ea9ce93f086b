"""Tables that stay on the device are those of launches that are alike, and of no others; memory may lack for them."""

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.gpu_arrays import DEVICE, needs_triton
from support.strategies import USUAL
from torch import Tensor

from superadam import gpu
from superadam.gpu import tables
from superadam.kernels.hyperparameters import Coefficients, Hyperparameters
from superadam.kernels.resident_step import ResidentStep

LARGEST = Hyperparameters(1e-3, 0.9, 0.999, 1e-8, 0.0, amsgrad=True, maximize=True, decoupled_weight_decay=False)


def ramp(numel: int, dtype: torch.dtype = torch.float32, begin: float = 1.0) -> Tensor:
    return (begin + torch.arange(numel, device=DEVICE) / 8).to(dtype)


def pack(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Pack those of the first one's dtype: a launch reads one."""
    tensors = [tensor for tensor in tensors if tensor.dtype == tensors[0].dtype]
    offsets = [64 * position for position in range(len(tensors))]
    buffer = torch.zeros(64 * len(tensors), dtype=torch.float32, device=DEVICE)
    sums = torch.zeros(len(tensors), dtype=torch.float64, device=DEVICE)
    counts = torch.zeros(len(tensors), dtype=torch.int64, device=DEVICE)
    gpu.pack_gradients(tensors, offsets, buffer, sums, counts)
    return [buffer, sums, counts]


def scatter(tensors: Sequence[Tensor]) -> list[Tensor]:
    targets = [torch.empty_like(tensor) for tensor in tensors]
    gpu.scatter_values(tensors, targets)
    return targets


def update(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Make two steps with each tensor as the gradient; every second parameter keeps a maximum."""
    steps = []
    for position, tensor in enumerate(tensors):
        state = [ramp(tensor.numel(), begin=float(number)) for number in range(4)]
        largest = state[3] if position % 2 else None
        steps.append(ResidentStep(*state[:3], largest, tensor, torch.zeros_like(tensor), position % 2))
    for number in (1, 2):
        gpu.update(steps, [Coefficients.at_step(one, number) for one in (USUAL, LARGEST)])
    return [tensor for step in steps for tensor in (step.master, step.exp_avg, step.exp_avg_sq, step.parameter)]


OPERATIONS = {"pack": pack, "scatter": scatter, "update": update}

TENSORS: dict[str, Callable[[], Tensor]] = {
    "plain": lambda: ramp(12),
    "longer": lambda: ramp(13),
    "empty": lambda: ramp(0),
    "bfloat16": lambda: ramp(12, torch.bfloat16),
    "matrix": lambda: ramp(12).view(3, 4),
    "transposed": lambda: ramp(12).view(3, 4).t(),
    "elsewhere": lambda: ramp(16)[3:15],
}


@pytest.mark.slow
@needs_triton
@pytest.mark.parametrize("name", OPERATIONS)
@settings(max_examples=max(settings.default.max_examples // 20, 1))
@given(calls=st.lists(st.lists(st.sampled_from(sorted(TENSORS)), min_size=1, max_size=3), min_size=2, max_size=8))
def test_launches_after_others_write_the_same(name, calls):
    lists = [[TENSORS[one]() for one in names] for names in calls]
    for tensors, written in zip(lists, [OPERATIONS[name](tensors) for tensors in lists], strict=True):
        tables._kept_upload.cache_clear()
        assert [one.tolist() for one in OPERATIONS[name](tensors)] == [one.tolist() for one in written]


@needs_triton
def test_only_what_is_new_is_uploaded(monkeypatch):
    upload = Mock(wraps=tables.upload)
    monkeypatch.setattr(tables, "upload", upload)
    tensors = [ramp(12), ramp(5)]

    def run(tensors):
        upload.reset_mock()
        pack(tensors)
        return upload.call_count

    assert [run(tensors), run(tensors), run([ramp(12), ramp(6)]), run(tensors)] == [1, 0, 1, 0]
    tensors[0].set_(ramp(12))
    assert run(tensors) == 1


def test_table_of_another_stream_is_another_upload(monkeypatch):
    """Nothing orders the streams, neither at the upload nor when its memory is used again."""
    upload = Mock(side_effect=lambda array, device: torch.from_numpy(array))
    monkeypatch.setattr(tables, "upload", upload)
    now = SimpleNamespace(cuda_stream=1)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: now)
    tensors = [torch.empty(numel) for numel in (5, 0, 3000)]

    def table(rows):
        return tables.make_table(tensors, 1024, np.array(rows), torch.device("cuda", 0))

    blocks, (first, *numbers) = table([[64, 0, 128]])
    assert (blocks, *numbers) == (4, 2, 1)
    assert first.tolist() == [0, 1, 5, 3000, 64, 128]
    assert table([[64, 0, 128]])[1][0] is first
    now.cuda_stream = 2
    assert table([[64, 0, 128]])[1][0] is not first
    assert table([[65, 0, 129]])[1][0].tolist() == [0, 1, 5, 3000, 65, 129]
    assert upload.call_count == 3
    tables._kept_upload.cache_clear()


def test_a_table_is_uploaded_also_where_no_memory_can_be_pinned(monkeypatch):
    """New values are published when a step is made already."""
    monkeypatch.setattr(Tensor, "pin_memory", Mock(side_effect=RuntimeError("CUDA error: operation not permitted")))
    uploaded = tables.upload(np.arange(3), torch.device("meta"))
    assert (uploaded.dtype, uploaded.shape, uploaded.device.type) == (torch.int64, (3,), "meta")


@pytest.fixture
def uploads(monkeypatch):
    """All tables that were uploaded, of which only the first finds memory."""
    asked = []

    def short(array, device, upload=tables.upload):
        asked.append(array)
        if len(asked) > 1:
            raise torch.OutOfMemoryError("planted")
        return upload(array, device)

    monkeypatch.setattr(tables, "upload", short)
    return asked


def test_values_are_scattered_without_memory_for_a_table(implementation, uploads):
    dtypes = (torch.float32, torch.bfloat16, torch.float64)
    targets = [torch.zeros(5, 7, dtype=dtype, device=DEVICE) for dtype in dtypes]
    sources = [torch.randn(5, 7, device=DEVICE).to(dtype) for dtype in dtypes]
    gpu.scatter_values([one.clone() for one in sources], targets)
    assert len(uploads) == (2 if implementation == "triton" else 0)
    assert all(map(torch.equal, targets, sources))


@needs_triton
def test_update_writes_nothing_where_a_table_finds_no_memory(uploads):
    state, halves = torch.ones(2, 3, 9, device=DEVICE), torch.ones(9, device=DEVICE).bfloat16()
    steps = [ResidentStep(*one, None, half, half, 0) for one, half in zip(state, (halves, halves.half()), strict=True)]
    with pytest.raises(torch.OutOfMemoryError, match="planted"):
        gpu.update(steps, [Coefficients.at_step(USUAL, 1)])
    assert len(uploads) == 2
    assert (state == 1).all()
    assert all((step.parameter == 1).all() for step in steps)
