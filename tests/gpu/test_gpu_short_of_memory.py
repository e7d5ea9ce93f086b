"""Tables of launches for which memory is missing: values are published all the same, and no step is made in part."""

import pytest
import torch
from support.gpu_arrays import BACKENDS, DEVICE, asked_for, needs_triton

from superadam import gpu
from superadam.gpu import tables
from superadam.kernels.hyperparameters import Coefficients, Hyperparameters
from superadam.kernels.resident_step import ResidentStep

HYPER = Hyperparameters(1e-3, 0.9, 0.999, 1e-8, 0.1, amsgrad=False, maximize=False, decoupled_weight_decay=True)


@pytest.fixture
def uploads(monkeypatch):
    """All tables that were uploaded, of which only the first finds memory."""
    asked = []
    upload = tables.upload

    def short(array, device):
        asked.append(array)
        if len(asked) > 1:
            raise torch.OutOfMemoryError("planted")
        return upload(array, device)

    monkeypatch.setattr(tables, "upload", short)
    return asked


@pytest.mark.parametrize("implementation", BACKENDS)
def test_values_are_scattered_without_memory_for_a_table(implementation, uploads):
    dtypes = (torch.float32, torch.bfloat16, torch.float64)
    targets = [torch.zeros(5, 7, dtype=dtype, device=DEVICE) for dtype in dtypes]
    sources = [torch.randn(5, 7, device=DEVICE).to(dtype) for dtype in dtypes]
    with asked_for(implementation):
        gpu.scatter_values(sources, targets)
    assert len(uploads) == (2 if implementation == "triton" else 0)
    assert all(map(torch.equal, targets, sources))


@needs_triton
def test_update_writes_nothing_where_a_table_finds_no_memory(uploads):
    steps = [
        ResidentStep(
            *(torch.ones(9, device=DEVICE) for _ in range(3)),
            None,
            *([torch.ones(9, device=DEVICE, dtype=dtype)] * 2),
            0,
        )
        for dtype in (torch.bfloat16, torch.float16)
    ]
    with pytest.raises(torch.OutOfMemoryError, match="planted"):
        gpu.update(steps, [Coefficients.at_step(HYPER, 1, 1.0, double=False)])
    assert len(uploads) == 2
    assert all(bool((one == 1).all()) for step in steps for one in (step.master, step.exp_avg, step.parameter))
