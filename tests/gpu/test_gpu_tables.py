"""Tables that stay on the device: what they were checked and uploaded for is what is launched, and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.gpu_arrays import DEVICE, needs_triton
from torch import Tensor

from superadam import gpu
from superadam.gpu import tables
from superadam.kernels.hyperparameters import Coefficients, Hyperparameters
from superadam.kernels.resident_step import ResidentStep

HYPER = Hyperparameters(1e-3, 0.9, 0.999, 1e-8, 0.1, amsgrad=False, maximize=False, decoupled_weight_decay=True)
LARGEST = Hyperparameters(1e-3, 0.9, 0.999, 1e-8, 0.0, amsgrad=True, maximize=True, decoupled_weight_decay=False)


def ramp(numel: int, dtype: torch.dtype = torch.float32, begin: float = 1.0) -> Tensor:
    return (begin + torch.arange(numel, device=DEVICE) / 8).to(dtype)


def pack(tensors: Sequence[Tensor], cache: Any) -> list[Tensor]:
    """Pack with a norm; return what was written."""
    offsets = [64 * position for position in range(len(tensors))]
    buffer = torch.zeros(64 * len(tensors), dtype=torch.float32, device=DEVICE)
    sums = torch.zeros(len(tensors), dtype=torch.float64, device=DEVICE)
    counts = torch.zeros(len(tensors), dtype=torch.int64, device=DEVICE)
    gpu.pack_gradients(tensors, offsets, buffer, sums, counts, cache)
    return [buffer, sums, counts]


def scatter(tensors: Sequence[Tensor], cache: Any) -> list[Tensor]:
    targets = [torch.empty_like(tensor) for tensor in tensors]
    gpu.scatter_values(tensors, targets, cache)
    return targets


def update(tensors: Sequence[Tensor], cache: Any) -> list[Tensor]:
    """Make two steps with each tensor as the gradient; every second parameter keeps a maximum."""
    steps = []
    for position, tensor in enumerate(tensors):
        state = [ramp(tensor.numel(), begin=float(number)) for number in range(4)]
        largest = state[3] if position % 2 else None
        steps.append(ResidentStep(*state[:3], largest, tensor, torch.zeros_like(tensor), position % 2))
    for number in (1, 2):
        gpu.update(steps, [Coefficients.at_step(one, number) for one in (HYPER, LARGEST)], cache)
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
    "with gaps": lambda: ramp(24)[::2],
    "double": lambda: ramp(12, torch.float64),
    "integers": lambda: ramp(12).long(),
    "sparse": lambda: ramp(12).to_sparse(),
    "meta": lambda: torch.empty(12, device="meta"),
}


def outcome(operation: Callable[..., list[Tensor]], tensors: Sequence[Tensor], cache: Any) -> Any:
    """Return the bits that were written, or the error."""
    try:
        return [tensor.double().tolist() for tensor in operation(tensors, cache)]
    except (TypeError, ValueError) as error:
        return str(error)


@pytest.mark.slow
@needs_triton
@pytest.mark.parametrize("name", OPERATIONS)
@settings(max_examples=settings.default.max_examples // 2)
@given(calls=st.lists(st.lists(st.sampled_from(sorted(TENSORS)), min_size=1, max_size=3), min_size=2, max_size=8))
def test_launches_after_others_write_and_refuse_the_same(name: str, calls: list[list[str]]) -> None:
    operation, cache = OPERATIONS[name], gpu.LaunchCache[Any]()
    for names in calls:
        tensors = [TENSORS[one]() for one in names]
        assert outcome(operation, tensors, cache) == outcome(operation, tensors, None)


@needs_triton
def test_updates_after_others_have_flags_and_dtypes_of_their_own() -> None:
    """Although their tensors, or all but the dtypes, are alike."""
    cache = gpu.LaunchCache[Any]()

    def written(hyper: Hyperparameters, dtype: torch.dtype, cache: Any) -> list[Any]:
        state = [ramp(12, begin=float(number)) for number in range(4)]
        step = ResidentStep(*state, ramp(12, dtype), ramp(12, dtype), 0)
        gpu.update([step], [Coefficients.at_step(hyper, 1)], cache)
        return [tensor.double().tolist() for tensor in (*state, step.parameter)]

    for hyper, dtype in ((HYPER, torch.bfloat16), (LARGEST, torch.bfloat16), (LARGEST, torch.float16)):
        assert written(hyper, dtype, cache) == written(hyper, dtype, None)


@needs_triton
@pytest.mark.parametrize(
    ("offset", "dtype", "length"),
    [(3, torch.float32, 20), (0, torch.float64, 20), (0, torch.float32, 11)],
    ids=["offset", "dtype", "length"],
)
def test_a_pack_after_another_is_checked_for_its_own_buffer(offset: int, dtype: torch.dtype, length: int) -> None:
    """Although its gradients are alike."""

    def packed(offset: int, dtype: torch.dtype, length: int, cache: Any) -> list[Tensor]:
        buffer = torch.zeros(length, dtype=dtype, device=DEVICE)
        gpu.pack_gradients([ramp(12)], [offset], buffer, cache=cache)
        return [buffer]

    cache = gpu.LaunchCache[Any]()
    packed(0, torch.float32, 20, cache)
    expected = outcome(lambda _, cache: packed(offset, dtype, length, cache), [], None)
    assert outcome(lambda _, cache: packed(offset, dtype, length, cache), [], cache) == expected


@needs_triton
@pytest.mark.parametrize("name", OPERATIONS)
def test_only_what_is_new_is_checked_and_uploaded(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    checks: list[Tensor] = []
    uploads: list[Any] = []
    module = __import__(f"superadam.gpu.{'steps' if name == 'update' else name}", fromlist=["check_tensor"])
    check = module.check_tensor
    monkeypatch.setattr(
        module, "check_tensor", lambda one, *rest, **more: (checks.append(one), check(one, *rest, **more))
    )
    upload = tables.upload
    monkeypatch.setattr(tables, "upload", lambda array, device: (uploads.append(array), upload(array, device))[1])
    cache, tensors = gpu.LaunchCache[Any](), [ramp(12), ramp(5, torch.float32)]
    held = []  # so that no address is used again

    def run(tensors: Sequence[Tensor]) -> tuple[bool, bool]:
        """Return whether anything was checked, and uploaded."""
        checks.clear()
        uploads.clear()
        held.append(OPERATIONS[name](tensors, cache))
        return bool(checks), bool(uploads)

    assert run(tensors) == (True, True)
    assert run([one.clone() for one in tensors])[0] is False
    assert run([ramp(12), ramp(6)]) == (True, True)
    if name == "pack":
        assert run(tensors) == (False, True)
        assert run(tensors) == (False, False)
        tensors[0].set_(ramp(12))
        assert run(tensors) == (False, True)
        tensors[0].set_(ramp(24)[::2])
        with pytest.raises(ValueError, match="without gaps"):
            run(tensors)


def test_memory_that_is_gone_is_refused_although_its_tensor_is_known() -> None:
    cache, source, target = gpu.LaunchCache[Any](), ramp(12), ramp(12)
    gpu.scatter_values([source], [target], cache)
    target.untyped_storage().resize_(0)
    with pytest.raises(ValueError, match="tensor 0 of 12 elements has no memory"):
        gpu.scatter_values([source], [target], cache)


def test_table_of_another_stream_is_another_upload(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing orders the streams, neither at the upload nor when its memory is used again."""
    uploads: list[Any] = []
    monkeypatch.setattr(tables, "upload", lambda array, device: (uploads.append(array), torch.from_numpy(array))[1])
    now = SimpleNamespace(cuda_stream=1)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: now)
    table = tables.Table(np.array([5, 0, 3000]), 1024, torch.device("cuda", 0))
    assert (table.tensors, table.blocks, table.steps) == (2, 4, 1)
    rows = np.array([[64, 0, 128]])
    first = table.entries(rows)
    assert first.tolist() == [[0, 1], [5, 3000], [64, 128]]
    assert table.entries(rows.copy()) is first
    now.cuda_stream = 2
    assert table.entries(rows) is not first
    assert table.entries(rows + 1).tolist() == [[0, 1], [5, 3000], [65, 129]]
    assert len(uploads) == 3


def test_few_launches_are_remembered_and_none_that_failed() -> None:
    cache = gpu.LaunchCache[int]()
    made: list[int] = []

    def check(number: int) -> int:
        made.append(number)
        return 1 // number

    for number in (1, 2, 1, 2, 0, 1, *range(3, 3 + tables.KEPT), 1):
        try:
            cache.checked(number, lambda number=number: check(number))  # type: ignore[misc]
        except ZeroDivisionError:
            assert number == 0
    assert made == [1, 2, 0, *range(3, 3 + tables.KEPT), 1]
